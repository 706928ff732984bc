"""Run folders for tests, written with the records' own writers: what a run leaves, without training one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fuse.records import (
    MetricsTable,
    OptimizerSummary,
    RunFolder,
    RunSummary,
    StepRows,
    write_manifest,
    write_summary,
)

PARAMETERS = 1000
BATCH, CONTEXT = 8, 128
STATE_BYTES = {"fp32": 8000, "bf16": 4000, "int8": 2062}
EVERY = 10  # optimizer steps between validations
TARGET = 2.0


def config(optimizer: str, state: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The resolved configuration of a run; ``changes`` are dotted keys with ``__`` for the dot."""
    settings: dict[str, Any] = {
        "optimizer": {"name": optimizer, "_target_": f"somewhere.{optimizer}", "lr": 2e-3},
        "state": {"format": state, "patterns": None},
        "master": "none",
        "kernel": "auto",
        "precision": "32-true",
        "model": {"_target_": "lightning_fuse.recipes.gpt.GPT", "width": 64},
        "data": {"_target_": "lightning_fuse.recipes.byte_lm.ByteData", "batch_size": BATCH, "context": CONTEXT},
        "trainer": {"max_steps": 40, "devices": 1, "accumulate_grad_batches": 1},
        "callbacks": {"target": {"metric": "val/loss", "target": TARGET, "mode": "min"}},
        "recipe": {"name": "byte_lm", "monitor": "val/loss", "mode": "min"},
        "seed": seed,
        "run_folder": f"somewhere/{optimizer}_{state}_{seed}",
    }
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        place = settings
        for key in path:
            place = place[key]
        place[last] = value
    return settings


def write_run(
    folder: Path,
    optimizer: str = "adamw_torch",
    state: str = "fp32",
    seed: int = 0,
    *,
    losses: Sequence[float] = (4.0, 3.0, 1.9, 1.7),
    step_ms: float = 100.0,
    optimizer_ms: float = 2.0,
    skips: Sequence[int] = (),
    scale: float | None = None,
    status: str | None = "finished",
    reason: str | None = None,
    data_hash: str | None = "sha256:one",
    cpu: str = "a processor",
    resumed: bool = False,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Writes a run that validated every ``EVERY`` steps with the given losses.

    Args:
        folder: Where.
        optimizer: The word.
        state: The word.
        seed: The seed.
        losses: ``val/loss`` at steps EVERY, 2 EVERY, …
        step_ms: Train milliseconds per step.
        optimizer_ms: Of each optimizer step.
        skips: Steps that were skipped as non-finite.
        scale: First loss scale; it halves at each skip. None for none.
        status: Of the summary; None writes no summary.
        reason: Of the summary.
        data_hash: Of the manifest.
        cpu: Of the manifest.
        resumed: Add a resume to the manifest.
        settings: Dotted keys with ``__``, see ``config``.

    Returns:
        The folder.
    """
    files = RunFolder(folder).create()
    write_manifest(
        files.manifest,
        {
            "config": config(optimizer, state, seed, **(settings or {})),
            "command": ["train.py"],
            "seed": seed,
            "started": "2026-01-01T00:00:00+00:00",
            "versions": {"python": "3.11", "torch": "2.13.0"},
            "hardware": {"cpu": cpu, "usable_cores": 2, "gpus": []},
            "data_hash": data_hash,
            "git": {"revision": "0" * 40, "changed": False},
            "resumed_from": [{"checkpoint": "last.ckpt", "global_step": 20, "config_changes": {}}] if resumed else [],
        },
    )
    steps = EVERY * len(losses)
    updates = _write_steps(files, steps, skips, scale, step_ms, optimizer_ms)
    table = MetricsTable(files.metrics)
    for index, loss in enumerate(losses, start=1):
        step = index * EVERY
        seconds = step * step_ms / 1000
        metrics = {"train/loss": 2 * loss, "val/loss": loss}
        table.record(step=step, update=updates[step], epoch=0, train_seconds=seconds, metrics=metrics)
    (files.checkpoints / "last.ckpt").write_bytes(b"x" * 5000)
    if status is not None:
        write_summary(files.summary, _summary(files, optimizer, state, losses, updates, skips, step_ms, status, reason))
    return files.path


def _write_steps(
    files: RunFolder, steps: int, skips: Sequence[int], scale: float | None, step_ms: float, optimizer_ms: float
) -> dict[int, int]:
    rows, update, updates = StepRows(files.steps), 0, {}
    for step in range(1, steps + 1):
        applied = step not in skips
        update += applied
        updates[step] = update
        after = scale if applied or scale is None else scale / 2
        rows.append(
            {
                "global_step": step,
                "update": update,
                "applied": applied,
                "reason": "ok" if applied else "nonfinite",
                "grad_norm": 1.0 if applied else math.inf,
                "clip_coef": 1.0,
                "loss_scale_before": scale,
                "loss_scale_after": after,
                "window_size": 1,
                "optimizer": 0,
                "optimizer_ms": optimizer_ms,
                "train_seconds": step * step_ms / 1000,
            }
        )
        scale = after
    rows.close()
    return updates


def _summary(
    files: RunFolder,
    optimizer: str,
    state: str,
    losses: Sequence[float],
    updates: dict[int, int],
    skips: Sequence[int],
    step_ms: float,
    status: str,
    reason: str | None,
) -> RunSummary:
    steps = EVERY * len(losses)
    hit = next((index * EVERY for index, loss in enumerate(losses, start=1) if loss <= TARGET), None)
    target: dict[str, Any] = {"metric": "val/loss", "mode": "min", "target": TARGET, "reached": hit is not None}
    if hit is not None:
        seconds = hit * step_ms / 1000
        target |= {"train_seconds": seconds, "wall_seconds": seconds + 1, "updates": updates[hit], "value": 0.0}
    return RunSummary(
        status=status,
        reason=reason,
        global_step=steps,
        updates=updates[steps],
        skips={"nonfinite": len(skips)} if skips else {},
        optimizers=[OptimizerSummary(optimizer, parameters=PARAMETERS, state_bytes={"moments": STATE_BYTES[state]})],
        train_seconds=steps * step_ms / 1000,
        validation_seconds=1.0,
        wall_seconds=steps * step_ms / 1000 + 1,
        target=target,
        run_folder=str(files.path),
    )


def write_seeds(root: Path, optimizer: str, state: str, finals: Sequence[float], **given: Any) -> list[Path]:
    """One run per final loss, seeds 0, 1, …; ``given`` goes to ``write_run``."""
    return [
        write_run(root / f"{optimizer}_{state}_{seed}", optimizer, state, seed, losses=(4.0, 3.0, 1.9, final), **given)
        for seed, final in enumerate(finals)
    ]
