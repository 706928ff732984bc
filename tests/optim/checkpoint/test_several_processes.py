"""State dicts of several processes keep every bit: ZeroRedundancyOptimizer, FSDP2's shards."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_fuse import FusedAdamW
from lightning_fuse.formats import STATE_FORMATS
from tests.optim.checkpoint.test_in_other_hands import Tower, train

if sys.platform != "linux":
    pytestmark = pytest.mark.skip(reason="gloo")


def sharded(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return ZeroRedundancyOptimizer(trainable, optimizer_class=FusedAdamW, lr=1e-2, **settings)


@pytest.mark.parametrize("state", STATE_FORMATS)
def test_a_zero_redundancy_optimizer_saves_loads_and_steps(state: str, one_process: None) -> None:
    model, other = Tower(), Tower(seed=1)
    optimizer, resumed = sharded(model, state=state), sharded(other, state=state)
    train(model, optimizer, range(3))
    optimizer.consolidate_state_dict()
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    resumed.consolidate_state_dict()
    assert [int(held["step"]) for held in resumed.state_dict()["state"].values()] == [6, 6, 6, 6]


def test_a_zero_redundancy_optimizer_of_another_format_is_refused_at_its_step(one_process: None) -> None:
    """It puts state into ours without asking; nothing of it may be lost silently."""
    model, other = Tower(), Tower(seed=1)
    optimizer, resumed = sharded(model, state="fp32"), sharded(other, state="int8")
    train(model, optimizer, range(2))
    optimizer.consolidate_state_dict()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match=r"described as '4 adamw fp32 none', this optimizer keeps state 'int8'"):
        train(other, resumed, range(1))


TWO_RANKS = """
import copy, json, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from tests.optim.checkpoint.test_in_other_hands import Tower, train
from tests.optim.checkpoint.test_several_processes import sharded

def work(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    model, other = Tower(), Tower(seed=1)
    optimizer, resumed = sharded(model, state="int8"), sharded(other, state="int8")
    train(model, optimizer, range(3))
    optimizer.consolidate_state_dict(0)
    saved = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
    dist.broadcast_object_list(saved, 0)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved[0])
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    resumed.consolidate_state_dict(0)
    steps = [int(held["step"]) for held in resumed.state_dict()["state"].values()] if rank == 0 else []
    open(f"{folder}/{rank}.json", "w").write(json.dumps([same, steps]))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_two_ranks_of_a_zero_redundancy_optimizer(run_python: Any, tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    done = run_python(str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[True, [6] * 4], [True, []]]


SHARDS = """
import copy, json, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tests.distributed.fsdp2_worker import MAKERS, model, packed, train

def shard(mesh, dtype):
    net = model(dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)

def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    mesh, results = init_device_mesh("cpu", (2,)), []
    for state, dtype, master in (("int8", torch.float32, "none"), ("fp32", torch.bfloat16, "split")):
        kind = {"state": state, "master": master}
        net = model(dtype)
        whole = MAKERS["adamw"](net.named_parameters(), **kind)
        train(net, whole, dtype, range(3))
        parts = shard(mesh, dtype)
        optimizer = MAKERS["adamw"](parts.named_parameters(), **kind)
        for p, q in zip(parts.parameters(), net.parameters()):
            first = optimizer.specs()[[id(s.param) for s in optimizer.specs()].index(id(p))].first_index
            rows = p.detach().to_local().shape[0]
            start = first // max(1, q[0].numel())
            p.detach().to_local().copy_(q.detach()[start : start + rows])
        optimizer.load_state_dict(whole.state_dict())
        again = shard(mesh, dtype)
        other = MAKERS["adamw"](again.named_parameters(), **kind)
        train(parts, optimizer, dtype, range(3, 5))
        weights, saved = get_state_dict(parts, optimizer)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=saved)
        train(again, other, dtype, range(5, 7))
        train(net, whole, dtype, range(3, 7))
        found, expected = packed(again, other), packed(net, whole)
        results.append([
            f"{state} {name} {key}"
            for name in expected
            for key, value in expected[name].items()
            if not torch.equal(found[name][key], value)
        ])
    open(f"{folder}/{rank}.json", "w").write(json.dumps(results))
    dist.destroy_process_group()

if __name__ == "__main__":
    with torch.no_grad():
        mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_a_whole_state_is_loaded_onto_shards_and_goes_on_with_the_same_bits(run_python: Any, tmp_path: Path) -> None:
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    done = run_python(str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[[], []], [[], []]]
