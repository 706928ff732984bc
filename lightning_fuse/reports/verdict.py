"""The verdict on a candidate, in words, and only what the runs bear out.

Each sentence says one thing: quality against the band, bytes of state, speed of steps, time to the target. Seeds
decide what is said: where the ranges of baseline and candidate overlap, no difference is claimed. Faster steps are
never called faster convergence: time to the target stands in seconds and in updates side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_fuse.reports.evidence import (
    Band,
    Spread,
    by_seed,
    common_step,
    fixed_band,
    seeds_band,
    spread_of,
    value_at_step,
    witnesses,
)
from lightning_fuse.reports.grouping import Group, same_data, setting_differences
from lightning_fuse.reports.measures import hardware_of, target_of, validation_gap
from lightning_fuse.reports.reading import Run

Outcome = Literal["same", "better", "worse", "unsettled", "unknown", "diverged", "failed", "incomparable"]
SLIGHT = 0.02  # ratios closer to 1 than this are called equal


@dataclass
class Verdict:
    """What can be said of a candidate.

    Attributes:
        label: The candidate's.
        outcome: Of the quality.
        sentences: In words, the quality first.
        cautions: What weakens the comparison.
        step: The optimizer step at which final values were compared, or None.
        band: What counted as equal, or None.
        baseline: Final values of the baseline's seeds.
        candidate: Those of the candidate's.
        pairs: Candidate minus baseline, of the seeds that both have.
    """

    label: str
    outcome: Outcome = "unknown"
    sentences: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    step: int | None = None
    band: Band | None = None
    baseline: Spread = field(default_factory=lambda: Spread(()))
    candidate: Spread = field(default_factory=lambda: Spread(()))
    pairs: Spread = field(default_factory=lambda: Spread(()))

    @property
    def text(self) -> str:
        """All of it in one line."""
        said = f"{self.label}: {', '.join(self.sentences)}."
        return said if not self.cautions else f"{said} But {'; '.join(self.cautions)}."


def judge(baseline: Group, candidate: Group, metric: str, mode: str, half: float | None = None) -> Verdict:
    """Compares one candidate with the baseline.

    Args:
        baseline: The one.
        candidate: The other.
        metric: The quality.
        mode: "min" if less of it is better, "max" if more.
        half: Half the band's width in the metric's unit; None takes the band of the baseline's seeds.

    Returns:
        The verdict.
    """
    verdict = Verdict(candidate.label)
    _judge_quality(verdict, baseline, candidate, metric, mode, half)
    # Steps of failed runs are no measure of speed, and a target on other data is another target.
    speed = [] if verdict.outcome == "failed" else _speed(baseline, candidate)
    target = "" if verdict.outcome == "incomparable" else _target(baseline, candidate)
    verdict.sentences += [sentence for sentence in (_state(baseline, candidate), *speed, target) if sentence]
    if speed and len(baseline.runs) == len(candidate.runs) == 1 and _timed_alike(baseline, candidate):
        verdict.cautions.append("one run each, so how much times vary is not known")
    differences = setting_differences(baseline, candidate)
    if differences:
        verdict.cautions.append(f"settings differ: {', '.join(differences)}")
    return verdict


def _judge_quality(
    verdict: Verdict, baseline: Group, candidate: Group, metric: str, mode: str, half: float | None
) -> None:
    if not same_data(baseline.runs[0], candidate.runs[0]):
        verdict.outcome = "incomparable"
        verdict.sentences.append(f"trained on other data than the baseline, so {metric} is not compared")
        return
    ours, theirs = witnesses(candidate, metric), witnesses(baseline, metric)
    lost = [run for run in candidate.runs if run.status == "failed"]
    if lost and not any(run.finished for run in candidate.runs):
        verdict.outcome = "failed"
        verdict.sentences.append(f"all of its runs failed ({_reason(lost[0])})")
        return
    for name, group in (("the baseline", baseline), ("it", candidate)):
        if group.runs and not any(run.finished for run in group.runs):
            verdict.cautions.append(f"no run of {name} has finished")
    if not ours or not theirs:
        verdict.sentences.append(f"nothing to compare: no run of {'the baseline' if ours else 'it'} measured {metric}")
        return
    verdict.step = common_step([*ours, *theirs], metric)
    if verdict.step is None:
        verdict.sentences.append(f"nothing to compare: {metric} was never measured at the same step as the baseline's")
        return
    at = verdict.step
    verdict.baseline = spread_of(theirs, lambda run: value_at_step(run, metric, at))
    verdict.candidate = spread_of(ours, lambda run: value_at_step(run, metric, at))
    verdict.pairs = _pairs(theirs, ours, lambda run: value_at_step(run, metric, at))
    verdict.band = seeds_band(verdict.baseline) if half is None else fixed_band(verdict.baseline, half)
    gone = [run for run in candidate.runs if _diverged(run, metric)]
    if gone:
        verdict.outcome = "diverged"
        verdict.sentences.append(
            f"{_of(len(gone), len(candidate.runs))} diverged ({metric} is not a number at the end)"
        )
    elif not verdict.baseline.count:
        verdict.sentences.append(f"nothing to compare: the baseline itself diverged ({metric} is not a number)")
    else:
        _place_in_band(verdict, metric, mode)
        if lost:
            verdict.outcome = "unsettled"
            verdict.sentences.append(f"{_of(len(lost), len(candidate.runs))} failed ({_reason(lost[0])})")


def _place_in_band(verdict: Verdict, metric: str, mode: str) -> None:
    """Says where the candidate's mean lies, with the figures, and how far that is to be trusted."""
    ours, theirs, band = verdict.candidate, verdict.baseline, verdict.band
    figures = f"{show(ours.mean)} against {show(theirs.mean)}"
    if band is None:
        verdict.outcome = "unknown"
        verdict.sentences.append(
            f"{metric} {figures}, and one baseline seed has no band: whether that is a difference is not known"
        )
        return
    within = f"{figures} ± {band.half:.2g}"
    few = "one seed; " if ours.count == 1 else ""
    if band.holds(ours.mean):
        verdict.outcome = "same"
        verdict.sentences.append(f"same {metric} within the band ({few}{within})")
        if verdict.pairs.count > 1:
            low, high = verdict.pairs.low, verdict.pairs.high
            verdict.sentences[-1] = verdict.sentences[-1][:-1] + f"; seed by seed {_signed(low)} to {_signed(high)})"
        return
    worse = ours.mean > theirs.mean if mode == "min" else ours.mean < theirs.mean
    which = "worse" if worse else "better"
    if theirs.count > 1 and ours.count > 1 and ours.overlaps(theirs):
        verdict.outcome = "unsettled"
        verdict.sentences.append(
            f"{which} {metric} on average ({within}), but its seeds overlap the baseline's: not settled"
        )
        return
    verdict.outcome = "worse" if worse else "better"
    more = " (one seed; more would tell how reliably)" if few else ""
    verdict.sentences.append(f"{which} {metric}, outside the band ({within}){more}")


