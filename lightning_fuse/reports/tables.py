"""The comparison as tables, one row per group or per run: for page, terminal and Markdown, from the same cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_fuse.records.summary import size
from lightning_fuse.reports.run import Target
from lightning_fuse.reports.significance import Spread, show
from lightning_fuse.reports.stats import AXES, Comparison, of_target, scored_runs, spread_of

NONE = "–"
COLOURS = {"same": "green", "better": "green", "worse": "red", "diverged": "red", "failed": "red"}
# The terminal shows what eighty characters hold; the files have every column.
TERMINAL = ("configuration", "state", "opt. step", "train step", "to target", "updates", "skips")


class Cell(NamedTuple):
    """A text, and the number by which the page sorts it (None for words)."""

    text: str
    order: float | None = None


@dataclass(frozen=True)
class Table:
    """Headings and cells; ``words`` are the headings of columns that hold text."""

    name: str
    title: str
    heads: list[str]
    rows: list[list[Cell]]
    words: frozenset[str] = frozenset({"configuration", "verdict", "run", "status", "remarks", "target"})


def tables_of(comparison: Comparison) -> list[Table]:
    """All tables that have rows, without columns in which no row has anything."""
    found = (_groups(comparison), _targets(comparison), _budgets(comparison), _runs(comparison))
    return [_without_empty(table) for table in found if table.rows]


def markdown_text(comparison: Comparison) -> str:
    """Headlines, tables and notes as Markdown."""
    lines = [
        f"# Comparison: {_inert(comparison.recipe)}",
        "",
        f"Baseline: **{_inert(comparison.baseline.label)}**.",
        "",
    ]
    lines += headlines(comparison)
    if comparison.findings:
        lines += ["", "## In figures", "", *(f"- **{f.outcome}** · {_inert(f.text)}" for f in comparison.findings)]
    for table in tables_of(comparison):
        rule = [":--" if head in table.words else "--:" for head in table.heads]
        cells = [[_inert(cell.text) for cell in row] for row in table.rows]
        rows = [[_inert(head) for head in table.heads], rule, *cells]
        lines += ["", f"## {_inert(table.title)}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    lines += ["", "## Notes", "", *(f"- {_inert(note)}" for note in comparison.notes)]
    return "\n".join(lines) + "\n"


def headlines(comparison: Comparison) -> list[str]:
    """The answer as a Markdown list, a line per candidate; README.md has the flagship's."""
    return [f"- **{_inert(finding.label)}**: {_inert(finding.headline)}." for finding in comparison.findings]


