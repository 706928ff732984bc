"""The figures, declared once with Altair: the page shows them alive, and the same declarations give the PNG files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from lightning_fuse.records.summary import size
from lightning_fuse.reports.run import Run
from lightning_fuse.reports.significance import BAND_WIDTH, Spread, show
from lightning_fuse.reports.stats import AXES, Comparison, curve, of_target, scored_runs, spread_of, value_at
from lightning_fuse.reports.tables import milliseconds
from lightning_fuse.reports.theme import dash_of, theme

MOST_POINTS = 200  # of one run or group and metric in the page
MOST_METRICS = 12
MOST_MARKS = 200  # skips drawn per run
NEAR = 0.02  # of the width: labels of points closer than this are put together
HIDDEN = "indexof(hidden, datum.group) < 0"
TIMES = "Median over the seeds of each run's median; the thin line is their range."


@dataclass(frozen=True)
class Figure:
    """One figure: ``name`` of its element and file, ``title``, ``caption``, and its Vega-Lite specification."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


def figures_of(comparison: Comparison, metrics: Sequence[str]) -> list[Figure]:
    """Every figure for which there is something to draw, the answer first.

    Args:
        comparison: A comparison.
        metrics: What the curves may show; the quality first.

    Returns:
        Scatter, curves, differences, loss scale, bars.
    """
    target = comparison.baseline.runs[0].target
    goal = target.label if target is not None else "the target"
    state = "Moments, scales, counters and master weights; not parameters, gradients or activations."
    reached = "Median and range of the seeds that reached it; validation and downtime are left out."
    fewer = "Median and range of the seeds that reached it. Only fewer updates mean that more is learned from each."
    seconds = "{:.1f} s".format
    found = [
        _scatter(comparison),
        _curves(comparison, metrics[:MOST_METRICS]),
        _differences(comparison),
        _loss_scales(comparison),
        _bars(comparison, "state-bytes", "Optimizer state", lambda run: run.state_bytes, size, state),
        _bars(comparison, "optimizer-step", "Optimizer step", lambda run: run.optimizer_ms, milliseconds, TIMES),
        _bars(comparison, "training-step", "Training step", lambda run: run.training_step_ms, milliseconds, TIMES),
        _bars(comparison, "target-seconds", f"Train seconds to {goal}", of_target("train_seconds"), seconds, reached),
        _bars(comparison, "target-updates", f"Updates to {goal}", of_target("updates"), "{:,.0f}".format, fewer),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def write_pngs(figures: Sequence[Figure], folder: Path) -> None:
    """Draws figures as PNG files, the curves once by updates and once by seconds.

    Args:
        figures: What ``figures_of`` returned.
        folder: Where; it exists.
    """
    import vl_convert

    for figure in figures:
        for name, spec in _still(figure).items():
            png = vl_convert.vegalite_to_png({**spec, "config": theme("light"), "width": 640}, scale=2)
            (folder / f"{name}.png").write_bytes(png)


def _still(figure: Figure) -> dict[str, dict[str, Any]]:
    if figure.name != "curves":
        return {figure.name: figure.spec}
    metric = _parameter(figure.spec, "metric")["value"]
    found = {}
    for axis in ("update", "seconds"):
        spec = deepcopy({key: value for key, value in figure.spec.items() if key != "datasets"})
        spec["datasets"] = figure.spec["datasets"]
        _parameter(spec, "axis")["value"] = axis
        spec["params"] = [entry for entry in spec["params"] if "select" not in entry]
        spec["layer"].pop()  # the points that a pointer looks for
        for layer in spec["layer"]:
            if "condition" in layer["encoding"].get("opacity", {}):
                layer["encoding"]["opacity"] = {"value": 0.15}
            layer["encoding"]["x"]["title"], layer["encoding"]["y"]["title"] = AXES[axis], metric
        found[f"{metric.replace('/', '-')}-by-{axis}"] = spec
    return found


def _parameter(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in spec["params"] if entry["name"] == name)


def _compact(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _figure(name: str, title: str, caption: str, chart: alt.TopLevelMixin, **rows: list[dict[str, Any]]) -> Figure:
    """A figure of a chart and the rows that it names; they join the specification unchecked, as they are many."""
    spec = chart.to_dict(format="vega-lite")
    tables = {name: [{k: _compact(v) for k, v in row.items()} for row in table] for name, table in rows.items()}
    return Figure(name, title, caption, {**spec, "config": {}, "datasets": tables})


def _chart(rows: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=rows))


def _colour(labels: Sequence[str]) -> alt.Color:
    return alt.Color("group:N", scale=alt.Scale(domain=list(labels)), legend=None)


def _dash(labels: Sequence[str]) -> alt.StrokeDash:
    scale = alt.Scale(domain=list(labels), range=[dash_of(place) for place in range(len(labels))])
    return alt.StrokeDash("group:N", scale=scale, legend=None)


def _hidden() -> alt.Parameter:
    return alt.param(name="hidden", value=[])


def _zoom() -> alt.Parameter:
    return alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]", name="zoom")