def _state(baseline: Group, candidate: Group) -> str:
    ours = spread_of(candidate.runs, lambda run: run.state_bytes)
    theirs = spread_of(baseline.runs, lambda run: run.state_bytes)
    if not ours.count or not theirs.count or not theirs.median:
        return ""
    change = ours.median / theirs.median - 1
    if abs(change) < 0.005:
        return "equal state"
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} state".replace("%", " %")


def _speed(baseline: Group, candidate: Group) -> list[str]:
    if not _timed_alike(baseline, candidate):
        return ["times not compared (another machine)"]
    said = []
    for what, value in (
        ("optimizer steps", lambda run: run.optimizer_ms),
        ("whole training steps", lambda run: run.step_ms),
    ):
        sentence = _ratio(what, spread_of(baseline.runs, value), spread_of(candidate.runs, value))
        if sentence:
            said.append(sentence)
    return said


def _ratio(what: str, theirs: Spread, ours: Spread) -> str:
    if not theirs.count or not ours.count:
        return ""
    ratio = theirs.median / ours.median
    figures = f"{ours.median:.3g} ms against {theirs.median:.3g}"
    if abs(ratio - 1) <= SLIGHT:
        return f"{what} equally fast ({figures})"
    if ours.overlaps(theirs):
        return f"{what} about as fast ({figures}; the seeds overlap)"
    if ratio > 1:
        return f"{what} {_times(ratio)} × faster ({figures})"
    return f"{what} {_times(1 / ratio)} × slower ({figures})"


