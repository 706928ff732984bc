"""What the seeds bear out, in words: one place for page, Markdown, terminal and README.

Where the seeds of baseline and candidate overlap, no difference is claimed. The quality is compared with the **band**:
the baseline's mean plus and minus two standard deviations (n - 1) of its seeds' finals. That is a rule of thumb, not a
test: with three seeds on both sides, two equal configurations end outside it 13 times in a hundred. Faster steps are
never called faster convergence: time to the target stands in seconds and in updates side by side.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["same", "better", "worse", "unsettled", "unknown", "diverged", "failed", "incomparable"]
# What a badge says of an outcome, and whether that is good.
BADGES: dict[str, tuple[str, str]] = {
    "same": ("same quality", "good"),
    "better": ("better", "good"),
    "worse": ("worse", "bad"),
    "diverged": ("diverged", "bad"),
    "failed": ("failed", "bad"),
    "unsettled": ("not settled", "open"),
    "unknown": ("not known", "open"),
    "incomparable": ("other data", "open"),
}
BAND_WIDTH = 2.0  # standard deviations on either side
SLIGHT = 0.02  # ratios of times closer to 1 than this are called equal
NO_DIFFERENCE = "no clear difference"


@dataclass(frozen=True)
class Spread:
    """Finite values of one quantity, one per seed."""

    values: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Their mean; NaN without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def median(self) -> float:
        """Their median; NaN without values."""
        return statistics.median(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        """The smallest; NaN without values."""
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        """The largest; NaN without values."""
        return max(self.values, default=math.nan)

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges of both have a value in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Band:
    """What counts as equal to the baseline: ``centre`` ± ``half``, and ``how`` that was computed, in words."""

    centre: float
    half: float
    how: str

    def holds(self, value: float) -> bool:
        """Whether a value lies inside, borders included; NaN never does."""
        return abs(value - self.centre) <= self.half


@dataclass
class Finding:
    """What can be said of a candidate.

    Attributes:
        label: The candidate's.
        outcome: Of the quality.
        headline: The answer in one line.
        sentences: The same with figures, the quality first.
        cautions: What weakens the comparison.
        step: The optimizer step at which finals were compared; None for the ends of the runs.
        band: What counted as equal, or None.
        baseline: Finals of the baseline's seeds.
        candidate: Those of the candidate's.
        pairs: Candidate minus baseline, of the seeds that both have.
    """

    label: str
    outcome: Outcome = "unknown"
    headline: str = ""
    sentences: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    step: float | None = None
    band: Band | None = None
    baseline: Spread = field(default_factory=Spread)
    candidate: Spread = field(default_factory=Spread)
    pairs: Spread = field(default_factory=Spread)

    @property
    def text(self) -> str:
        """All sentences in one line."""
        said = f"{self.label}: {', '.join(self.sentences)}."
        return said if not self.cautions else f"{said} But {'; '.join(self.cautions)}."


def band_of(finals: Spread, half: float | None = None) -> Band | None:
    """The band around the baseline's mean.

    Args:
        finals: Of the baseline's seeds.
        half: Half its width; None takes two standard deviations.

    Returns:
        The band; None where it would take two seeds and there are fewer.
    """
    if half is not None:
        return Band(finals.mean, half, f"the baseline's mean ± {half:g}, as given")
    if finals.count < 2:
        return None
    how = f"mean ± {BAND_WIDTH:g} standard deviations of the baseline's {finals.count} seeds"
    return Band(finals.mean, BAND_WIDTH * statistics.stdev(finals.values), how)


def place_in_band(finding: Finding, metric: str, mode: str) -> str:
    """Sets the outcome by where the candidate's mean lies, and says it with figures.

    Args:
        finding: With ``baseline``, ``candidate``, ``pairs`` and ``band``.
        metric: The quality.
        mode: "min" if less of it is better, "max" if more.

    Returns:
        The quality in few words, for the headline.
    """
    ours, theirs, band = finding.candidate, finding.baseline, finding.band
    short = metric.rsplit("/", 1)[-1].replace("_", " ")
    figures = f"{show(ours.mean)} against {show(theirs.mean)}"
    if band is None:
        finding.outcome = "unknown"
        said = f"{metric} {figures}, and one baseline seed has no band: whether that is a difference is not known"
        finding.sentences.append(said)
        return f"{short} not comparable (one baseline seed)"
    within = f"{figures} ± {band.half:.2g}"
    few = "one seed; " if ours.count == 1 else ""
    if band.holds(ours.mean):
        finding.outcome = "same"
        pairs = finding.pairs
        paired = f"; seed by seed {_signed(pairs.low)} to {_signed(pairs.high)}" if pairs.count > 1 else ""
        finding.sentences.append(f"same {metric} within the band ({few}{within}{paired})")
        return f"same {short}{' (one seed)' if few else ''}"
    worse = ours.mean > theirs.mean if mode == "min" else ours.mean < theirs.mean
    which: Outcome = "worse" if worse else "better"
    if theirs.count > 1 and ours.count > 1 and ours.overlaps(theirs):
        finding.outcome = "unsettled"
        said = f"{which} {metric} on average ({within}), but its seeds overlap the baseline's: not settled"
        finding.sentences.append(said)
        return f"{NO_DIFFERENCE} in {short}"
    finding.outcome = which
    more = " (one seed; more would tell how reliably)" if few else ""
    finding.sentences.append(f"{which} {metric}, outside the band ({within}){more}")
    return f"{which} {short}{' (one seed)' if few else ''}"


def state_words(ours: Spread, theirs: Spread) -> str:
    """Bytes of state beside the baseline's, or "" where one is not known."""
    if not ours.count or not theirs.count or not theirs.median:
        return ""
    change = ours.median / theirs.median - 1
    if abs(change) < 0.005:
        return "equal state"
    return f"{abs(change) * 100:.0f} % {'less' if change < 0 else 'more'} state"