def _scatter(comparison: Comparison) -> Figure | None:
    """Final quality against bytes of state: a large mark per group, a small one per run."""
    means: list[dict[str, Any]] = []
    runs, labels = [], [group.label for group in comparison.groups]
    for group in comparison.groups:
        scored = scored_runs(group, comparison.metric)
        for run in scored:
            value = run.finals[comparison.metric]
            if run.state_bytes and math.isfinite(value):
                runs.append({"group": group.label, "run": run.name, "bytes": run.state_bytes, "value": value})
        final = spread_of(scored, lambda run: run.finals.get(comparison.metric))
        state = spread_of(scored, lambda run: run.state_bytes)
        if final.count and state.count and state.median > 0:
            said = f"{show(final.mean)} ({show(final.low)} … {show(final.high)})"
            row = {"group": group.label, "bytes": state.median, "value": final.mean, "low": final.low}
            means.append({**row, "high": final.high, "final": said, "state": size(state.median)})
    if not means:
        return None
    ticks = _powers([row["bytes"] for row in means])
    axis = alt.Axis(values=ticks, labelExpr=_size_labels(ticks), grid=True)
    ends = [0.85 * min(r["bytes"] for r in means), 1.1 * max(r["bytes"] for r in means)]
    ends[1] *= (ends[1] / ends[0]) ** 0.28  # labels stand on the right
    x = alt.X(
        "bytes:Q", title="bytes of optimizer state", axis=axis, scale=alt.Scale(type="log", domain=ends, nice=False)
    )
    y = alt.Y("value:Q", title=comparison.metric, scale=alt.Scale(zero=False, padding=18))
    colour = _colour(labels)
    base = _chart("means").transform_filter(HIDDEN)
    tips = [alt.Tooltip("group:N", title="configuration"), alt.Tooltip("final:N", title=comparison.metric)]
    tips.append(alt.Tooltip("state:N", title="state"))
    whiskers = base.mark_rule(opacity=0.5).encode(
        x=x, y=alt.Y("low:Q", title=comparison.metric), y2="high:Q", color=colour
    )
    marks = base.mark_point(size=150, filled=True, opacity=0.85).encode(
        x=x, y=y, color=colour, tooltip=tips, shape=alt.Shape("group:N", scale=alt.Scale(domain=labels), legend=None)
    )
    seeds = _chart("runs").transform_filter(HIDDEN).mark_circle(size=18, opacity=0.6)
    seeds = seeds.encode(x=x, y=y, color=colour, tooltip=["run:N", "value:Q"])
    words: dict[str, list[dict[str, Any]]] = {}
    for word in _labels_of(means, ends):
        words.setdefault(f"words{len(word['label'])}", []).append(word)
    texts = [
        _chart(name).mark_text(align="left", dx=13, dy=-7 * (int(name[5:]) - 1), baseline="middle", lineHeight=14)
        .encode(x=x, y=y, text="label:N")
        for name in words
    ]  # fmt: skip
    chart = alt.layer(whiskers, seeds, marks, *texts).add_params(_hidden()).properties(width="container", height=300)
    caption = "Large: the mean of a configuration's seeds, the line is their range; small: single runs. " + (
        "Lower and further left is better." if comparison.mode == "min" else "Higher and further left is better."
    )
    return _figure(
        "final-by-state", f"{comparison.metric} against bytes of state", caption, chart, means=means, runs=runs, **words
    )


