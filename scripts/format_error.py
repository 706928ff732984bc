"""What keeping Adam's moments in few bits does to its updates, closed loop: the table of docs/state_formats.md.

    python scripts/format_error.py            the whole table, a few minutes on one core
    python scripts/format_error.py --short    int8 and the teaching codec on a smaller model, some seconds

One float32 run hands out gradients. For every scheme the same gradients drive Adam's two moments, and after each step
the moments are replaced by what the scheme reads back of them, so errors feed on themselves as in training. With

    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)        betas 0.9 and 0.999, eps 1e-8

the update in units of the learning rate, taken before m and v are stored, as an optimizer does, the error is

    rms(u of the scheme - u of float32 moments) / rms(u of float32 moments)

over all elements of all matrices at one step: the last of the trace, for noise also the last before half of it falls.
"worst" is the largest |u| of any element in any step of any trace: Adam's own is a small number.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from gradient_traces import FALL, FULL, SHORT, gpt_gradients, noise_gradients
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rival_codecs import Roots, Scheme, all_schemes, exact
from torch import Tensor

from lightning_fuse.rules.rule import sqrt

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
SPREADS = (0.5, 1.0)
BEFORE, AFTER = 1000, 1500  # steps of noise before and after the fall
SHORT_ROWS = ("int8", "roots to nearest, block 128", "linear int8 (teaching codec)")


class Loop:
    """Adam's moments under one scheme, for a list of matrices.

    Args:
        scheme: How they are kept between steps.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.moments: list[tuple[Tensor, Tensor]] = []
        self.worst = 0.0
        self.step = 0

    def update(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Takes one step.

        Args:
            gradients: float32, one per matrix.

        Returns:
            The updates in units of the learning rate, one per matrix.
        """
        self.step += 1
        if not self.moments:
            self.moments = [(torch.zeros_like(g), torch.zeros_like(g)) for g in gradients]
        updates = []
        for i, (g, (m, v)) in enumerate(zip(gradients, self.moments, strict=True)):
            m, v = m * BETA1 + g * (1 - BETA1), v * BETA2 + g * g * (1 - BETA2)
            root = (v / (1 - BETA2**self.step)).sqrt() + EPS
            updates.append(m / (1 - BETA1**self.step) / root)
            kept = self.scheme.second(v, self.step)
            self.moments[i] = (self.scheme.first(m, self.step, Roots(sqrt(v), sqrt(kept))), kept)
        self.worst = max(self.worst, max(u.abs().max().item() for u in updates))
        return updates


class Measurement:
    """What the rows of the table hold so far.

    Args:
        schemes: The rows.
    """

    def __init__(self, schemes: Sequence[Scheme]) -> None:
        self.schemes = schemes
        self.errors: dict[str, dict[str, float]] = {scheme.name: {} for scheme in schemes}
        self.worst = {scheme.name: 0.0 for scheme in schemes}

    def run(self, trace: Iterable[list[Tensor]], readings: dict[int, str]) -> None:
        """Drives every scheme by one trace of gradients.

        Args:
            trace: Gradients, step by step.
            readings: Step -> the column that the error at that step goes to.
        """
        reference = Loop(Scheme("fp32", 64, exact, exact))
        loops = [Loop(scheme) for scheme in self.schemes]
        with torch.no_grad():
            for step, gradients in enumerate(trace, start=1):
                true = reference.update(gradients)
                for loop in loops:
                    found = loop.update(gradients)
                    if step in readings:
                        self.errors[loop.scheme.name][readings[step]] = relative_error(found, true)
        for loop in loops:
            self.worst[loop.scheme.name] = max(self.worst[loop.scheme.name], loop.worst)


def relative_error(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """rms(found - true) / rms(true) over all elements of all tensors, in float64."""
    off = sum((a.double() - b.double()).square().sum().item() for a, b in zip(found, true, strict=True))
    return (off / sum(b.double().square().sum().item() for b in true)) ** 0.5


def measure(short: bool, seed: int, progress: Progress) -> Measurement:
    """Runs all traces.

    Args:
        short: The smaller model, fewer elements of noise, three rows.
        seed: Of the traces.
        progress: Shows how far it is.

    Returns:
        The filled rows.
    """
    schemes = [s for s in all_schemes(with_maps=not short) if not short or s.name in SHORT_ROWS]
    size, shape = (SHORT, (16, 512)) if short else (FULL, (32, 512))
    measurement = Measurement(schemes)

    def follow(trace: Iterator[list[Tensor]], total: int, what: str) -> Iterator[list[Tensor]]:
        # A generator's body runs without the caller's no_grad only if it says so: the model needs its gradients.
        task = progress.add_task(what, total=total)
        while True:
            with torch.enable_grad():
                gradients = next(trace, None)
            if gradients is None:
                return
            progress.advance(task)
            yield gradients

    trace = gpt_gradients(size, seed)
    measurement.run(follow(trace, size.steps, "byte-level GPT"), {size.steps: "gpt"})
    for spread in SPREADS:
        trace = noise_gradients(shape, spread, BEFORE, AFTER, seed)
        readings = {BEFORE: f"stationary_{spread:g}", BEFORE + AFTER: f"fallen_{spread:g}"}
        measurement.run(follow(trace, BEFORE + AFTER, f"noise, spread e^{spread:g}"), readings)
    return measurement


def table_of(measurement: Measurement, steps: int) -> Table:
    """The measurement as a person reads it."""
    table = Table(title="Error of Adam's update against float32 moments, closed loop")
    table.add_column("moments kept as", no_wrap=True)
    for heading in (
        "bytes per parameter",
        f"GPT, {steps} steps",
        *(f"noise, spread e^{spread:g}" for spread in SPREADS),
        *(f"e^{spread:g}, half fell to {FALL:.0%}" for spread in SPREADS),
        "worst update / lr",
    ):
        table.add_column(heading, justify="right")
    for scheme in measurement.schemes:
        errors = measurement.errors[scheme.name]
        cells = [_short(errors[column]) for column in columns()]
        table.add_row(scheme.name, f"{scheme.bits / 8:.3f}", *cells, _short(measurement.worst[scheme.name]))
    return table


def columns() -> list[str]:
    """The error columns in their order, as they are called in the CSV file."""
    return ["gpt", *(f"stationary_{s:g}" for s in SPREADS), *(f"fallen_{s:g}" for s in SPREADS)]


def write_csv(measurement: Measurement, path: Path) -> None:
    """Writes one line per scheme: its name, bytes per parameter, the error columns, the worst update."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["scheme", "bytes_per_parameter", *columns(), "worst_update"])
        for scheme in measurement.schemes:
            errors = measurement.errors[scheme.name]
            row = [errors[column] for column in columns()]
            writer.writerow([scheme.name, scheme.bits / 8, *row, measurement.worst[scheme.name]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--short", action="store_true", help="a smaller model and three rows: some seconds")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise (default 0)")
    options = parser.parse_args(arguments)
    if options.csv is not None and not options.csv.parent.is_dir():
        parser.error(f"--csv {options.csv}: there is no folder {options.csv.parent}; make it first")
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bar, console=Console(stderr=True)) as progress:
        measurement = measure(options.short, options.seed, progress)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own
    console.print(table_of(measurement, SHORT.steps if options.short else FULL.steps))
    if options.csv is not None:
        write_csv(measurement, options.csv)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
