"""The comparison as tables: one row per group, one row per run; for the terminal, Markdown and CSV.

Cells are made once, here; every output shows the same ones.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_fuse.records.summary import size
from lightning_fuse.reports.comparison import Comparison
from lightning_fuse.reports.evidence import Spread, spread_of, witnesses
from lightning_fuse.reports.grouping import Group
from lightning_fuse.reports.measures import Target, target_of, targets_of
from lightning_fuse.reports.reading import Run
from lightning_fuse.reports.verdict import show

NONE = "–"
MARKUP = str.maketrans({"|": "\\|", "<": "&lt;"})  # a folder's name is text in Markdown, too
OUTCOME_COLOURS = {"same": "green", "better": "green", "worse": "red", "diverged": "red", "failed": "red"}
TERMINAL_LEAVES_OUT = {
    "of training",
    "verdict",
    "seeds",
    "range",
    "bytes/param",
    "wall",
    "tokens",
    "samples",
    "reached",
    "saving",
    "checkpoint",
}


TARGET_FIGURES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("seconds", lambda value: f"{value:.1f} s"),
    ("wall", lambda value: f"{value:.1f} s"),
    ("updates", lambda value: f"{value:,.0f}"),
    ("tokens", lambda value: f"{value:,.0f}"),
)


@dataclass(frozen=True)
class Table:
    """Headings and cells.

    Attributes:
        title: What it shows.
        heads: One per column; the first column is text, the others are figures unless ``text`` names them.
        rows: Cells as text.
        text: Indices of the columns that hold words.
    """

    title: str
    heads: list[str]
    rows: list[list[str]]
    text: tuple[int, ...] = (0,)


def group_table(comparison: Comparison) -> Table:
    """One row per group: quality (mean and range of the seeds), bytes, times, target, skips (medians)."""
    best = comparison.metric
    heads = ["configuration", "verdict", "seeds", best, "range", "state", "bytes/param"]
    heads += ["opt. step", "of training", "train step", "to target", "wall", "updates", comparison.tokens, "reached"]
    heads += ["skips", "checkpoint", "saving"]
    outcomes = {verdict.label: verdict.outcome for verdict in comparison.verdicts}
    rows = []
    for group in comparison.groups:
        finals = spread_of(witnesses(group, best), lambda run: _final(run, best))
        rows.append(
            [
                group.label,
                outcomes.get(group.label, "baseline"),
                str(len(group.seeds)),
                show(finals.mean) if finals.count else NONE,
                f"{show(finals.low)} … {show(finals.high)}" if finals.count > 1 else NONE,
                _median(group, lambda run: run.state_bytes, size),
                _median(group, _bytes_per_parameter, lambda value: f"{value:.2f}"),
                _median(group, lambda run: run.optimizer_ms, milliseconds),
                _median(group, _optimizer_share, lambda share: f"{share:.1%}".replace("%", " %")),
                _median(group, lambda run: run.step_ms, milliseconds),
                *_target_cells(group),
                f"{sum(len(run.skips) for run in group.runs):,}",
                _median(group, lambda run: run.checkpoint_bytes, size),
                _median(group, checkpoint_ms, milliseconds),
            ]
        )
    return Table("Configurations", heads, rows, text=(0, 1))


def run_table(comparison: Comparison) -> Table:
    """One row per run: how it ended, and what is odd about it."""
    heads = ["run", "configuration", "seed", "status", "updates", "skips", f"last {comparison.metric}", "train seconds"]
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            points = run.metrics.get(comparison.metric)
            summary = run.summary
            rows.append(
                [
                    run.name,
                    group.label,
                    NONE if run.seed is None else str(run.seed),
                    run.status,
                    f"{summary.updates if summary and run.finished else _last_update(run):,}",
                    f"{len(run.skips):,}",
                    show(points[-1].value) if points else NONE,
                    NONE if (seconds := _train_seconds(run)) is None else f"{seconds:.1f}",
                    "; ".join(run.notes) or NONE,
                ]
            )
    return Table("Runs", [*heads, "remarks"], rows, text=(0, 1, 3, 8))


def budget_table(comparison: Comparison) -> Table:
    """The metric when all have come equally far: by updates, by tokens, by train seconds."""
    units = {"update": "updates", "tokens": comparison.tokens, "seconds": "train seconds"}
    heads = ["configuration"]
    for budget in comparison.budgets:
        amount = f"{budget.limit:,.1f}" if budget.axis == "seconds" else f"{budget.limit:,.0f}"
        heads.append(f"after {amount} {units[budget.axis]}")
    labels = list(dict.fromkeys(label for budget in comparison.budgets for label in budget.values))
    rows = [[label, *(_mean_range(budget.values[label]) for budget in comparison.budgets)] for label in labels]
    return Table(f"{comparison.metric} at equal budgets", heads, rows)


def target_table(comparison: Comparison) -> Table:
    """One row per group and target, where runs have several targets; no rows otherwise."""
    heads = ["configuration", "target", "reached", "train seconds", "wall", "updates", comparison.tokens]
    rows = []
    for group in comparison.groups:
        by_label: dict[str, list[Target]] = {}
        for target in (target for run in group.runs for target in targets_of(run)):
            by_label.setdefault(target.label, []).append(target)
        for label, targets in by_label.items():
            hits = [target for target in targets if target.reached]
            cells = [_median_of([getattr(hit, name) for hit in hits], shown) for name, shown in TARGET_FIGURES]
            rows.append([group.label, label, f"{len(hits)} of {len(targets)}", *cells])
    several = len({row[1] for row in rows}) > 1
    return Table("Time to each target", heads, rows if several else [], text=(0, 1))


def csv_text(comparison: Comparison) -> str:
    """Every run as one row of plain numbers, for a spreadsheet."""
    columns: list[tuple[str, Callable[[Run], Any]]] = [
        ("seed", lambda run: run.seed),
        ("status", lambda run: run.status),
        ("recipe", lambda run: run.recipe),
        (f"final_{comparison.metric}", lambda run: _final(run, comparison.metric)),
        ("updates", lambda run: run.summary.updates if run.summary else _last_update(run)),
        ("global_step", lambda run: run.last_step),
        ("skips", lambda run: len(run.skips)),
        ("parameters", lambda run: run.parameters or None),
        ("state_bytes", lambda run: run.state_bytes),
        ("optimizer_ms", lambda run: run.optimizer_ms),
        ("optimizer_share", _optimizer_share),
        ("training_step_ms", lambda run: run.step_ms),
        ("train_seconds", _train_seconds),
        ("validation_seconds", lambda run: run.summary.validation_seconds if run.summary else None),
        ("wall_seconds", lambda run: run.summary.wall_seconds if run.summary else None),
        ("peak_memory_bytes", lambda run: run.summary.peak_memory_bytes if run.summary else None),
        ("checkpoint_bytes", lambda run: run.checkpoint_bytes),
        ("checkpoint_ms", checkpoint_ms),
        ("target", lambda run: getattr(target_of(run), "label", None)),
        ("target_reached", lambda run: getattr(target_of(run), "reached", None)),
        ("target_train_seconds", lambda run: getattr(target_of(run), "seconds", None)),
        ("target_wall_seconds", lambda run: getattr(target_of(run), "wall", None)),
        ("target_updates", lambda run: getattr(target_of(run), "updates", None)),
        (f"target_{comparison.tokens}", lambda run: getattr(target_of(run), "tokens", None)),
        ("data_hash", lambda run: run.data_hash),
        ("remarks", lambda run: "; ".join(run.notes)),
    ]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    words = ("optimizer", "state", "master", "precision", "kernel")
    writer.writerow(["configuration", "baseline", *words, *(name for name, _ in columns)])
    for group in comparison.groups:
        for run in group.runs:
            cells = [value(run) for _, value in columns]
            known = [group.label, group is comparison.baseline, *(group.words[name] for name in words)]
            writer.writerow([*known, *("" if cell is None else cell for cell in cells)])
    return text.getvalue()


def markdown_text(comparison: Comparison) -> str:
    """Verdicts, tables and notes as Markdown."""
    lines = [f"# Comparison: {comparison.recipe}", "", f"Baseline: **{comparison.baseline.label}**.", ""]
    lines += [f"- **{verdict.outcome}** · {verdict.text}" for verdict in comparison.verdicts]
    tables = (group_table(comparison), target_table(comparison), budget_table(comparison), run_table(comparison))
    for table in (table for table in tables if table.rows):
        lines += ["", f"## {table.title}", "", *_markdown_rows(table)]
    lines += ["", "## Notes", "", *(f"- {note}" for note in comparison.notes)]
    return "\n".join(lines) + "\n"


def print_comparison(comparison: Comparison) -> None:
    """Verdicts and the table of configurations in the terminal, with rich; as Markdown where rich is missing."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(markdown_text(comparison))
        return
    console = Console()
    console.print(Text(f"{comparison.recipe}, baseline {comparison.baseline.label}", style="bold"))
    console.print(_verdict_lines(comparison))
    console.print(_drawn(group_table(comparison)))
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="dim"))