def print_comparison(comparison: Comparison) -> None:
    """Headlines and the table of configurations in the terminal, with rich; as Markdown where rich is missing."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text  # brackets in a label are no markup
    except ImportError:
        print(markdown_text(comparison))
        return
    console = Console()
    console.print(Text(f"{comparison.recipe}, baseline {comparison.baseline.label}", style="bold"))
    lines = RichTable.grid(padding=(0, 2, 1, 0))
    for finding in comparison.findings:
        said = Text(f"{finding.label}: {finding.headline}", style="bold").append(f"\n{finding.text}", style="not bold")
        lines.add_row(Text(finding.outcome, style=COLOURS.get(finding.outcome, "yellow")), said)
    console.print(lines)
    table = next(table for table in tables_of(comparison) if table.name == "configurations")
    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [i for i, head in enumerate(table.heads) if head in (*TERMINAL, comparison.metric)]
    for i in shown:  # heads may break into lines, figures may not
        left = i == 0
        justify: Any = "left" if left else "right"
        drawn.add_column(table.heads[i], justify=justify, min_width=16 if left else 6, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(row[i].text.replace(" ", " " if i == 0 else "\u00a0")) for i in shown))
    console.print(drawn)
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="dim"))


def milliseconds(value: float) -> str:
    """Milliseconds in three digits."""
    return f"{value:.3g} ms"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _per_parameter(run: Any) -> float | None:
    return None if run.state_bytes is None or not run.parameters else run.state_bytes / run.parameters


def _groups(comparison: Comparison) -> Table:
    """One row per group: quality (mean and range of the seeds), then medians: bytes, times, target, skips."""
    metric = comparison.metric
    figures: list[tuple[str, Callable[[Any], float | None], Callable[[float], str]]] = [
        ("state", lambda run: run.state_bytes, size),
        ("bytes/param", _per_parameter, lambda value: f"{value:.2f}"),
        ("opt. step", lambda run: run.optimizer_ms, milliseconds),
        ("of training", lambda run: run.optimizer_share, _share),
        ("train step", lambda run: run.training_step_ms, milliseconds),
        ("to target", of_target("train_seconds"), _seconds),
        ("wall", of_target("wall_seconds"), _seconds),
        ("updates", of_target("updates"), _count),
        (comparison.tokens, of_target("tokens"), _count),
        ("checkpoint", lambda run: run.checkpoint_bytes, size),
        ("saving", lambda run: run.checkpoint_ms, milliseconds),
        ("peak memory", lambda run: run.peak_memory_bytes, size),
    ]
    outcomes = {finding.label: finding.outcome for finding in comparison.findings}
    rows = []
    for group in comparison.groups:
        finals = spread_of(scored_runs(group, metric), lambda run: run.finals.get(metric))
        targets = [run.target for run in group.runs if run.target is not None]
        hits = sum(bool(target.reached) for target in targets)
        extent = f"{show(finals.low)} … {show(finals.high)}" if finals.count > 1 else NONE
        row = [Cell(group.label), Cell(outcomes.get(group.label, "baseline")), _number(len(group.seeds), _count)]
        row += [_number(finals.mean, show), Cell(extent, finals.high - finals.low)]
        row += [_number(spread_of(group.runs, value).median, shown) for _, value, shown in figures]
        row.append(Cell(f"{hits} of {len(targets)}" if targets else NONE, float(hits)))
        rows.append([*row, _number(sum(run.skips or 0 for run in group.runs), _count)])
    heads = ["configuration", "verdict", "seeds", metric, "range", *(head for head, _, _ in figures)]
    return Table("configurations", "Configurations", [*heads, "reached", "skips"], rows)


def _runs(comparison: Comparison) -> Table:
    """One row per run: how it ended, and what is odd about it."""
    metric = comparison.metric
    heads = ["run", "configuration", "seed", "status", "updates", "skips", f"last {metric}", "train seconds", "remarks"]
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            final = run.finals.get(metric)
            row = [Cell(run.name), Cell(group.label), _number(run.seed, str), Cell(run.status)]
            row += [_number(run.updates, _count), _number(run.skips, _count)]
            row.append(Cell(NONE) if final is None else Cell(show(final), final if math.isfinite(final) else None))
            row += [_number(run.train_seconds, lambda value: f"{value:.1f}"), Cell("; ".join(run.notes) or NONE)]
            rows.append(row)
    return Table("runs", "Runs", heads, rows)


def _budgets(comparison: Comparison) -> Table:
    """The metric when all have come equally far: by updates, by tokens, by train seconds."""
    units = {**AXES, "tokens": comparison.tokens}
    heads = ["configuration"]
    for budget in comparison.budgets:
        amount = f"{budget.limit:,.1f}" if budget.axis == "seconds" else f"{budget.limit:,.0f}"
        heads.append(f"after {amount} {units[budget.axis]}")
    labels = list(dict.fromkeys(label for budget in comparison.budgets for label in budget.values))
    rows = [[Cell(label), *(_mean_range(budget.values[label]) for budget in comparison.budgets)] for label in labels]
    return Table("budgets", f"{comparison.metric} at equal budgets", heads, rows)


def _targets(comparison: Comparison) -> Table:
    """One row per group and target, where runs have several targets; no rows otherwise."""
    shown = {"train_seconds": _seconds, "wall_seconds": _seconds, "updates": _count, "tokens": _count}
    heads = ["configuration", "target", "reached", "train seconds", "wall", "updates", comparison.tokens]
    rows = []
    for group in comparison.groups:
        by_label: dict[str, list[Target]] = {}
        for target in (target for run in group.runs for target in run.targets):
            by_label.setdefault(target.label, []).append(target)
        for label, targets in by_label.items():
            hits = [target for target in targets if target.reached]
            row = [Cell(group.label), Cell(label), Cell(f"{len(hits)} of {len(targets)}", float(len(hits)))]
            for name, words in shown.items():
                known = [getattr(hit, name) for hit in hits if getattr(hit, name) is not None]
                row.append(_number(Spread(tuple(known)).median, words))
            rows.append(row)
    several = len({row[1].text for row in rows}) > 1
    return Table("targets", "Time to each target", heads, rows if several else [])


def _number(value: float | None, shown: Callable[[Any], str]) -> Cell:
    return Cell(NONE) if value is None or not math.isfinite(value) else Cell(shown(value), float(value))


def _mean_range(spread: Spread) -> Cell:
    if not spread.count:
        return Cell(NONE)
    extent = f" ({show(spread.low)} … {show(spread.high)})" if spread.count > 1 else ""
    return Cell(f"{show(spread.mean)}{extent}", spread.mean)


def _without_empty(table: Table) -> Table:
    kept = [i for i in range(len(table.heads)) if i == 0 or any(row[i].text != NONE for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.name, table.title, [table.heads[i] for i in kept], rows, table.words)


def _inert(text: str) -> str:
    """A text of a run folder is text in Markdown, too: no table, tag, link or line of its own."""
    for mark in "|<[]":
        text = text.replace(mark, "&lt;" if mark == "<" else f"\\{mark}")
    return " ".join(text.split())
