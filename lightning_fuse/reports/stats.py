"""What groups of runs say: spreads over seeds, values at equal places, and a finding per candidate.

Repeats of a seed are averaged, so that they do not pass for more seeds. Values at a place in a run are those last
measured there; nothing is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pandas as pd

from lightning_fuse.reports.groups import Group, same_data, setting_differences
from lightning_fuse.reports.run import Run, Target
from lightning_fuse.reports.significance import (
    Finding,
    Spread,
    band_of,
    earlier_words,
    headline_of,
    place_in_band,
    speed_sentence,
    speed_words,
    state_words,
)

AXES = {"update": "updates", "tokens": "tokens", "seconds": "train seconds"}
Value = Callable[[Run], "float | None"]


@dataclass(frozen=True)
class EqualBudget:
    """Values when all runs have come equally far: ``limit`` on an axis of ``AXES``, and label to its seeds' values."""

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
        findings: One per candidate, in the order of the groups.
        budgets: The metric at equal updates, tokens and train seconds.
        notes: What holds for the whole comparison, or is odd about single runs.
        tokens: What the third axis counts: ``tokens`` or ``samples``.
    """

    groups: list[Group]
    metric: str
    mode: str
    findings: list[Finding]
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


def by_seed(runs: Sequence[Run], value: Value) -> pd.Series:
    """One value per seed, by seed; None is left out, repeats of a seed are averaged."""
    pairs = [(math.inf if run.seed is None else float(run.seed), value(run)) for run in runs]
    known = pd.DataFrame([pair for pair in pairs if pair[1] is not None], columns=["seed", "value"], dtype=float)
    return known.groupby("seed", sort=False)["value"].mean()


def spread_of(runs: Sequence[Run], value: Value) -> Spread:
    """The finite values of ``by_seed``."""
    return Spread(tuple(float(number) for number in by_seed(runs, value) if math.isfinite(number)))


def scored_runs(group: Group, metric: str) -> list[Run]:
    """The runs whose end counts: the finished ones, or, where none is, all that measured the metric."""
    measured = [run for run in group.runs if metric in run.finals]
    return [run for run in measured if run.finished] or measured


def better(metric: str, run: Run) -> str:
    """Which way a metric gets better, "min" or "max": from the recipe where it says so, else from the name."""
    recipe = run.config.get("recipe")
    if isinstance(recipe, dict) and recipe.get("monitor") == metric and recipe.get("mode") in ("min", "max"):
        return str(recipe["mode"])
    return "max" if any(word in metric for word in ("accuracy", "f1", "auc", "bleu")) else "min"


def tokens_name(run: Run) -> str:
    """What the tokens of a run are: bytes or words with a context, else samples."""
    data = run.config.get("data")
    return "tokens" if isinstance(data, dict) and data.get("context") else "samples"


def common_step(runs: Sequence[Run], metric: str) -> float | None:
    """The last step at which every run measured the metric, or None where there is none.

    Validations fall on the same optimizer steps in every run, skips or not, so steps are what finals are aligned by.
    """
    if not all(metric in run.points for run in runs):
        return None
    shared = reduce(np.intersect1d, [run.points[metric]["step"].to_numpy() for run in runs])
    return float(shared.max()) if len(shared) else None


def value_at(run: Run, metric: str, step: float | None) -> float | None:
    """The metric as measured at a step; without a step, or without curves, as last measured."""
    points = run.points.get(metric)
    if step is None or points is None:
        return run.finals.get(metric)
    hits = points.loc[points["step"] == step, "value"]
    return float(hits.iloc[-1]) if len(hits) else None


def curve(group: Group, metric: str) -> pd.DataFrame:
    """A group's metric along its steps.

    Args:
        group: A group.
        metric: The metric.

    Returns:
        Columns ``step``, ``update``, ``tokens``, ``seconds`` (means), ``value`` (mean), ``low``, ``high``, ``seeds``
        (in words), a row per step that all runs of the group that got so far have measured.
    """
    runs = [run for run in scored_runs(group, metric) if metric in run.points]
    if not runs:
        return pd.DataFrame()
    parts = [run.points[metric].drop_duplicates("step").assign(seed=_seed_name(run)) for run in runs]
    points = pd.concat(parts, ignore_index=True)
    points = points[np.isfinite(points["value"])]
    points["text"] = points["seed"] + ": " + points["value"].map(lambda value: f"{value:.5g}")
    grouped = points.groupby("step")
    table = grouped[["update", "tokens", "seconds", "value"]].mean()
    table["low"], table["high"] = grouped["value"].min(), grouped["value"].max()
    table["seeds"] = grouped["text"].agg(", ".join)
    ends = np.array([run.points[metric]["step"].iloc[-1] for run in runs])
    reaching = (ends[None, :] >= table.index.to_numpy()[:, None]).sum(axis=1)
    return table[grouped.size().to_numpy() >= reaching].reset_index()


def equal_budgets(groups: Sequence[Group], metric: str) -> list[EqualBudget]:
    """Values at the end of the finished run that came least far, on every axis."""
    # What never finished would hold all others back.
    groups = [group for group in groups if any(run.finished for run in group.runs)] or groups
    runs = [run for group in groups for run in scored_runs(group, metric) if metric in run.points]
    found = []
    for axis in AXES:
        ends = [run.points[metric][axis].iloc[-1] for run in runs]
        if not ends or not all(end is not None and math.isfinite(end) for end in ends):
            continue
        limit = float(min(ends))

        def value(run: Run, axis: str = axis, limit: float = limit) -> float | None:
            points = run.points.get(metric)
            seen = None if points is None else points.loc[points[axis] <= limit, "value"]
            return None if seen is None or seen.empty else float(seen.iloc[-1])

        values = {group.label: spread_of(scored_runs(group, metric), value) for group in groups}
        found.append(EqualBudget(axis, limit, values))
    return found


def judge(baseline: Group, candidate: Group, metric: str, mode: str, half: float | None = None) -> Finding:
    """Compares one candidate with the baseline.

    Args:
        baseline: The one.
        candidate: The other.
        metric: The quality.
        mode: "min" if less of it is better, "max" if more.
        half: Half the band's width in the metric's unit; None takes the band of the baseline's seeds.

    Returns:
        The finding.
    """
    finding = Finding(candidate.label)
    quality = _judge_quality(finding, baseline, candidate, metric, mode, half)
    state = state_words(*_both(candidate, baseline, lambda run: run.state_bytes))
    step = training = target = ""
    # Steps of failed runs are no measure of speed, and a target on other data is another target.
    if finding.outcome != "failed":
        alike = len({run.hardware for group in (baseline, candidate) for run in group.runs}) == 1
        optimizer_ms = _both(candidate, baseline, lambda run: run.optimizer_ms)
        step_ms = _both(candidate, baseline, lambda run: run.training_step_ms)
        speeds = ["times not compared (another machine)"]
        if alike:
            step, training = speed_words(*optimizer_ms), speed_words(*step_ms)
            speeds = [speed_sentence("optimizer step", *optimizer_ms), speed_sentence("training step", *step_ms)]
            if len(baseline.runs) == len(candidate.runs) == 1 and (step or training):
                finding.cautions.append("one run each, so how much times vary is not known")
        if finding.outcome != "incomparable":
            target = _target_sentence(baseline, candidate, alike)
        finding.sentences += [said for said in (state, *speeds, target) if said]
    elif state:
        finding.sentences.append(state)
    finding.headline = headline_of(state, quality, step, training)
    differences = setting_differences(baseline, candidate)
    if differences:
        more = f" and {len(differences) - 8} more" if len(differences) > 8 else ""
        finding.cautions.append(f"settings differ: {', '.join(differences[:8])}{more}")
    return finding


def _judge_quality(
    finding: Finding, baseline: Group, candidate: Group, metric: str, mode: str, half: float | None
) -> str:
    """Fills the finding's quality, and says it in few words."""
    if not same_data(baseline.runs[0], candidate.runs[0]):
        finding.outcome = "incomparable"
        finding.sentences.append(f"trained on other data than the baseline, so {metric} is not compared")
        return "other data"
    ours, theirs = scored_runs(candidate, metric), scored_runs(baseline, metric)
    lost = [run for run in candidate.runs if run.status == "failed"]
    if lost and not any(run.finished for run in candidate.runs):
        finding.outcome = "failed"
        finding.sentences.append(f"all of its runs failed ({_reason(lost[0])})")
        return "all runs failed"
    for name, group in (("the baseline", baseline), ("it", candidate)):
        if not any(run.finished for run in group.runs):
            finding.cautions.append(f"no run of {name} has finished")
    if not ours or not theirs:
        finding.sentences.append(f"nothing to compare: no run of {'the baseline' if ours else 'it'} measured {metric}")
        return "nothing to compare"
    finding.step = common_step([*ours, *theirs], metric)
    if finding.step is None and all(metric in run.points for run in (*ours, *theirs)):
        finding.sentences.append(f"nothing to compare: {metric} was never measured at the same step as the baseline's")
        return "nothing to compare"

    def final(run: Run) -> float | None:
        return value_at(run, metric, finding.step)

    finding.candidate, finding.baseline = spread_of(ours, final), spread_of(theirs, final)
    gaps = (by_seed(ours, final) - by_seed(theirs, final)).dropna()
    finding.pairs = Spread(tuple(gap for seed, gap in gaps.items() if math.isfinite(gap) and seed != math.inf))
    finding.band = band_of(finding.baseline, half)
    gone = [run for run in candidate.runs if not math.isfinite(run.finals.get(metric, 0.0))]
    if gone:
        finding.outcome = "diverged"
        count = _of(len(gone), len(candidate.runs))
        finding.sentences.append(f"{count} diverged ({metric} is not a number at the end)")
        return f"{count} diverged"
    if not finding.baseline.count:
        finding.sentences.append(f"nothing to compare: the baseline itself diverged ({metric} is not a number)")
        return "nothing to compare"
    quality = place_in_band(finding, metric, mode)
    if lost:
        finding.outcome = "unsettled"
        finding.sentences.append(f"{_of(len(lost), len(candidate.runs))} failed ({_reason(lost[0])})")
        quality += f", {_of(len(lost), len(candidate.runs))} failed"
    return quality