def _labels_of(means: list[dict[str, Any]], ends: list[float]) -> list[dict[str, Any]]:
    """Labels beside the marks; those of marks that lie on one another are put together."""
    width = math.log(ends[1] / ends[0])
    height = (max(row["high"] for row in means) - min(row["low"] for row in means)) or 1.0
    clusters: list[list[dict[str, Any]]] = []
    for row in sorted(means, key=lambda row: row["value"]):
        for cluster in clusters:
            across = abs(math.log(row["bytes"] / cluster[0]["bytes"])) / width
            if across < NEAR * 4 and abs(row["value"] - cluster[-1]["value"]) / height < NEAR * 5:
                cluster.append(row)
                break
        else:
            clusters.append([row])
    words = []
    for cluster in clusters:
        names = [row["group"] if len(row["group"]) <= 28 else f"{row['group'][:27]}…" for row in cluster]
        more = [f"and {len(names) - 3} more"] if len(names) > 4 else []
        place = {"bytes": cluster[0]["bytes"], "value": sum(row["value"] for row in cluster) / len(cluster)}
        words.append({**place, "label": [*names[: 3 if more else 4], *more]})
    return words


def _curves(comparison: Comparison, metrics: Sequence[str]) -> Figure | None:
    """Mean curves and single seeds; the parameters ``metric``, ``axis`` and ``hidden`` choose what is seen."""
    means, seeds, labels = [], [], [group.label for group in comparison.groups]
    for metric in metrics:
        for group in comparison.groups:
            for row in _evenly(curve(group, metric)).to_dict("records"):
                means.append({"metric": metric, "group": group.label, **row})
            for run in group.runs:
                points = _evenly(run.points.get(metric, pd.DataFrame()))
                points = points if points.empty else points[np.isfinite(points["value"])]
                for row in points.to_dict("records"):
                    seeds.append({"metric": metric, "group": group.label, "run": run.name, **row})
    if not means:
        return None
    chosen, axis, hidden = alt.param(name="metric", value=metrics[0]), alt.param(name="axis", value="update"), _hidden()
    x, y = alt.X("x:Q", title=None), alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
    colour, dash = _colour(labels), _dash(labels)
    seen = f"datum.metric === metric && {HIDDEN} && isValid(datum[axis])"

    def drawn(rows: str) -> alt.Chart:
        return _chart(rows).transform_filter(seen).transform_calculate(x="datum[axis]")

    near = alt.selection_point(
        name="near", on="pointerover", clear="pointerout", nearest=True, fields=["group", "step"], empty=False
    )
    over = "near.group && indexof(near.group, datum.group) >= 0"
    # Written out: Vega-Lite loses names in the tooltips of nearest points, whose own datum lies a level below.
    row = "(datum.datum || datum)"
    fields = {"configuration": f"{row}.group", "mean": f"format({row}.value, '.5g')", "seeds": f"{row}.seeds"}
    fields |= {"step": f"{row}.step", "update": f"{row}.update", "train seconds": f"format({row}.seconds, '.4~g')"}
    tips = alt.TooltipValue({"expr": "{" + ", ".join(f"'{name}': {said}" for name, said in fields.items()) + "}"})
    band = drawn("means").mark_area(opacity=0.12).encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=colour)
    thin = drawn("seeds").mark_line(strokeWidth=1).encode(
        x=x, y=y, color=colour, strokeDash=dash, detail="run:N",
        opacity=alt.condition(over, alt.value(0.9), alt.value(0.15)),
    )  # fmt: skip
    line = drawn("means").mark_line(strokeWidth=2.5).encode(x=x, y=y, color=colour, strokeDash=dash)
    dots = drawn("means").mark_point(size=70, filled=True).encode(
        x=x, y=y, color=colour, tooltip=tips, opacity=alt.condition(near, alt.value(1), alt.value(0))
    ).add_params(near)  # fmt: skip
    chart = alt.layer(band, thin, line, dots).add_params(chosen, axis, hidden, _zoom())
    caption = "Bold: the mean of the seeds; thin: each of them; the area is their range."
    return _figure(
        "curves", "Curves", caption, chart.properties(width="container", height=360), means=means, seeds=seeds
    )


