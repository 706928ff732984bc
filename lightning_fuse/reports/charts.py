"""What the figures show, as data: which lines, bands and bars. ``svg.py`` and ``png.py`` draw the same charts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_fuse.records.summary import size
from lightning_fuse.reports.comparison import Comparison
from lightning_fuse.reports.evidence import BAND_WIDTH, curve, spread_of, value_at_step, witnesses
from lightning_fuse.reports.grouping import Group
from lightning_fuse.reports.measures import Target, target_of
from lightning_fuse.reports.reading import Run
from lightning_fuse.reports.tables import milliseconds

LOG_FROM = 8.0  # ratio of the largest to the smallest value at which a logarithmic axis shows more
MARKS = 200  # skips drawn per chart at most


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: Of its group.
        colour: Index of the group's colour; 0 is the baseline's.
        points: ``(x, y)``.
        low: Lower border of the area around it, one per point; empty for none.
        high: Upper border.
        stepped: Values hold until the next point.
        marks: Places to mark, ``(x, y)``: skipped steps.
    """

    label: str
    colour: int
    points: list[tuple[float, float]]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    stepped: bool = False
    marks: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x.

    Attributes:
        name: Of the file, and of the element.
        title: In words.
        x: What x is, with its unit.
        y: What y is.
        lines: In drawing order.
        log: Logarithmic y.
        caption: How to read it.
        focus: The largest distance from 0 that y shows; None shows everything.
    """

    name: str
    title: str
    x: str
    y: str
    lines: list[Line]
    log: bool = False
    caption: str = ""
    focus: float | None = None


@dataclass(frozen=True)
class Bar:
    """One bar: a group's value, the range of its seeds, and the value in words."""

    label: str
    colour: int
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from zero; see ``LineChart`` for the attributes."""

    name: str
    title: str
    bars: list[Bar]
    caption: str = ""


Chart = LineChart | BarChart


def charts_of(comparison: Comparison) -> list[Chart]:
    """Every chart for which there is something to draw.

    Args:
        comparison: A comparison.

    Returns:
        Curves first, then bars.
    """
    found: list[Chart | None] = [
        _curves(comparison, "update", "updates"),
        _curves(comparison, "seconds", "train seconds"),
        _differences(comparison),
        _loss_scales(comparison),
        _state_bars(comparison),
        _bars(comparison, "optimizer-step", "Optimizer step", lambda run: run.optimizer_ms, milliseconds, TIMES),
        _bars(comparison, "training-step", "Whole training step", lambda run: run.step_ms, milliseconds, TIMES),
        _bars(
            comparison,
            "target-seconds",
            f"Train seconds to {_target_label(comparison)}",
            lambda run: getattr(target_of(run), "seconds", None),
            lambda value: f"{value:.1f} s",
            "Median and range of the seeds that reached it; validation and downtime are left out.",
        ),
        _bars(
            comparison,
            "target-updates",
            f"Updates to {_target_label(comparison)}",
            lambda run: getattr(target_of(run), "updates", None),
            lambda value: f"{value:,.0f}",
            "Median and range of the seeds that reached it. Only fewer updates mean that more is learned from each.",
        ),
    ]
    return [chart for chart in found if chart is not None]


TIMES = "Median over the seeds of each run's median; the thin line is their range."


def _curves(comparison: Comparison, axis: str, unit: str) -> LineChart | None:
    lines = []
    for colour, group in enumerate(comparison.groups):
        line = curve(group, comparison.metric, axis)
        if line:
            points = [(x, mean) for x, mean, _, _ in line]
            lines.append(Line(group.label, colour, points, [low for *_, low, _ in line], [high for *_, high in line]))
    values = [value for line in lines for value in (*line.low, *line.high)]
    if not values:
        return None
    log = min(values) > 0 and max(values) / min(values) > LOG_FROM
    return LineChart(
        f"{comparison.metric.replace('/', '-')}-by-{axis}",
        f"{comparison.metric} by {unit}",
        unit,
        comparison.metric,
        lines,
        log,
        "Mean of the seeds; the area is their range." + (" Logarithmic." if log else ""),
    )


def _differences(comparison: Comparison) -> LineChart | None:
    """Candidates minus the baseline at the same optimizer step, over the baseline's band."""
    baseline = comparison.baseline
    runs = witnesses(baseline, comparison.metric)
    centres: dict[int, tuple[float, float]] = {}
    for step in sorted({point.step for run in runs for point in run.metrics[comparison.metric]}):
        values = spread_of(runs, _at(comparison.metric, step))
        if values.count > 1:
            spread = math.sqrt(sum((value - values.mean) ** 2 for value in values.values) / (values.count - 1))
            centres[step] = (values.mean, BAND_WIDTH * spread)
    lines = []
    for colour, group in enumerate(comparison.groups[1:], start=1):
        points = []
        for step, (centre, _) in centres.items():
            own = spread_of(witnesses(group, comparison.metric), _at(comparison.metric, step))
            if own.count:
                points.append((float(step), own.mean - centre))
        if points:
            lines.append(Line(group.label, colour, points))
    if not centres or not lines:
        return None
    band = [half for _, half in centres.values()]
    # Seeds lie far apart at the beginning; what matters is seen from the second half on.
    half = max(centres) / 2
    late = [abs(y) for line in lines for x, y in line.points if x >= half]
    late += [width for step, width in zip(centres, band, strict=True) if step >= half]
    zero = Line(baseline.label, 0, [(float(step), 0.0) for step in centres], [-half for half in band], band)
    return LineChart(
        "difference-by-step",
        f"{comparison.metric}, candidate minus baseline",
        "optimizer steps",
        f"difference in {comparison.metric}",
        [zero, *lines],
        caption="Means of the seeds. In the grey band a difference is no larger than between the baseline's seeds.",
        focus=1.15 * max(late) or None,
    )


