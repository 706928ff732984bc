"""One rank of a group of processes that shard a small model; run as a program by the tests.

python -m tests.distributed.fsdp2_worker RANK WORLD FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_fuse import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLion, FusedSGD
from lightning_fuse.distributed.reduction import global_sum_of_squares

ADAM: dict[str, Any] = {"lr": 0.013, "betas": (0.83, 0.957), "eps": 1e-3, "weight_decay": 0.07}
MAKERS: dict[str, Any] = {
    "adamw": lambda p, **kw: FusedAdamW(p, **ADAM, **kw),
    "amsgrad": lambda p, **kw: FusedAdamW(p, **ADAM, amsgrad=True, **kw),
    "adam": lambda p, **kw: FusedAdam(p, **ADAM, **kw),
    "sgd": lambda p, **kw: FusedSGD(p, lr=0.02, momentum=0.87, weight_decay=0.07, **kw),
    "lion": lambda p, **kw: FusedLion(p, lr=0.003, betas=(0.83, 0.957), weight_decay=0.07, **kw),
    "ademamix": lambda p, **kw: FusedAdEMAMix(
        p, **{**ADAM, "betas": (0.83, 0.957, 0.98)}, t_alpha=20, t_beta3=30, **kw
    ),
}
KINDS = [
    *(("adamw", state, torch.float32, "none") for state in ("fp32", "bf16", "int8", "int8_bf16")),
    *(("adamw", "int8", torch.bfloat16, master) for master in ("none", "fp32", "split", "split8")),
    *((rule, "int8", torch.float32, "none") for rule in ("amsgrad", "adam", "sgd", "lion", "ademamix")),
]
STEPS = 50


def model(dtype: torch.dtype) -> nn.Module:
    """Rows that no world size divides, fewer rows than ranks, vectors, and rows of several blocks."""
    torch.manual_seed(7)
    made = nn.Sequential(nn.Embedding(37, 150), nn.Linear(150, 11), nn.LayerNorm(11), nn.Linear(11, 3, bias=False))
    return made.to(dtype)


def gradient(shape: tuple[int, ...], step: int, number: int) -> Tensor:
    """A whole gradient, the same on every rank; of several sizes."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 6


def train(net: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: range) -> list[float]:
    """Feeds whole gradients, of which each rank keeps its part; returns the sums of squares."""
    sums = []
    for step in steps:
        for number, p in enumerate(net.parameters()):
            whole = gradient(tuple(p.shape), step, number).to(dtype)
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
        sums.append(float(global_sum_of_squares([p.grad for p in net.parameters()])))
        optimizer.step()
    return sums


def whole(value: Tensor) -> Tensor:
    """The rows of all ranks, one after the other; gloo and NCCL gather no int16, so as bytes."""
    if not isinstance(value, DTensor):
        return value
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.to_local().detach())
    return torch.cat(parts)


def packed(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights and state of the whole model, by name."""
    found = {}
    for name, p in net.named_parameters():
        held = {key: whole(value).clone() for key, value in optimizer.state[p].items()}
        found[name] = {"weight": whole(p.detach()).clone(), **held}
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that lie on this rank."""
    tensors = [value for held in optimizer.state.values() for value in held.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    return sum(value.nbytes for value in local)


def main(rank: int, world: int, folder: Path) -> None:
    """Trains every kind and writes what rank 0 gathered."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
    mesh, results = init_device_mesh("cpu", (world,)), []
    for rule, state, dtype, master in KINDS:
        net = model(dtype)
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = MAKERS[rule](net.named_parameters(), state=state, master=master)
        foretold = sum(optimizer.state_bytes().values())
        sums = train(net, optimizer, dtype, range(STEPS))
        assert state_bytes(optimizer) == foretold == sum(optimizer.state_bytes().values())
        results.append({"found": packed(net, optimizer), "sums": sums, "bytes": foretold})
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, [(result["sums"], result["bytes"]) for result in results])
    if rank == 0:
        torch.save({"results": results, "everyone": everyone}, folder / f"result-{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
