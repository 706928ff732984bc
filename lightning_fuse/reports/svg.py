"""Charts as inline SVG for the page: no script, colours from the page's own variables, text that stays text.

A chart is drawn 420 units wide with 13-unit letters: on a phone that is 11 pixels, on a desktop 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from lightning_fuse.reports.charts import Bar, BarChart, Chart, Line, LineChart

WIDTH, HEIGHT = 420, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 44
BAR_HEIGHT, BAR_PITCH = 14, 42
COLOURS = 8  # of the page's variables --c0 … --c7; more groups get dashes
DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Scale:
    """Values to places on an axis.

    Attributes:
        low: Smallest value.
        high: Largest value.
        start: Place of the smallest.
        end: Place of the largest.
        log: Logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; values beyond the axis stay at its end."""
        low, high, at = (math.log10(v) for v in (self.low, self.high, max(value, self.low))) if self.log else (
            self.low, self.high, value
        )  # fmt: skip
        share = min(1.0, max(0.0, (at - low) / ((high - low) or 1.0)))
        return self.start + share * (self.end - self.start)


def svg(chart: Chart) -> str:
    """Draws a chart.

    Args:
        chart: What to draw.

    Returns:
        One ``<svg>`` element.
    """
    return _line_chart(chart) if isinstance(chart, LineChart) else _bar_chart(chart)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round values between two values, steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in a range; with 2 and 5 between them where there are few; else powers of two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [10.0**p for p in powers if low <= 10.0**p <= high]
    if len(inside) < 3:
        inside = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    if len(inside) < 2:  # a loss scale that hardly moved: an axis without numbers says nothing
        twos = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        inside = [2.0**p for p in twos if low <= 2.0**p <= high] or inside or nice_ticks(low, high, 3)
    return inside[:: math.ceil(len(inside) / 7) or 1]


def tick_text(value: float, ticks: Sequence[float] = ()) -> str:
    """A value at an axis, with as many decimals as tell the ticks apart."""
    if abs(value) >= 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    decimals = min(6, max(0, -math.floor(math.log10(step) + 1e-9))) if step > 0 else 0
    if step * 10**decimals % 1 > 1e-6:
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def _line_chart(chart: LineChart) -> str:
    x, y = _scales(chart)
    parts = [*_axes(chart, x, y)]
    for line in chart.lines:
        if line.low:
            parts.append(_area(line, x, y))
    # The baseline lies below, and is wide: a candidate that equals it is seen upon it, and hides nothing.
    for line in sorted(chart.lines, key=lambda line: line.colour != 0):
        parts.append(_path(line, x, y))
    for line in chart.lines:
        parts += [_cross(x(at), y(value), line.colour) for at, value in line.marks]
    return _frame(chart, HEIGHT, parts)


def _scales(chart: LineChart) -> tuple[Scale, Scale]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for y in (*(v for _, v in line.points), *line.low, *line.high)]
    x = Scale(min(0.0, *xs), max(xs) or 1.0, LEFT, WIDTH - RIGHT)
    low, high = min(ys), max(ys)
    if chart.focus is not None:
        low, high = max(low, -chart.focus), min(high, chart.focus)
    if chart.log:
        low, high = low / 1.08, high * 1.08
    else:
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP, chart.log)


def _axes(chart: LineChart, x: Scale, y: Scale) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    y_ticks = log_ticks(y.low, y.high) if y.log else nice_ticks(y.low, y.high)
    for tick in y_ticks:
        at = y(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        text = f"{tick:g}" if y.log and tick < 1e5 else tick_text(tick, y_ticks)
        yield f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    x_ticks = nice_ticks(x.low, x.high)
    for tick in x_ticks:
        at = x(tick)
        anchor = "end" if at > right - 12 else "middle"
        text = tick_text(tick, x_ticks)
        yield f'<text class="tick" x="{at:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{text}</text>'
        yield f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}"/>'
    yield f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
    middle = (LEFT + right) / 2
    yield f'<text class="name" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">{escape(chart.x)}</text>'


def _path(line: Line, x: Scale, y: Scale) -> str:
    places = [(x(at), y(value)) for at, value in line.points]
    steps = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for at, value in places[1:]:
        steps.append(f"H{at:.1f}V{value:.1f}" if line.stepped else f"L{at:.1f} {value:.1f}")
    title = f"<title>{escape(line.label)}</title>"
    if len(places) == 1:
        return (
            f'<circle class="dot" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" {_ink(line)}>{title}</circle>'
        )
    kind = "line" if line.colour or line.stepped else "line base"  # a loss scale is a run's, not the baseline's
    return f'<path class="{kind}" d="{"".join(steps)}" {_ink(line)}>{title}</path>'


def _area(line: Line, x: Scale, y: Scale) -> str:
    there = [f"{x(at):.1f} {y(high):.1f}" for (at, _), high in zip(line.points, line.high, strict=True)]
    back = [f"{x(at):.1f} {y(low):.1f}" for (at, _), low in zip(line.points, line.low, strict=True)]
    kind = "area" if line.colour else "area base"  # many areas over one another would hide the baseline's
    return f'<path class="{kind}" d="M{"L".join([*there, *reversed(back)])}Z" {_ink(line)}/>'


def _cross(at: float, value: float, colour: int) -> str:
    d = f"M{at - 4:.1f} {value - 4:.1f}l8 8m0 -8l-8 8"
    return f'<path class="skip" d="{d}" style="--ink:var(--c{colour % COLOURS})"><title>skipped step</title></path>'


def _ink(line: Line) -> str:
    dash = DASHES[min(line.colour // COLOURS, len(DASHES) - 1)]
    return f'style="--ink:var(--c{line.colour % COLOURS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _bar_chart(chart: BarChart) -> str:
    height = 8 + BAR_PITCH * len(chart.bars)
    longest = max(max(bar.high, bar.value) for bar in chart.bars)
    scale = Scale(0.0, longest or 1.0, 2, WIDTH - RIGHT)
    parts = [part for place, bar in enumerate(chart.bars) for part in _bar(bar, 4 + BAR_PITCH * place, scale)]
    return _frame(chart, height, parts)


def _bar(bar: Bar, top: float, scale: Scale) -> Iterable[str]:
    """A label and its value above, the bar below, so that long labels have the whole width."""
    text, middle = top + 13, top + 20 + BAR_HEIGHT / 2
    yield f'<text class="bar-label" x="2" y="{text:.1f}">{escape(bar.label)}</text>'
    yield f'<text class="bar-value" x="{WIDTH - RIGHT}" y="{text:.1f}" text-anchor="end">{escape(bar.text)}</text>'
    width = max(1.0, scale(bar.value) - 2)
    yield f'<rect class="track" x="2" y="{top + 20:.1f}" width="{WIDTH - RIGHT - 2}" height="{BAR_HEIGHT}" rx="3"/>'
    yield (
        f'<rect class="bar" x="2" y="{top + 20:.1f}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="3" '
        f'style="--ink:var(--c{bar.colour % COLOURS})"><title>{escape(bar.label)}: {escape(bar.text)}</title></rect>'
    )
    if bar.high > bar.low:
        low, high = scale(bar.low), scale(bar.high)
        yield f'<path class="range" d="M{low:.1f} {middle - 4:.1f}v8m0 -4H{high:.1f}m0 -4v8"/>'


def _frame(chart: Chart, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg id="{escape(chart.name)}" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'
    )