def _evenly(table: pd.DataFrame) -> pd.DataFrame:
    """At most ``MOST_POINTS`` rows, the first and the last always, the extremes of what is left out as well."""
    if len(table) <= MOST_POINTS:
        return table
    kept = np.linspace(0, len(table) - 1, MOST_POINTS - 2).round().astype(int)
    values = table["value"].to_numpy(dtype=float)
    return table.iloc[np.unique([*kept, int(np.nanargmin(values)), int(np.nanargmax(values))])]


def _differences(comparison: Comparison) -> Figure | None:
    """Candidates minus the baseline at the same optimizer step, over the baseline's band."""
    metric, labels = comparison.metric, [group.label for group in comparison.groups]
    base = [run for run in scored_runs(comparison.baseline, metric) if metric in run.points]
    steps = sorted({step for run in base for step in _evenly(run.points[metric])["step"]})[-MOST_POINTS:]
    bands, lines = [], []
    for step in steps:
        centre = _at(base, metric, step)
        if centre.count < 2:
            continue
        half = BAND_WIDTH * float(np.std(centre.values, ddof=1))
        bands.append({"step": step, "low": -half, "high": half, "group": labels[0]})
        for group in comparison.groups[1:]:
            own = _at(scored_runs(group, metric), metric, step)
            if own.count:
                lines.append({"step": step, "value": own.mean - centre.mean, "group": group.label})
    if not lines:
        return None
    # Seeds lie far apart at the beginning; what matters is seen from the second half on.
    late = [
        max(abs(row.get("value", 0)), row.get("high", 0)) for row in [*lines, *bands] if row["step"] >= steps[-1] / 2
    ]
    focus = alt.Scale(domain=[-1.15 * max(late), 1.15 * max(late)], clamp=True) if max(late) > 0 else alt.Undefined
    x = alt.X("step:Q", title="optimizer steps")
    y = alt.Y("value:Q", title=f"difference in {metric}", scale=focus)
    area = _chart("bands").mark_area(opacity=0.2, color="#888").encode(
        x=x, y=alt.Y("low:Q", title=f"difference in {metric}", scale=focus), y2="high:Q")  # fmt: skip
    tips = [
        alt.Tooltip("group:N", title="configuration"),
        alt.Tooltip("value:Q", format="+.3g", title="difference"),
        "step:Q",
    ]
    line = _chart("lines").transform_filter(HIDDEN).mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=22)).encode(
        x=x, y=y, color=_colour(labels), strokeDash=_dash(labels), tooltip=tips)  # fmt: skip
    chart = alt.layer(area, line).add_params(_hidden(), _zoom()).properties(width="container", height=260)
    caption = "Means of the seeds. In the grey band a difference is no larger than between the baseline's seeds."
    return _figure(
        "difference-by-step", f"{metric}, candidate minus baseline", caption, chart, bands=bands, lines=lines
    )


def _at(runs: Sequence[Run], metric: str, step: float) -> Spread:
    return spread_of(runs, lambda run: value_at(run, metric, step) if metric in run.points else None)