def shown_columns(table: Table) -> list[int]:
    """Indices of the columns in which some row has something, and of the first."""
    return [i for i in range(len(table.heads)) if i == 0 or any(row[i] != NONE for row in table.rows)]


def milliseconds(value: float) -> str:
    """Milliseconds in three digits."""
    return f"{value:.3g} ms"


def checkpoint_ms(run: Run) -> float | None:
    """Median milliseconds of writing a checkpoint, where the run recorded it."""
    return None if run.summary is None else run.summary.checkpoint_ms


def _optimizer_share(run: Run) -> float | None:
    return None if run.summary is None else run.summary.optimizer_share


def _final(run: Run, metric: str) -> float | None:
    points = run.metrics.get(metric)
    return points[-1].value if points else None


def _train_seconds(run: Run) -> float | None:
    """Of the whole run where its summary is final, else until its last measurement."""
    if run.finished and run.summary is not None and run.summary.train_seconds is not None:
        return run.summary.train_seconds
    return max((points[-1].seconds for points in run.metrics.values() if points), default=None)


def _last_update(run: Run) -> int:
    return max((points[-1].update for points in run.metrics.values() if points), default=0)


def _bytes_per_parameter(run: Run) -> float | None:
    return None if run.state_bytes is None or not run.parameters else run.state_bytes / run.parameters


