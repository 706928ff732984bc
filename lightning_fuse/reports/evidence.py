"""What the runs of a group say about one quantity: values by seed, their spread, and the band of a baseline.

The **band** is the baseline's mean plus and minus twice the standard deviation (n - 1) of its seeds' final values. It
is a rule of thumb, not a test: with three seeds on both sides, two equal configurations end outside it 13 times in a
hundred. With one seed there is no band. Values at a place in a run are those last measured there; nothing is
interpolated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_fuse.reports.grouping import Group
from lightning_fuse.reports.reading import Point, Run

BAND_WIDTH = 2.0  # standard deviations on either side
AXES = ("update", "tokens", "seconds")


@dataclass(frozen=True)
class Spread:
    """Values of one quantity, one per seed.

    Attributes:
        values: Finite, in the order of the seeds.
    """

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Their mean; NaN without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def median(self) -> float:
        """Their median; NaN without values."""
        return statistics.median(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        """The smallest; NaN without values."""
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        """The largest; NaN without values."""
        return max(self.values, default=math.nan)

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges of both have a value in common; so evidence of one seed each overlaps only if equal."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Band:
    """What counts as equal to the baseline.

    Attributes:
        centre: The baseline's mean.
        half: Half its width.
        how: How it was computed, in words.
    """

    centre: float
    half: float
    how: str

    def holds(self, value: float) -> bool:
        """Whether a value lies inside, borders included; NaN never does."""
        return abs(value - self.centre) <= self.half


def seeds_band(finals: Spread) -> Band | None:
    """The band of the baseline's own seeds, or None where there are fewer than two."""
    if finals.count < 2:
        return None
    half = BAND_WIDTH * statistics.stdev(finals.values)
    how = f"mean ± {BAND_WIDTH:g} standard deviations of the baseline's {finals.count} seeds"
    return Band(finals.mean, half, how)


def fixed_band(finals: Spread, half: float) -> Band:
    """A band of a given half width around the baseline's mean."""
    return Band(finals.mean, half, f"the baseline's mean ± {half:g}, as given")


def by_seed(runs: Sequence[Run], value: Callable[[Run], float | None]) -> dict[int | None, float]:
    """One value per seed: repeats of a seed are averaged, so that they do not pass for more seeds.

    Args:
        runs: Of one group.
        value: Of a run; None leaves it out.

    Returns:
        Seed to value.
    """
    found: dict[int | None, list[float]] = {}
    for run in runs:
        number = value(run)
        if number is not None:
            found.setdefault(run.seed, []).append(number)
    return {seed: statistics.fmean(numbers) for seed, numbers in found.items()}


def spread_of(runs: Sequence[Run], value: Callable[[Run], float | None]) -> Spread:
    """``by_seed`` without the seeds' names; non-finite values are left out."""
    return Spread(tuple(number for number in by_seed(runs, value).values() if math.isfinite(number)))


def witnesses(group: Group, metric: str) -> list[Run]:
    """The runs whose end counts: the finished ones, or, where none is, all that measured the metric.

    Args:
        group: A group.
        metric: The metric.

    Returns:
        Runs.
    """
    measured = [run for run in group.runs if run.metrics.get(metric)]
    return [run for run in measured if run.finished] or measured


def common_step(runs: Sequence[Run], metric: str) -> int | None:
    """The last step at which every run measured the metric, or None where there is none.

    Validations fall on the same optimizer steps in every run, skips or not, so steps are what finals are aligned by.
    """
    steps = [{point.step for point in run.metrics.get(metric, ())} for run in runs]
    shared = set.intersection(*steps) if steps else set()
    return max(shared, default=None)


def value_at_step(run: Run, metric: str, step: int) -> float | None:
    """The metric as measured at exactly this step."""
    return next((point.value for point in run.metrics.get(metric, ()) if point.step == step), None)


def place(point: Point, axis: str) -> float | None:
    """Where a point lies on an axis of ``AXES``."""
    value = getattr(point, axis)
    return None if value is None else float(value)


def value_by(run: Run, metric: str, axis: str, limit: float) -> float | None:
    """The last value measured at or before a place on an axis.

    Args:
        run: A run.
        metric: The metric.
        axis: One of ``AXES``.
        limit: The place.

    Returns:
        The value; None where nothing was measured by then.
    """
    seen = [point for point in run.metrics.get(metric, ()) if (x := place(point, axis)) is not None and x <= limit]
    return seen[-1].value if seen else None


def common_limit(runs: Sequence[Run], metric: str, axis: str) -> float | None:
    """How far all runs have come on an axis: the smallest of their last places; None where one has none."""
    ends = [place(run.metrics[metric][-1], axis) if run.metrics.get(metric) else None for run in runs]
    known = [end for end in ends if end is not None]
    return min(known) if known and len(known) == len(ends) else None


def curve(group: Group, metric: str, axis: str) -> list[tuple[float, float, float, float]]:
    """A group's metric along an axis.

    Args:
        group: A group.
        metric: The metric.
        axis: One of ``AXES``.

    Returns:
        ``(x, mean, low, high)`` per step that all runs of the group that got so far have measured; on an axis on which
        seeds lie apart (seconds) x is their mean. Non-finite values end the curve.
    """
    runs = witnesses(group, metric)
    steps = sorted({point.step for run in runs for point in run.metrics[metric]})
    line = []
    for step in steps:
        points = [point for run in runs for point in run.metrics[metric] if point.step == step]
        reaching = [run for run in runs if run.metrics[metric][-1].step >= step]
        places = [x for point in points if (x := place(point, axis)) is not None]
        values = [point.value for point in points if math.isfinite(point.value)]
        if len(points) < len(reaching) or not places or not values:
            continue
        line.append((statistics.fmean(places), statistics.fmean(values), min(values), max(values)))
    return line
