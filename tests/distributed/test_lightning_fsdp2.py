"""Fuse in a Trainer with ModelParallelStrategy: one verdict for all ranks, and an exact resume."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lightning")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.distributed.lightning_worker"]
    running = [subprocess.Popen([*command, str(r), str(WORLD), port, str(folder)], cwd=repo_root) for r in range(WORLD)]
    assert [process.wait(timeout=240) for process in running] == [0] * WORLD
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(WORLD)]


def test_a_gradient_of_one_rank_that_is_not_finite_skips_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["whole"]["optimizer"] == "FusedAdamW"
        reasons = [outcome["reason"] for outcome in rank["whole"]["outcomes"]]
        assert [number for number, reason in enumerate(reasons) if reason == "nonfinite"] == [2, 8]
        assert set(reasons) == {"ok", "nonfinite"}


def test_all_ranks_clip_alike(ranks: list[dict[str, Any]]) -> None:
    one, two = ([(o["clip_coef"], o["grad_norm"]) for o in rank["whole"]["outcomes"] if o["applied"]] for rank in ranks)
    assert one == two
    assert any(coef < 1.0 for coef, _ in one)


def test_a_resumed_run_is_the_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, weight in rank["whole"]["weights"].items():
            assert torch.equal(rank["rest"]["weights"][name], weight), name
            assert not torch.equal(rank["half"]["weights"][name], weight)
