"""FSDP2 on gloo: state and weights of shards are the bits of one process; the norm is that of the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import fsdp2_worker as worker

WORLDS = (2, 4)


def launch(world: int, folder: Path, root: Path) -> dict[str, Any]:
    """Runs one process per rank and returns what they gathered."""
    command = [sys.executable, "-m", "tests.distributed.fsdp2_worker"]
    ranks = [subprocess.Popen([*command, str(rank), str(world), str(folder)], cwd=root) for rank in range(world)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * world
    found: dict[str, Any] = torch.load(folder / f"result-{world}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module", params=WORLDS)
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Any:
    return request.param, launch(request.param, tmp_path_factory.mktemp("fsdp2"), repo_root)


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    """The same in this process, with plain tensors."""
    results = []
    for rule, state, dtype, master in worker.KINDS:
        net = worker.model(dtype)
        optimizer = worker.MAKERS[rule](net.named_parameters(), state=state, master=master)
        sums = worker.train(net, optimizer, dtype, range(worker.STEPS))
        found, taken = worker.packed(net, optimizer), sum(optimizer.state_bytes().values())
        results.append({"found": found, "sums": sums, "bytes": taken})
    return results


def test_weights_and_state_are_the_bits_of_one_process(sharded: Any, whole: list[dict[str, Any]]) -> None:
    _, gathered = sharded
    for kind, shards, alone in zip(worker.KINDS, gathered["results"], whole, strict=True):
        assert set(shards["found"]) == set(alone["found"])
        for name, tensors in alone["found"].items():
            assert set(shards["found"][name]) == set(tensors)
            for key, value in tensors.items():
                assert torch.equal(shards["found"][name][key], value), (kind, name, key)


def test_the_gradient_norm_is_that_of_the_whole(sharded: Any, whole: list[dict[str, Any]]) -> None:
    """Sums over ranks add up in another order: float64, 2^-52 for each of fewer than 16 additions."""
    _, gathered = sharded
    for number, alone in enumerate(whole):
        sums = [rank[number][0] for rank in gathered["everyone"]]
        assert all(rank == sums[0] for rank in sums)  # the same bits, and so the same verdict
        assert sums[0] == pytest.approx(alone["sums"], rel=16 * 2.0**-52)


def test_each_rank_keeps_its_share_of_the_state(sharded: Any, whole: list[dict[str, Any]]) -> None:
    """What does not shrink is a step of 8 bytes for each of the 6 parameters on every rank."""
    world, gathered = sharded
    for number, alone in enumerate(whole):
        ranks = [rank[number][1] for rank in gathered["everyone"]]
        assert sum(ranks) == alone["bytes"] + (world - 1) * 6 * 8
        assert max(ranks) < 1.35 * alone["bytes"] / world + 6 * 8
