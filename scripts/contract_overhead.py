"""What the step contract costs the host, beside its two kernel calls: the task ``overhead`` of ``bench_step.py``.

Everything between the end of backward and the settled outcome counts: scaling the loss, finding the gradients, the
factor, the verdict around its reduction, torch's own hooks around ``step``, lining up the parameters, the loss scale,
counters and outcome. Left out are the reduction over the gradients and the kernel's step, which stand beside it. The
figure is the best of many rounds of one thread's CPU time: neighbours on the machine can only add to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_rows import append_rows
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

import lightning_fuse.step.grad_stats as grad_stats
from lightning_fuse.optim import FusedAdamW
from lightning_fuse.step import LossScale, StepContract

TENSORS, SHAPE = 100, (64, 64)
LIMIT_MS = 0.3
_clock = time.thread_time_ns


class Overhead(NamedTuple):
    """One row of the table.

    Attributes:
        name: What was measured.
        tensors: Parameters of the model.
        host_ms: Milliseconds of one optimizer step on the host, kernel calls left out.
        kernels_ms: Of the two kernel calls in the same round.
    """

    name: str
    tensors: int
    host_ms: float
    kernels_ms: float


def measure_overhead(rounds: int) -> list[Overhead]:
    """Measures one optimizer step for both state formats, plain, and with a loss scale and clipping.

    Args:
        rounds: Steps, of which the best counts.

    Returns:
        A row each.
    """
    return [_measure(state, scaled, rounds) for state in ("fp32", "int8") for scaled in (False, True)]


def show_overhead(rows: list[Overhead]) -> None:
    """Prints one table."""
    table = Table(title=f"the contract on the host, per optimizer step; to stay below {LIMIT_MS} ms")
    for column in ("contestant", "tensors", "host ms", "kernel calls ms"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for row in rows:
        table.add_row(row.name, str(row.tensors), f"{row.host_ms:.3f}", f"{row.kernels_ms:.3f}")
    Console().print(table)


def append_overhead(rows: list[Overhead], path: Path, about: dict[str, Any]) -> None:
    """Appends rows with what they were measured on."""
    lines = ({**row._asdict(), "host_ms": f"{row.host_ms:.4f}", "kernels_ms": f"{row.kernels_ms:.4f}"} for row in rows)
    append_rows(lines, about, path)


def _measure(state: str, scaled: bool, rounds: int) -> Overhead:
    params = [Parameter(torch.randn(SHAPE)) for _ in range(TENSORS)]
    for p in params:
        p.grad = torch.randn(SHAPE)
    optimizer = FusedAdamW(params, lr=1e-3, state=state)
    contract = StepContract(loss_scale=LossScale(1024.0) if scaled else None)
    loss, clip_norm = torch.ones(()), 1.0 if scaled else None

    def step() -> None:
        contract.scale(loss)
        contract.accumulate()
        contract.step(optimizer, clip_norm=clip_norm, window=1)
        contract.update()

    for _ in range(3):
        step()
    inside = [0]
    kernel: Any = optimizer._choose_kernel()
    stock = grad_stats.global_sum_of_squares
    grad_stats.global_sum_of_squares, kernel.step = _timed(stock, inside), _timed(kernel.step, inside)
    try:
        found = [_one(step, inside) for _ in range(rounds)]
    finally:
        grad_stats.global_sum_of_squares = stock
        del kernel.step
    host, kernels = min(found)
    return Overhead(f"ours {state}{', scaled and clipped' if scaled else ''}", TENSORS, host / 1e6, kernels / 1e6)


def _one(step: Callable[[], None], inside: list[int]) -> tuple[int, int]:
    """Nanoseconds of one step outside and inside of kernel calls."""
    inside[0] = 0
    start = _clock()
    step()
    return _clock() - start - inside[0], inside[0]


def _timed(call: Callable[..., Any], inside: list[int]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = _clock()
        result = call(*args)
        inside[0] += _clock() - start
        return result

    return timed
