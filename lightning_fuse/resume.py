"""Where a run begins: at the beginning, or at a checkpoint.

``resume=FOLDER`` goes on with the run in that folder, in the same folder: it is the same run, so what it computes may
not change, only how and how long. ``resume=FILE`` starts a new run, in a new folder, from that checkpoint; whatever the
checkpoint fits may change.

Either way the configuration is the one the run was started with, plus what is given now: a resume needs no repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from lightning_fuse.config import Refusal, resolved
from lightning_fuse.records import find_checkpoint

CONFIG_FOLDER = ".hydra"  # folder of a run's configuration, as Hydra names it
CONFIG = f"{CONFIG_FOLDER}/config.yaml"
OVERRIDES = f"{CONFIG_FOLDER}/overrides.yaml"
# What Lightning writes into every checkpoint, and a resume needs.
CHECKPOINT_KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")
# Keys that a run may change when it goes on: how it is executed, watched and ended. All others decide what it computes.
FREE = (
    *("kernel", "strategy", "resume", "run_folder", "logger", "ledger", "data.num_workers"),
    *(
        f"callbacks.{name}"
        for name in ("fuse.max_updates", "monitor", "target", "progress", "best", "last", "profile", "memory")
    ),
    *("recipe.target", "recipe.max_steps", "recipe.module.sample_bytes"),
    *(f"trainer.{key}" for key in ("max_steps", "accelerator", "devices", "enable_progress_bar", "log_every_n_steps")),
)

Composer = Callable[[list[str]], DictConfig]


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        cfg: Its configuration.
        overrides: The words that compose it.
        checkpoint: What it loads; None begins at the beginning.
        global_step: Optimizer steps of the checkpoint.
        in_place: Whether it goes on in the folder of the run that it resumes.
    """

    cfg: DictConfig
    overrides: list[str]
    checkpoint: Path | None = None
    global_step: int = 0
    in_place: bool = False


def find_start(cfg: DictConfig, overrides: list[str], compose: Composer) -> Start:
    """Follows ``resume``.

    Args:
        cfg: As composed from the command line.
        overrides: The words of the command line.
        compose: Composes a configuration from words.

    Returns:
        Where the run begins, with the configuration of the run that it resumes plus what was given now.

    Raises:
        Refusal: There is no complete checkpoint there, it is not one of Lightning's, the run in that folder is another
            one than the one asked for, or it is finished.
    """
    if cfg.resume is None:
        return Start(cfg, overrides)
    given = Path(cfg.resume)
    try:
        found = find_checkpoint(given)
    except (FileNotFoundError, ValueError) as error:
        raise Refusal(f"resume: {error}") from error
    in_place = found.path != given
    folder = given if in_place else found.run_folder
    if folder is None or not (folder / OVERRIDES).is_file():
        if in_place:
            raise Refusal(f"resume={given}: it lacks {OVERRIDES}; give a run folder or a checkpoint")
        return Start(cfg, overrides, found.path, found.global_step)
    combined = [str(word) for word in OmegaConf.load(folder / OVERRIDES)] + _without_resume(overrides)
    here = [f"resume='{given}'"]
    if in_place:
        here.append(f"run_folder='{given.resolve()}'")
    resumed = compose(combined + here)
    _check_same(folder, resumed, in_place)
    return Start(resumed, combined, found.path, found.global_step, in_place)


def check_checkpoint(start: Start, module: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuses a checkpoint that cannot be gone on from, before the run writes anything.

    Args:
        start: Where the run begins.
        module: The module that will load it; left as it is.
        optimizer: One like the run's, which loads its state here to see whether it can.

    Raises:
        Refusal: The file is damaged, is no checkpoint of Lightning's, is at the end of the run, or is of another model.
        ValueError: It is of another optimizer; from the optimizer.
    """
    path, steps, end = start.checkpoint, start.global_step, start.cfg.trainer.max_steps
    if path is None:
        return
    if 0 <= end <= steps:
        raise Refusal(
            f"resume={start.cfg.resume}: the run is finished, step {steps} of {end}; use trainer.max_steps={2 * steps} "
            "to go on"
        )
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        reason = str(error).split("\n")[0]
        raise Refusal(f"{path} is no readable checkpoint ({type(error).__name__}: {reason}); give another") from error
    missing = [key for key in CHECKPOINT_KEYS if key not in contents]
    if missing:
        raise Refusal(f"{path} is not a Lightning checkpoint, it lacks {', '.join(missing)}; give one of a run")
    _check_model(path, contents["state_dict"], module.state_dict())
    optimizer.load_state_dict(contents["optimizer_states"][0])


def differences(old: DictConfig, new: DictConfig) -> list[tuple[str, Any, Any]]:
    """Keys with different values, save those that a resumed run may change.

    Args:
        old: One configuration, resolved.
        new: Another.

    Returns:
        (key, old value, new value); None stands for a missing key.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = sorted(before.keys() | after.keys())
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]


def _check_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses weights of other names or shapes."""
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (saved, wanted)]
    names = [name for name in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]
    if names:
        given, needed = (side.get(names[0], "nothing") for side in shapes)
        raise Refusal(
            f"{path} is of another model: {len(names)} weights differ, first {names[0]}, {given} there and {needed} "
            "here; leave model as the checkpoint's run had it"
        )


def _check_same(folder: Path, cfg: DictConfig, in_place: bool) -> None:
    """Refuses settings that the run had otherwise: all that compute; of a new run, those that the checkpoint holds."""
    path = folder / CONFIG
    if not path.is_file():
        raise Refusal(f"resume={folder}: it lacks {CONFIG}; give another run folder or checkpoint")
    old = OmegaConf.load(path)
    assert isinstance(old, DictConfig)
    changed = differences(old, cfg)
    if not in_place:
        # An optimizer that takes over another one's state may have settings that the other lacks.
        changed = [(key, was, now) for key, was, now in changed if _in_checkpoint(key) and None not in (was, now)]
        if _rule(old) != _rule(cfg):
            changed = []  # the optimizer will refuse that state, for a better reason
    if not changed:
        return
    listed = ", ".join(f"{key}={was} (now {now})" for key, was, now in changed)
    advice = f", or start a new run from it with resume={folder}/checkpoints/last.ckpt" if in_place else ""
    reason = "this run was started with" if in_place else "the checkpoint's own values win, and they are"
    raise Refusal(f"resume={cfg.resume}: {reason} {listed}; leave that as it was{advice}")


def _rule(cfg: DictConfig) -> str:
    return str(cfg.optimizer.name).split("_")[0]


def _in_checkpoint(key: str) -> bool:
    return key.startswith("optimizer.") and key not in ("optimizer.name", "optimizer._target_")


def _without_resume(words: list[str]) -> list[str]:
    return [word for word in words if not word.lstrip("+~").startswith("resume=")]


def _leaves(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            yield prefix, value

    yield from walk("", resolved(cfg))