def _at(metric: str, step: int) -> Callable[[Run], float | None]:
    return lambda run: value_at_step(run, metric, step)


def _loss_scales(comparison: Comparison) -> LineChart | None:
    """One stepped line per run that has a loss scale, with its skips."""
    lines = []
    for colour, group in enumerate(comparison.groups):
        for run in group.runs:
            if not run.scales:
                continue
            points = [(float(step), scale) for step, scale in run.scales]
            points.append((float(max(run.last_step, run.scales[-1][0])), run.scales[-1][1]))
            marks = [(float(s.step), s.scale) for s in run.skips if s.scale is not None][:MARKS]
            lines.append(Line(group.label, colour, points, stepped=True, marks=marks))
    if not lines:
        return None
    caption = "One line per run; a cross is a skipped step. Logarithmic."
    return LineChart(
        "loss-scale", "Loss scale and skipped steps", "optimizer steps", "loss scale", lines, True, caption
    )


def _state_bars(comparison: Comparison) -> BarChart | None:
    caption = "Moments, scales, counters and master weights; not parameters, gradients or activations."
    return _bars(comparison, "state-bytes", "Optimizer state", lambda run: run.state_bytes, size, caption)


def _bars(
    comparison: Comparison,
    name: str,
    title: str,
    value: Callable[[Run], float | None],
    shown: Callable[[float], str],
    caption: str,
) -> BarChart | None:
    bars = []
    for colour, group in enumerate(comparison.groups):
        spread = spread_of(group.runs, value)
        if spread.count:
            median = spread.median
            bars.append(Bar(group.label, colour, median, spread.low, spread.high, shown(median)))
    return BarChart(name, title, bars, caption) if bars else None


def _target_label(comparison: Comparison) -> str:
    labels = [target.label for group in comparison.groups if (target := _first_target(group)) is not None]
    return labels[0] if labels and len(set(labels)) == 1 else "the target"


def _first_target(group: Group) -> Target | None:
    return next((target for run in group.runs if (target := target_of(run)) is not None), None)