def _loss_scales(comparison: Comparison) -> Figure | None:
    """One stepped line per run that has a loss scale, with its skips."""
    lines, marks, labels = [], [], [group.label for group in comparison.groups]
    for group in comparison.groups:
        for run in group.runs:
            if run.scales.empty:
                continue
            known = {"group": group.label, "run": run.name}
            rows = run.scales.tail(MOST_POINTS * 5).to_dict("records")
            end = max(run.global_step or 0, rows[-1]["step"])
            lines += [{**known, **row} for row in (*rows, {"step": end, "scale": rows[-1]["scale"]})]
            skips = run.skipped[run.skipped["scale"].notna()].head(MOST_MARKS).to_dict("records")
            marks += [{**known, **row} for row in skips]
    if not lines:
        return None
    x, y = alt.X("step:Q", title="optimizer steps"), alt.Y("scale:Q", title="loss scale", scale=alt.Scale(type="log"))
    colour = _colour(labels)
    tips = ["run:N", "step:Q", "scale:Q"]
    line = _chart("lines").transform_filter(HIDDEN).mark_line(interpolate="step-after").encode(
        x=x, y=y, color=colour, strokeDash=_dash(labels), detail="run:N", tooltip=tips)  # fmt: skip
    cross = _chart("marks").transform_filter(HIDDEN).mark_point(shape="cross", size=60, filled=True, angle=45).encode(
        x=x, y=y, color=colour, tooltip=["run:N", "step:Q", "reason:N", "scale:Q"])  # fmt: skip
    chart = alt.layer(line, cross).add_params(_hidden(), _zoom()).properties(width="container", height=220)
    caption = "One line per run; a cross is a skipped step. Logarithmic."
    return _figure("loss-scale", "Loss scale and skipped steps", caption, chart, lines=lines, marks=marks)


def _bars(
    comparison: Comparison,
    name: str,
    title: str,
    value: Callable[[Run], float | None],
    shown: Callable[[float], str],
    caption: str,
) -> Figure | None:
    """A bar per group from zero: the median, the seeds' range as a whisker, the value in words."""
    labels = [group.label for group in comparison.groups]
    spreads = {g.label: spread for g in comparison.groups if (spread := spread_of(g.runs, value)).count}
    rows: list[dict[str, Any]] = []
    for label, spread in spreads.items():
        extent = f"{shown(spread.low)} … {shown(spread.high)}" if spread.count > 1 else shown(spread.low)
        row = {"group": label, "value": spread.median, "low": spread.low, "high": spread.high}
        rows.append({**row, "text": shown(spread.median), "seeds": extent})
    if not rows:
        return None
    most = 1.3 * max(spread.high for spread in spreads.values()) or 1.0
    x = alt.X("value:Q", title=None, axis=None, scale=alt.Scale(domain=[0, most]))
    y = alt.Y("group:N", title=None, sort=labels, axis=alt.Axis(labelLimit=160, ticks=False, domain=False))
    tips = [
        alt.Tooltip("group:N", title="configuration"),
        alt.Tooltip("text:N", title="median"),
        alt.Tooltip("seeds:N", title="seeds"),
    ]
    base = _chart("rows").transform_filter(HIDDEN)
    bar = base.mark_bar(size=18).encode(x=x, y=y, color=_colour(labels), tooltip=tips)
    whisker = base.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q", title=None), x2="high:Q", y=y)
    text = base.mark_text(align="left", dx=6).encode(x=alt.X("high:Q", title=None), y=y, text="text:N")
    chart = alt.layer(bar, whisker, text).add_params(_hidden())
    chart = chart.properties(width="container", height=30 * len(rows))
    return _figure(name, title, caption, chart, rows=rows)


def _powers(values: Sequence[float]) -> list[float]:
    """Powers of two of bytes around some values, at most eight."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    every = max(1, -(-(high - low) // 7))
    return [2.0**power for power in range(low, max(high, low + 1) + 1, every)]


def _size_labels(ticks: Sequence[float]) -> str:
    named = {tick: size(tick).replace(".0 ", " ") for tick in ticks}
    return " : ".join(f"datum.value === {tick:.0f} ? '{text}'" for tick, text in named.items()) + " : ''"