def _target(baseline: Group, candidate: Group) -> str:
    """Time to the target, in seconds and in updates, each with its own claim."""
    ours, theirs = ([target_of(run) for run in _decided(group)] for group in (candidate, baseline))
    known = [target for target in (*ours, *theirs) if target is not None]
    if not known:
        return ""
    labels = {target.label for target in known}
    if len(labels) > 1:
        return f"targets differ ({', '.join(sorted(labels))}) and are not compared"
    label = known[0].label
    if not ours or not theirs:
        return f"target {label} still open for {'the baseline' if ours else 'it'}"
    hits, base_hits = ([t for t in side if t is not None and t.reached] for side in (ours, theirs))
    if len(hits) < len(ours) or len(base_hits) < len(theirs):
        if not hits and not base_hits:
            return f"target {label} not reached by either"
        return f"target {label} reached by {len(hits)} of {len(ours)} runs against {len(base_hits)} of {len(theirs)}"

    def values(group: Group, name: str) -> Spread:
        return spread_of(_decided(group), lambda run: getattr(target_of(run), name))

    gap = validation_gap(baseline.runs[0])
    updates, updates_said = _earlier(values(baseline, "updates"), values(candidate, "updates"), "in updates", gap)
    if not _timed_alike(baseline, candidate):
        return f"target {label} {updates_said}"
    seconds, seconds_said = _earlier(values(baseline, "seconds"), values(candidate, "seconds"), "in train seconds")
    aside = ""
    if seconds == "sooner" and updates != "sooner":
        aside = " (no faster per update)"
    return f"target {label} {seconds_said} and {updates_said}{aside}"


def _decided(group: Group) -> list[Run]:
    """Runs that reached their target, or will not any more."""
    return [r for r in group.runs if r.status != "running" or getattr(target_of(r), "reached", False)]


def _earlier(theirs: Spread, ours: Spread, unit: str, gap: float = 0.0) -> tuple[str, str]:
    """One of equal, unclear, sooner, later, and the words for it; less than ``gap`` apart is equal."""
    change = ours.median / theirs.median - 1
    if abs(change) < 0.005 or abs(ours.median - theirs.median) < gap:
        return "equal", f"equal {unit}"
    if ours.overlaps(theirs):
        return "unclear", f"with no clear difference {unit} ({_range(ours)} against {_range(theirs)})"
    word = "sooner" if change < 0 else "later"
    ratio = max(ours.median / theirs.median, theirs.median / ours.median)
    return word, f"{abs(change) * 100:.0f} % {word} {unit}" if ratio < 2 else f"{ratio:.1f} × {word} {unit}"


def _timed_alike(baseline: Group, candidate: Group) -> bool:
    return len({hardware_of(run) for group in (baseline, candidate) for run in group.runs}) == 1


def _pairs(theirs: Sequence[Run], ours: Sequence[Run], value: Callable[[Run], float | None]) -> Spread:
    base, own = by_seed(theirs, value), by_seed(ours, value)
    gaps = [own[seed] - base[seed] for seed in own if seed is not None and seed in base]
    return Spread(tuple(gap for gap in gaps if math.isfinite(gap)))


def _diverged(run: Run, metric: str) -> bool:
    points = run.metrics.get(metric, [])
    return bool(points) and not math.isfinite(points[-1].value)


def _reason(run: Run) -> str:
    """The first sentence of why it failed; the remarks have all of it."""
    said = ((run.summary.reason if run.summary else None) or "no reason recorded").strip()
    return said.split(". ")[0]


def _of(some: int, all_of_them: int) -> str:
    return "its run" if all_of_them == 1 else f"{some} of {all_of_them} runs"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1.15 else f"{ratio:.1f}"


def _signed(value: float) -> str:
    return (f"{value:+.2g}" if value else "0").replace("-", "\N{MINUS SIGN}")


def _range(spread: Spread) -> str:
    return f"{spread.low:.3g}" if spread.low == spread.high else f"{spread.low:.3g}–{spread.high:.3g}"


def show(value: float) -> str:
    """A metric's value: four decimals, small ones four digits, the last zeros too, so that columns read alike."""
    if not math.isfinite(value):
        return "not a number"
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:#.4g}"
