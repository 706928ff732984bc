"""What every test starts from: one thread, fixed seeds, no network, no display."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported, and inherited by the processes that tests start. Tests run side by side, one core each;
# a second OpenMP thread per process only makes them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, for them and what they start: here it is heard again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hung_up)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout the tests belong to."""
    return ROOT


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a fresh interpreter in an empty folder, the checkout importable.

    `run_python("-c", code)` returns the finished process; its output is text. A failure is the caller's to judge.
    """

    def run(*arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("WANDB_SERVICE", None)  # of a test in this process: its server would get the child's run
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
