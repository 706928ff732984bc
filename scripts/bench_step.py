"""Speed of one optimizer step on the CPU, beside its peers in the same run.

    python scripts/bench_step.py                     all tasks, two shapes, 2 threads
    python scripts/bench_step.py --tasks adamw contract --rounds 31
    python scripts/bench_step.py --clock cpu         one thread's CPU time: for a machine on which others work too
    python scripts/bench_step.py --tasks overhead    what the step contract costs the host beside its kernel calls

Machines are shared and clocks drift, so only ratios count: contestants take turns in every round, in an order that
rotates, and the medians of the same rounds are compared. Rows with hardware and versions go to
``benchmarks/step_cpu.csv``. The memory floor of a contestant is the bytes that its format must move, divided by the
bandwidth of a copy measured in the same rounds.

Wall time on a busy machine measures the neighbours: torch's threads wait for one another at the end of every tensor, so
one core taken away makes them many times slower, and every ratio flattering. Rows carry the load; where others
are at work too, the table says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_rows import append_rows
from contract_overhead import append_overhead, measure_overhead, show_overhead
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from lightning_fuse.kernels import sum_of_squares
from lightning_fuse.kernels.cpu.native import describe
from lightning_fuse.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedLion, FusedSGD

OUTPUT = Path(__file__).resolve().parents[1] / "benchmarks" / "step_cpu.csv"
SHAPES = {"few large": [(820, 1024)] * 40, "many small": [(172, 128)] * 768}
OVERHEAD = "overhead"  # the task of contract_overhead.py
TINY = {"a thousand tiny": [(2, 4)] * 1000}  # what is left is the work of the host
SHAPES_OF = {"host cost": TINY}  # other shapes than those that are asked for
WARMUP = 8
BATCHES = 4  # of gradients, that take turns: with one alone second moments would have the spread of single squares
LR = 1e-3
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
OTHERS = 1.5  # load per core above which others are at work; the threads of this script count as well

Params = list[Parameter]
Make = Callable[[Params], Callable[[], Any]]


class Contestant(NamedTuple):
    """One way to step.

    Attributes:
        name: What the table calls it.
        make: Builds the step over the given parameters.
        dtype: Of parameters and gradients.
        bytes_moved: Bytes per element that it reads and writes at least; 0 where nobody counts.
    """

    name: str
    make: Make
    dtype: torch.dtype = torch.float32
    bytes_moved: float = 0.0


class Measured(NamedTuple):
    """One row of the table."""

    task: str
    shape: str
    name: str
    ns_per_element: float
    ratio: float  # how often as fast as the first contestant of the task
    floor_percent: float | None


def tasks() -> dict[str, list[Contestant]]:
    """Contestants by task; the first of each is what the others are compared with."""
    bf16 = torch.bfloat16
    found = {
        "adamw": [
            Contestant("torch fused fp32", lambda ps: torch.optim.AdamW(ps, LR, fused=True).step, bytes_moved=28),
            Contestant("torch foreach fp32", lambda ps: torch.optim.AdamW(ps, LR, foreach=True).step),
            Contestant("torch loop fp32", lambda ps: torch.optim.AdamW(ps, LR, foreach=False).step),
            Contestant("ours fp32", lambda ps: FusedAdamW(ps, LR).step, bytes_moved=28),
            Contestant("ours bf16", lambda ps: FusedAdamW(ps, LR, state="bf16").step, bytes_moved=20),
            Contestant("ours int8", lambda ps: FusedAdamW(ps, LR, state="int8").step, bytes_moved=16.125),
            *_bitsandbytes(),
            *_torchao(),
        ],
        "contract": [
            Contestant("torch: unscale, check, clip, fused", torch_contract, bytes_moved=28 + 8 + 12),
            Contestant("ours fp32", lambda ps: our_contract(ps, "fp32"), bytes_moved=32),
            Contestant("ours int8", lambda ps: our_contract(ps, "int8"), bytes_moved=20.125),
            Contestant("torch: the same with foreach", lambda ps: torch_contract(ps, fused=False)),
        ],
        "bf16 parameters": [
            Contestant("torch fused bf16", lambda ps: torch.optim.AdamW(ps, LR, fused=True).step, bf16, 14),
            Contestant("ours split, fp32", lambda ps: FusedAdamW(ps, LR, master="split").step, bf16, 26),
            Contestant("ours split, bf16", lambda ps: FusedAdamW(ps, LR, master="split", state="bf16").step, bf16, 18),
            Contestant(
                "ours split, int8", lambda ps: FusedAdamW(ps, LR, master="split", state="int8").step, bf16, 14.125
            ),
        ],
        "momentum": [
            Contestant("torch fused SGD", lambda ps: torch.optim.SGD(ps, LR, 0.9, fused=True).step, bytes_moved=20),
            Contestant("ours SGD fp32", lambda ps: FusedSGD(ps, LR, 0.9).step, bytes_moved=20),
            Contestant("ours SGD int8", lambda ps: FusedSGD(ps, LR, 0.9, state="int8").step, bytes_moved=14.06),
            Contestant("ours Lion fp32", lambda ps: FusedLion(ps, LR).step, bytes_moved=20),
        ],
        "layer-wise": [
            Contestant("ours SGD fp32", lambda ps: FusedSGD(ps, LR, 0.9).step, bytes_moved=20),
            Contestant("ours LARS fp32", lambda ps: FusedLARS(ps, LR).step, bytes_moved=28),
            Contestant("ours LAMB fp32", lambda ps: FusedLAMB(ps, LR).step, bytes_moved=44),
            Contestant("ours LAMB int8", lambda ps: FusedLAMB(ps, LR, state="int8").step, bytes_moved=26.19),
        ],
        "host cost": [
            Contestant("torch fused fp32", lambda ps: torch.optim.AdamW(ps, LR, fused=True).step),
            Contestant("torch foreach fp32", lambda ps: torch.optim.AdamW(ps, LR, foreach=True).step),
            Contestant("ours fp32", lambda ps: FusedAdamW(ps, LR).step),
            Contestant("ours int8", lambda ps: FusedAdamW(ps, LR, state="int8").step),
        ],
    }
    return found


def torch_contract(params: Params, fused: bool = True) -> Callable[[], None]:
    """Unscale, check, clip by norm, step, as torch's GradScaler and clip_grad_norm_ do it."""
    optimizer = torch.optim.AdamW(params, LR, fused=fused, foreach=not fused)
    found_inf, inverse = torch.zeros(1), torch.ones(1)

    def step() -> None:
        grads = [p.grad for p in params]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        if not found_inf.item():
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)
            optimizer.step()

    return step


