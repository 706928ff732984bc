"""Charts as PNG files, with matplotlib: for slides and for places that show no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fuse.reports.charts import BarChart, Chart, LineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The page's colours on light paper.
COLOURS = ("#3b3f46", "#0072b2", "#d55e00", "#009e73", "#b5539c", "#a67c00", "#4aa3df", "#7d4cc2")
DASHES = ("-", "--", ":")
DPI = 144
FEW = 3  # labels that find a place among the curves
# Names of the charts repeat for a metric with other characters; these are safe in any file system.
SAFE = str.maketrans(dict.fromkeys('/\\:*?"<>| ', "-"))


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Draws every chart into its own file.

    Args:
        charts: What to draw.
        folder: Where; it must exist.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is not installed; the message says how to.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"figures as PNG need matplotlib ({error}); install it with pip install 'lightning_fuse[train]', or take "
            "the page alone with --no-png"
        ) from error
    written = []
    for chart in charts:
        height = 3.6 if isinstance(chart, LineChart) else 0.9 + 0.42 * len(chart.bars)
        width = 8.4 if isinstance(chart, LineChart) and len({line.label for line in chart.lines}) > FEW else 6.4
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_lines(axes, chart) if isinstance(chart, LineChart) else _draw_bars(axes, chart)
        axes.set_title(chart.title, loc="left", fontsize=11)
        path = folder / f"{chart.name.translate(SAFE)}.png"
        figure.savefig(path, metadata={"Software": None})
        written.append(path)
    return written


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    named: set[str] = set()
    for line in chart.lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        style: dict[str, Any] = {"color": _colour(line.colour), "linestyle": _dash(line.colour), "linewidth": 1.6}
        if (
            line.colour == 0 and not line.stepped
        ):  # the baseline lies below, and is wide: a candidate that equals it is seen upon it
            style |= {"linewidth": 4.0, "alpha": 0.6, "zorder": 1.5}
        style |= {"drawstyle": "steps-post" if line.stepped else "default", "marker": "o" if len(xs) == 1 else ""}
        label = line.label if line.label not in named else None
        named.add(line.label)
        axes.plot(xs, ys, label=label, **style)
        if line.low:
            axes.fill_between(xs, line.low, line.high, color=style["color"], alpha=0.14, linewidth=0)
        if line.marks:
            axes.plot([x for x, _ in line.marks], [y for _, y in line.marks], "x", color=style["color"], markersize=5)
    if chart.log:
        axes.set_yscale("log")
    if chart.focus is not None:
        axes.set_ylim(-chart.focus, chart.focus)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    beside: dict[str, Any] = (
        {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(named) > FEW else {}
    )  # many would hide curves
    axes.legend(fontsize=8, frameon=False, **beside)


def _draw_bars(axes: Axes, chart: BarChart) -> None:
    places = range(len(chart.bars))
    values = [bar.value for bar in chart.bars]
    errors = [[bar.value - bar.low for bar in chart.bars], [bar.high - bar.value for bar in chart.bars]]
    axes.barh(list(places), values, color=[_colour(bar.colour) for bar in chart.bars], height=0.6)
    if any(bar.high > bar.low for bar in chart.bars):
        axes.errorbar(values, list(places), xerr=errors, fmt="none", ecolor="#1c1e21", elinewidth=1, capsize=3)
    for place, bar in enumerate(chart.bars):
        end = (max(bar.value, bar.high), place)
        axes.annotate(bar.text, end, xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(list(places), [bar.label for bar in chart.bars], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _dash(index: int) -> str:
    return DASHES[min(index // len(COLOURS), len(DASHES) - 1)]