def _median(group: Group, value: Callable[[Run], float | None], shown: Callable[[float], str]) -> str:
    spread = spread_of(group.runs, value)
    return shown(spread.median) if spread.count else NONE


def _median_of(values: list[float | None], shown: Callable[[float], str]) -> str:
    known = Spread(tuple(float(value) for value in values if value is not None))
    return shown(known.median) if known.count else NONE


def _target_cells(group: Group) -> list[str]:
    """Train seconds, wall seconds, updates and tokens to the target, and how many runs reached it."""
    targets = [target for run in group.runs if (target := target_of(run)) is not None]
    hits = sum(target.reached for target in targets)
    cells = [_median(group, _of_target(name), shown) for name, shown in TARGET_FIGURES]
    return [*cells, f"{hits} of {len(targets)}" if targets else NONE]


def _of_target(name: str) -> Callable[[Run], float | None]:
    return lambda run: getattr(target_of(run), name, None)


def _mean_range(spread: Spread) -> str:
    if not spread.count:
        return NONE
    if spread.count == 1:
        return show(spread.mean)
    return f"{show(spread.mean)} ({show(spread.low)} … {show(spread.high)})"


def _markdown_rows(table: Table) -> list[str]:
    shown = _without_empty(table)
    rule = [":--" if index in shown.text else "--:" for index in range(len(shown.heads))]
    lines = [
        shown.heads,
        rule,
        *([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in shown.rows),
    ]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _without_empty(table: Table) -> Table:
    """Leaves out columns in which no row has anything."""
    kept = shown_columns(table)
    text = tuple(new for new, old in enumerate(kept) if old in table.text)
    return Table(table.title, [table.heads[i] for i in kept], [[row[i] for i in kept] for row in table.rows], text)


def _verdict_lines(comparison: Comparison) -> Any:
    """The outcome in its colour, the words beside it."""
    from rich.table import Table as RichTable
    from rich.text import Text  # brackets in a label are no markup

    lines = RichTable.grid(padding=(0, 2, 1, 0))
    for verdict in comparison.verdicts:
        lines.add_row(Text(verdict.outcome, style=OUTCOME_COLOURS.get(verdict.outcome, "yellow")), Text(verdict.text))
    return lines


def _drawn(table: Table) -> Any:
    """The columns that matter most, so that eighty characters are enough; the files have all of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [index for index in shown_columns(table) if table.heads[index] not in TERMINAL_LEAVES_OUT]
    for index in shown:
        drawn.add_column(
            table.heads[index],
            justify="left" if index == 0 else "right",
            min_width=6 if index else 16,
            overflow="fold",  # two labels may differ in their last letters
        )
    for row in table.rows:
        # Heads may break into lines, figures may not.
        drawn.add_row(*(Text(row[index].replace(" ", " " if index == 0 else "\u00a0")) for index in shown))
    return drawn
