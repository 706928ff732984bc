"""What tests of resumed runs share: reading what a run left, and composing a resume as the command line would."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from lightning_fuse.resume import find_start
from lightning_fuse.run import Run
from tests.composing import ROOT, composed


def checkpoint(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, through all containers."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(itertools.starmap(equal, zip(left, right, strict=True)))
    return left == right


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if "ms" not in key and "sec" not in key}
        for line in lines
    ]


def compose_here(folder: Path) -> Any:
    """What the command line would compose for a resume, in the test's process."""
    return lambda words: _composed(words, folder)


def _composed(words: list[str], folder: Path) -> DictConfig:
    given = [word for word in words if word.startswith("run_folder=")]
    rest = [word for word in words if not word.startswith("run_folder=")]
    target = given[-1].split("=", 1)[1].strip("'") if given else folder
    return composed(*rest, run_folder=target)


def resumed(finished: Path, tmp_path: Path, *words: str) -> Any:
    """Where a run with `resume=` and these words begins."""
    cfg = composed(*words, run_folder=tmp_path / "new")
    return find_start(cfg, list(words), compose_here(tmp_path / "new"))


def go_on(begun: Any, words: tuple[str, ...], folder: Path) -> Run:
    with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        run = Run(begun.cfg, [*words, f"run_folder='{folder}'"])
        run.fit()
    return run