def speed_words(ours: Spread, theirs: Spread) -> str:
    """How long a step takes beside the baseline's, in few words, or "" where one is not known.

    Args:
        ours: Milliseconds of the candidate's seeds.
        theirs: Those of the baseline's.

    Returns:
        For instance ``3.0 × as fast``; no difference is claimed where the seeds overlap.
    """
    if not ours.count or not theirs.count or not ours.median or not theirs.median:
        return ""
    ratio = theirs.median / ours.median
    if ours.overlaps(theirs):
        return NO_DIFFERENCE
    if abs(ratio - 1) <= SLIGHT:
        return "equally fast"
    return f"{_times(ratio)} × as fast" if ratio > 1 else f"takes {_times(1 / ratio)} × as long"


def speed_sentence(what: str, ours: Spread, theirs: Spread) -> str:
    """``speed_words`` with the figures they rest on."""
    said = speed_words(ours, theirs)
    return f"{what} {said} ({ours.median:.3g} ms against {theirs.median:.3g})" if said else ""


def earlier_words(ours: Spread, theirs: Spread, unit: str, gap: float = 0.0) -> tuple[str, str]:
    """How much sooner a target was reached.

    Args:
        ours: When the candidate's seeds reached it.
        theirs: When the baseline's did.
        unit: Of both, in words: ``in updates``.
        gap: Less than this apart is equal.

    Returns:
        One of equal, unclear, sooner, later; and the words for it.
    """
    difference = ours.median - theirs.median
    change = difference / theirs.median if theirs.median else math.copysign(math.inf, difference) if difference else 0.0
    if abs(change) < 0.005 or abs(difference) < gap:
        return "equal", f"equal {unit}"
    if ours.overlaps(theirs):
        return "unclear", f"with {NO_DIFFERENCE} {unit} ({_range(ours)} against {_range(theirs)})"
    word = "sooner" if change < 0 else "later"
    ratio = max(ours.median, theirs.median) / max(1e-9, min(ours.median, theirs.median))
    return word, f"{abs(change) * 100:.0f} % {word} {unit}" if ratio < 2 else f"{ratio:.1f} × {word} {unit}"


def headline_of(state: str, quality: str, step: str, training: str) -> str:
    """The answer in one line: ``73 % less state, same loss, step 3.0 × as fast, training no clear difference``."""
    parts = [state, quality, f"step {step}" if step else "", f"training {training}" if training else ""]
    return ", ".join(part for part in parts if part)


def show(value: float) -> str:
    """A metric's value: four decimals, small ones four digits, the last zeros too, so that columns read alike."""
    if not math.isfinite(value):
        return "not a number"
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:#.4g}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1.15 else f"{ratio:.1f}"


def _signed(value: float) -> str:
    return (f"{value:+.2g}" if value else "0").replace("-", "\N{MINUS SIGN}")


def _range(spread: Spread) -> str:
    return f"{spread.low:.3g}" if spread.low == spread.high else f"{spread.low:.3g}–{spread.high:.3g}"