def our_contract(params: Params, state: str) -> Callable[[], None]:
    """The same in two passes: one look at all gradients, one kernel call that multiplies in a register."""
    optimizer = FusedAdamW(params, LR, state=state)

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in params if p.grad is not None]
        norm = sum_of_squares(grads).sqrt()
        coefficient = (1e9 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.apply(coefficient.to(torch.float32), (~norm.isfinite()).to(torch.float32))

    return step


def _bitsandbytes() -> list[Contestant]:
    try:
        import bitsandbytes
    except ImportError:
        return []
    return [Contestant("bitsandbytes 8-bit", lambda ps: bitsandbytes.optim.AdamW8bit(ps, LR).step)]


def _torchao() -> list[Contestant]:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return []
    return [Contestant("torchao 8-bit", lambda ps: AdamW8bit(ps, LR).step)]


def parameters(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Params:
    """Parameters with gradients, each tensor an allocation of its own, as a model has them."""
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def measure(
    task: str, shape: str, contestants: Sequence[Contestant], rounds: int, clock: Callable[[], float]
) -> list[Measured]:
    """Times all contestants of one task in turns, each turn with the gradients of another batch."""
    shapes = {**SHAPES, **TINY}[shape]
    elements = sum(rows * columns for rows, columns in shapes)
    batches = [[torch.randn(size) * 0.1 for size in shapes] for _ in range(BATCHES)]
    params = [parameters(shapes, contestant.dtype) for contestant in contestants]
    steps = [contestant.make(own) for contestant, own in zip(contestants, params, strict=True)]
    source, target = torch.ones(elements), torch.ones(elements)
    steps.append(lambda: target.copy_(source))
    seconds: list[list[float]] = [[] for _ in steps]
    slow: set[int] = set()
    for turn in range(WARMUP + rounds):
        for own in params:
            torch._foreach_copy_([p.grad for p in own], batches[turn % BATCHES])
        for index in sorted(range(len(steps)), key=lambda i, turn=turn: (i + turn) % len(steps)):
            if index in slow and turn % 8:
                continue  # a contestant that is ten times slower is sampled less often
            start = clock()
            steps[index]()
            taken = clock() - start
            if turn >= WARMUP:
                seconds[index].append(taken)
        if turn == WARMUP:
            slow = {index for index, taken in enumerate(seconds) if taken and taken[0] > 10 * seconds[0][0]}
    *medians, copy = [statistics.median(taken) / elements * 1e9 for taken in seconds]
    bandwidth = 12 / copy  # bytes per ns; a copy reads its target too, before it writes it
    return [
        Measured(
            task,
            shape,
            contestant.name,
            median,
            medians[0] / median,
            100 * contestant.bytes_moved / bandwidth / median if contestant.bytes_moved else None,
        )
        for contestant, median in zip(contestants, medians, strict=True)
    ]


def show(rows: Sequence[Measured], clock: str) -> None:
    """Prints one table."""
    busy = os.getloadavg()[0] > OTHERS * (os.cpu_count() or 1)
    warning = (
        "\n[red]this machine is busy: wall times mean nothing, use --clock cpu[/red]"
        if busy and clock == "wall"
        else ""
    )
    table = Table(title=f"one step, {clock} time; native: {describe()}{warning}")
    for column in ("task", "shape", "contestant", "ns/element", "times the first", "% of memory floor"):
        table.add_column(column, justify="left" if column in ("task", "shape", "contestant") else "right")
    for row in rows:
        floor = "" if row.floor_percent is None else f"{row.floor_percent:.0f}"
        table.add_row(row.task, row.shape, row.name, f"{row.ns_per_element:.3f}", f"{row.ratio:.2f}", floor)
    Console().print(table)


def append(rows: Sequence[Measured], path: Path, clock: str) -> None:
    """Appends rows with what they were measured on."""

    def line(row: Measured) -> dict[str, Any]:
        numbers = {"ns_per_element": f"{row.ns_per_element:.4f}", "ratio": f"{row.ratio:.3f}"}
        floor = "" if row.floor_percent is None else f"{row.floor_percent:.1f}"
        return {**row._asdict(), **numbers, "floor_percent": floor}

    append_rows(map(line, rows), about(clock), path)


def about(clock: str) -> dict[str, Any]:
    """What rows were measured on."""
    return {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "load": f"{os.getloadavg()[0]:.1f}",
        "native": describe(),
        "torch": torch.__version__,
        "bitsandbytes": version("bitsandbytes"),
        "torchao": version("torchao"),
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(package: str) -> str:
    """The installed version of a package, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints and appends.

    Args:
        words: Of the command line; None takes them from there.
    """
    known = tasks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[*known, OVERHEAD], default=[*known, OVERHEAD])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads if arguments.clock == "wall" else 1)
    rows = [
        row
        for task in arguments.tasks
        if task != OVERHEAD
        for shape in SHAPES_OF.get(task, arguments.shapes)
        for row in measure(task, shape, known[task], arguments.rounds, CLOCKS[arguments.clock])
    ]
    if rows:
        show(rows, arguments.clock)
        append(rows, arguments.output, arguments.clock)
    if OVERHEAD in arguments.tasks:
        torch.set_num_threads(1)
        overheads = measure_overhead(arguments.rounds * 20)
        show_overhead(overheads)
        append_overhead(overheads, arguments.output.with_name("contract_host.csv"), about("cpu"))


if __name__ == "__main__":
    main()
