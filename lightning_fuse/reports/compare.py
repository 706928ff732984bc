"""Makes a comparison: reads runs, groups them, picks the baseline, judges each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_fuse.reports.comparison_csv import read_csv
from lightning_fuse.reports.groups import Group, NotComparable, check_data, choose_baseline, group_runs, same_data
from lightning_fuse.reports.load_runs import load_runs
from lightning_fuse.reports.run import Run
from lightning_fuse.reports.significance import band_of
from lightning_fuse.reports.stats import (
    Comparison,
    better,
    equal_budgets,
    judge,
    scored_runs,
    spread_of,
    tokens_name,
)

USUAL_METRIC = "val/loss"


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
        paths: Run folders, multirun folders, and ``comparison.csv`` files of earlier comparisons.
        baseline: ``KEY=WORD`` each; see ``choose_baseline``.
        metric: The quality; None takes the recipe's own monitor where it was measured, else ``val/loss``.
        half: Half the band's width, in the metric's unit; None takes the band of the baseline's seeds.
        allow_different_data: Go on where recipes or data differ; their losses are then left uncompared.

    Returns:
        The comparison.

    Raises:
        FileNotFoundError: A path is no run and holds none.
        NotComparable: No run can be read, the runs have different data or none of the asked metric, or ``baseline``
            does not name one group.
    """
    tables = [path for path in map(Path, paths) if path.suffix == ".csv" and path.is_file()]
    runs, left_out = load_runs([path for path in paths if Path(path) not in tables])
    runs += [run for path in tables for run in read_csv(path)]
    if not runs:
        raise NotComparable(f"no run can be read: {'; '.join(left_out[:3])}; name other run folders")
    faults = check_data(runs)
    if faults and not allow_different_data:
        raise NotComparable(
            f"{'; '.join(faults)}: compare the runs of one kind at a time, or add --allow-different-data to see them "
            "side by side without verdicts on their losses"
        )
    groups = group_runs(runs)
    first = choose_baseline(groups, baseline)
    groups = [first, *(group for group in groups if group is not first)]
    name = metrics_of(runs, metric)[0]
    mode = better(name, first.runs[0])
    findings = [judge(first, group, name, mode, half) for group in groups[1:]]
    alike = [group for group in groups if same_data(first.runs[0], group.runs[0])]
    notes = [*faults, *_group_notes(groups, first, name, half), *left_out, *_run_notes(runs)]
    return Comparison(groups, name, mode, findings, equal_budgets(alike, name), notes, tokens_name(first.runs[0]))


def metrics_of(runs: Sequence[Run], wanted: str | None = None) -> list[str]:
    """All metrics that some run measured, the quality first: the wanted one, the recipe's monitor, or ``val/loss``.

    Args:
        runs: The runs.
        wanted: The quality; None picks one.

    Returns:
        At least one name.

    Raises:
        NotComparable: No run measured the wanted one.
    """
    measured = list(dict.fromkeys(name for run in runs for name in run.finals))
    if wanted is not None and wanted not in measured:
        known = ", ".join(sorted(measured)) or "none at all"
        raise NotComparable(f"no run measured the metric {wanted!r}; measured: {known}")
    recipe = runs[0].config.get("recipe")
    monitor = recipe.get("monitor") if isinstance(recipe, dict) else None

    def rank(name: str) -> tuple[bool, bool, bool, bool, str]:
        return name != wanted, name != monitor, name != USUAL_METRIC, not name.startswith("val"), name

    return sorted(measured, key=rank) or [USUAL_METRIC]


def leaves_band(comparison: Comparison) -> list[str]:
    """Which candidates are not within the band, each with the reason; for ``--assert-within``.

    Inside means: the mean of the finals lies in the band, on either side of the baseline, and no run of the candidate
    failed or diverged. What cannot be judged is not within.

    Args:
        comparison: A comparison.

    Returns:
        One line per candidate that is not; one line if there is no candidate at all.
    """
    if not comparison.findings:
        return [f"there is nothing to compare with {comparison.baseline.label}: all runs belong to it"]
    return [
        f"{finding.label}: {finding.sentences[0]}"
        for finding in comparison.findings
        if finding.outcome != "same" or any(caution.startswith("no run of") for caution in finding.cautions)
    ]


def _group_notes(groups: Sequence[Group], baseline: Group, metric: str, half: float | None) -> list[str]:
    ends = spread_of(scored_runs(baseline, metric), lambda run: run.finals.get(metric))
    band = band_of(ends, half)
    alone = f"the baseline {baseline.label} has one seed that counts, so there is no band; run it with two or more, "
    notes = [f"{alone}for instance seed=0,1,2" if band is None else f"the band is {band.how}"]
    for group in groups:
        for seed in group.seeds:
            count = sum(run.seed == seed for run in group.runs)
            if count > 1:
                notes.append(f"{group.label}: seed {seed} is there {count} times; its runs count as one, by their mean")
    return notes


def _run_notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    machines = {run.provenance["CPU"] for run in runs if "CPU" in run.provenance}
    if len(machines) > 1:
        notes.append(f"the runs come from {len(machines)} kinds of machine ({', '.join(sorted(machines))})")
    return notes