def _target_sentence(baseline: Group, candidate: Group, timed_alike: bool) -> str:
    """Time to the target, in seconds and in updates, each with its own claim."""
    known = [run.target for group in (candidate, baseline) for run in group.runs if run.target is not None]
    if not known:
        return ""
    labels = {target.label for target in known}
    if len(labels) > 1:
        return f"targets differ ({', '.join(sorted(labels))}) and are not compared"
    label = known[0].label
    ours, theirs = ([r for r in g.runs if r.target and r.target.reached is not None] for g in (candidate, baseline))
    if not ours or not theirs:
        return f"target {label} still open for {'the baseline' if ours else 'it'}"
    hits, base_hits = ([r for r in side if r.target and r.target.reached] for side in (ours, theirs))
    if len(hits) < len(ours) or len(base_hits) < len(theirs):
        if not hits and not base_hits:
            return f"target {label} not reached by either"
        return f"target {label} reached by {len(hits)} of {len(ours)} runs against {len(base_hits)} of {len(theirs)}"
    gap = baseline.runs[0].validation_gap or 0.0
    updates, updates_said = earlier_words(*_both(candidate, baseline, of_target("updates")), "in updates", gap)
    if not timed_alike:
        return f"target {label} {updates_said}"
    seconds, said = earlier_words(*_both(candidate, baseline, of_target("train_seconds")), "in train seconds")
    aside = " (no faster per update)" if seconds == "sooner" and updates != "sooner" else ""
    return f"target {label} {said} and {updates_said}{aside}"


def of_target(name: str) -> Value:
    """A figure of a run's main target, by the name of ``Target``'s attribute."""

    def value(run: Run) -> float | None:
        target: Target | None = run.target
        return getattr(target, name) if target is not None and target.reached else None

    return value


def _both(candidate: Group, baseline: Group, value: Value) -> tuple[Spread, Spread]:
    return spread_of(candidate.runs, value), spread_of(baseline.runs, value)


def _seed_name(run: Run) -> str:
    return run.name if run.seed is None else f"seed {run.seed}"


def _reason(run: Run) -> str:
    """The first sentence of why it failed; the remarks have all of it."""
    return (run.reason or "no reason recorded").strip().split(". ")[0]


def _of(some: int, all_of_them: int) -> str:
    return "its run" if all_of_them == 1 else f"{some} of {all_of_them} runs"
