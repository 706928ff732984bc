"""A comparison: groups, the baseline, a verdict per candidate, and the values at equal budgets.

The tables, the figures and the page only show what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fuse.reports.evidence import (
    AXES,
    Spread,
    common_limit,
    fixed_band,
    seeds_band,
    spread_of,
    value_by,
    witnesses,
)
from lightning_fuse.reports.grouping import (
    Group,
    NotComparable,
    check_data,
    choose_baseline,
    group_runs,
    same_data,
)
from lightning_fuse.reports.measures import better, tokens_name
from lightning_fuse.reports.reading import Run, find_runs, read_run
from lightning_fuse.reports.verdict import Verdict, judge

USUAL_METRIC = "val/loss"


@dataclass(frozen=True)
class EqualBudget:
    """Values when all runs have come equally far.

    Attributes:
        axis: One of ``AXES``.
        limit: How far, in updates, tokens or train seconds.
        values: Group label to its seeds' last values measured by then.
    """

    axis: str
    limit: float
    values: dict[str, Spread]


@dataclass
class Comparison:
    """What was compared, and what came out.

    Attributes:
        groups: All of them, the baseline first.
        metric: The quality.
        mode: "min" or "max".
        verdicts: One per candidate, in the order of the groups.
        budgets: The metric at equal updates, tokens and train seconds.
        notes: What holds for the whole comparison, or is odd about single runs.
        tokens: What the third axis counts: ``tokens`` or ``samples``.
    """

    groups: list[Group]
    metric: str
    mode: str
    verdicts: list[Verdict]
    budgets: list[EqualBudget]
    notes: list[str]
    tokens: str

    @property
    def baseline(self) -> Group:
        """The group that the others are compared with."""
        return self.groups[0]

    @property
    def runs(self) -> list[Run]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def recipe(self) -> str:
        """The recipes' words."""
        return ", ".join(dict.fromkeys(run.recipe for run in self.runs))


def compare(
    paths: Sequence[str | Path],
    *,
    baseline: Sequence[str] = (),
    metric: str | None = None,
    half: float | None = None,
    allow_different_data: bool = False,
) -> Comparison:
    """Reads runs and compares them.

    Args:
        paths: Run folders and multirun folders.
        baseline: ``KEY=WORD`` each; see ``choose_baseline``.
        metric: A validation metric; None takes ``val/loss`` where it was measured, else the recipe's own.
        half: Half the band's width, in the metric's unit; None takes the band of the baseline's seeds.
        allow_different_data: Go on where recipes or data differ; their losses are then left uncompared.

    Returns:
        The comparison.

    Raises:
        FileNotFoundError: A path is no run and holds none.
        NotComparable: The runs have different data, one group only, or none of the asked metric; or ``baseline`` does
            not name one group.
    """
    runs = [read_run(folder) for folder in find_runs(paths)]
    faults = check_data(runs)
    if faults and not allow_different_data:
        raise NotComparable(
            f"{'; '.join(faults)}: compare the runs of one kind at a time, or add --allow-different-data to see them "
            "side by side without verdicts on their losses"
        )
    groups = group_runs(runs)
    first = choose_baseline(groups, baseline)
    groups = [first, *(group for group in groups if group is not first)]
    name = _metric(runs, metric)
    mode = better(name, first.runs[0])
    verdicts = [judge(first, group, name, mode, half) for group in groups[1:]]
    alike = [group for group in groups if same_data(first.runs[0], group.runs[0])]
    notes = [*faults, *_group_notes(groups, first, name, half), *_run_notes(runs)]
    return Comparison(groups, name, mode, verdicts, _budgets(alike, name), notes, tokens_name(first.runs[0]))


def leaves_band(comparison: Comparison) -> list[str]:
    """Which candidates are not within the band, each with the reason; for ``--assert-within``.

    Inside means: the mean of the final values lies in the band, on either side of the baseline, and no run of the
    candidate failed or diverged. What cannot be judged is not within.

    Args:
        comparison: A comparison.

    Returns:
        One line per candidate that is not; one line if there is no candidate at all.
    """
    if not comparison.verdicts:
        return [f"there is nothing to compare with {comparison.baseline.label}: all runs belong to it"]
    return [
        f"{verdict.label}: {verdict.sentences[0]}"
        for verdict in comparison.verdicts
        if verdict.outcome != "same" or any(caution.startswith("no run of") for caution in verdict.cautions)
    ]


def _metric(runs: Sequence[Run], wanted: str | None) -> str:
    measured = {name for run in runs for name in run.metrics}
    if wanted is not None:
        if wanted not in measured:
            known = ", ".join(sorted(measured)) or "none at all"
            raise NotComparable(f"no run measured the metric {wanted!r}; measured: {known}")
        return wanted
    if USUAL_METRIC in measured or not measured:
        return USUAL_METRIC
    monitor = (runs[0].config.get("recipe") or {}).get("monitor")
    if monitor in measured:
        return str(monitor)
    return min(measured, key=lambda name: (not name.startswith("val"), name))


def _budgets(groups: Sequence[Group], metric: str) -> list[EqualBudget]:
    """Values at the end of the finished run that came least far, on every axis."""
    # What never finished would hold all others back.
    groups = [group for group in groups if any(run.finished for run in group.runs)] or groups
    runs = [run for group in groups for run in witnesses(group, metric)]
    found = []
    for axis in AXES:
        limit = common_limit(runs, metric, axis)
        if limit is None:
            continue

        def value(run: Run, axis: str = axis, limit: float = limit) -> float | None:
            return value_by(run, metric, axis, limit)

        values = {group.label: spread_of(witnesses(group, metric), value) for group in groups}
        found.append(EqualBudget(axis, limit, values))
    return found


def _group_notes(groups: Sequence[Group], baseline: Group, metric: str, half: float | None) -> list[str]:
    notes = []
    ends = spread_of(witnesses(baseline, metric), lambda run: run.metrics[metric][-1].value)
    band = seeds_band(ends) if half is None else fixed_band(ends, half)
    if band is None:
        notes.append(
            f"the baseline {baseline.label} has one seed that counts, so there is no band; run it with two or more, "
            "for instance seed=0,1,2"
        )
    else:
        notes.append(f"the band is {band.how}")
    for group in groups:
        counts = {seed: sum(run.seed == seed for run in group.runs) for seed in group.seeds}
        for seed, count in counts.items():
            if count > 1:
                notes.append(f"{group.label}: seed {seed} is there {count} times; its runs count as one, by their mean")
    return notes


def _run_notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    notes += [f"{run.name}: no data hash was recorded" for run in runs if run.data_hash is None]
    machines = {str((run.manifest.get("hardware") or {}).get("cpu")) for run in runs}
    if len(machines) > 1:
        notes.append(f"the runs come from {len(machines)} kinds of machine ({', '.join(sorted(machines))})")
    return notes
