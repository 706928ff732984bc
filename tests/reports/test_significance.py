"""Findings against examples worked out by hand, and controls that must not come out as equal."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_fuse.reports.compare import compare, leaves_band
from lightning_fuse.reports.significance import Finding, Spread, band_of
from lightning_fuse.reports.stats import Comparison
from tests.reports.run_folders import write_run, write_seeds

# Mean 1.70, standard deviation (n - 1) 0.01: the band is 1.68 … 1.72.
BASE = (1.69, 1.70, 1.71)


def judged(root: Path, finals: tuple[float, ...], base: tuple[float, ...] = BASE, **given: Any) -> Finding:
    write_seeds(root, "adamw_torch", "fp32", base)
    write_seeds(root, "adamw_fused", "int8", finals, **given)
    return only(compare([root]))


def only(comparison: Comparison) -> Finding:
    assert len(comparison.findings) == 1
    return comparison.findings[0]


def test_the_band_is_two_standard_deviations_of_the_seeds(tmp_path: Path) -> None:
    finding = judged(tmp_path, (1.70, 1.70, 1.70))
    assert finding.band is not None
    assert finding.band.centre == pytest.approx(1.70)
    assert finding.band.half == pytest.approx(0.02)
    assert (finding.band.holds(1.6801), finding.band.holds(1.6799)) == (True, False)
    assert (finding.band.holds(1.7199), finding.band.holds(1.7201)) == (True, False)
    assert not finding.band.holds(math.nan)


def test_how_often_equals_fall_outside_the_band() -> None:
    """The figure that docs/comparison.md and significance.py name, by simulation: 3 seeds on both sides."""
    draw = random.Random(0)
    outside = 0
    for _ in range(20_000):
        ours, theirs = ([draw.gauss(0, 1) for _ in range(3)] for _ in range(2))
        band = band_of(Spread(tuple(theirs)))
        assert band is not None
        outside += not band.holds(Spread(tuple(ours)).mean)
    assert outside / 20_000 == pytest.approx(0.134, abs=0.01)  # 4 standard deviations of a share of 20,000


def test_everything_in_words(tmp_path: Path) -> None:
    # 2062 of 8000 bytes: 74 % less. 2.0 ms against 1.5: 1.3 times. 100 ms a step against 91: the target, measured at
    # step 30 by both, is 9 % sooner in seconds and equal in updates.
    finding = judged(tmp_path, (1.695, 1.705, 1.705), step_ms=91, optimizer_ms=1.5)
    assert finding.outcome == "same"
    assert finding.text == (
        "ours int8: same val/loss within the band (1.7017 against 1.7000 ± 0.02; seed by seed −0.005 to +0.005), "
        "74 % less state, optimizer step 1.3 × as fast (1.5 ms against 2), training step 1.10 × as fast (91 ms "
        "against 100), target val/loss ≤ 2 9 % sooner in train seconds and equal in updates (no faster per update)."
    )


@pytest.mark.parametrize(
    ("finals", "outcome"),
    [
        ((1.719, 1.719, 1.719), "same"),
        ((1.73, 1.74, 1.75), "worse"),
        ((1.65, 1.66, 1.67), "better"),
        # Mean 1.7233, outside, but one of its seeds ends below the baseline's worst.
        ((1.70, 1.73, 1.74), "unsettled"),
        ((1.80,), "worse"),
        ((1.70,), "same"),
        ((1.70, math.nan, 1.70), "diverged"),
    ],
)
def test_outcomes(tmp_path: Path, finals: tuple[float, ...], outcome: str) -> None:
    assert judged(tmp_path, finals).outcome == outcome


def test_more_accuracy_is_better(tmp_path: Path) -> None:
    accuracy = {"recipe": {"name": "digits", "monitor": "val/loss", "mode": "max"}}
    for seed, value in enumerate((0.97, 0.98, 0.975)):
        write_run(tmp_path / f"a{seed}", seed=seed, losses=(0.5, value), settings=accuracy)
        write_run(tmp_path / f"b{seed}", "adamw_fused", seed=seed, losses=(0.5, value - 0.1), settings=accuracy)
    assert only(compare([tmp_path])).outcome == "worse"


def test_one_seed_of_the_baseline_has_no_band(tmp_path: Path) -> None:
    finding = judged(tmp_path, (1.70, 1.71, 1.72), base=(1.70,))
    assert (finding.outcome, finding.band) == ("unknown", None)
    assert "one baseline seed has no band" in finding.text
    assert any("so there is no band" in note for note in compare([tmp_path]).notes)


def test_repeats_of_a_seed_are_no_more_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses=(4.0, 1.70))
    write_run(tmp_path / "b", seed=0, losses=(4.0, 1.70))
    write_run(tmp_path / "c", "adamw_fused", seed=0, losses=(4.0, 1.70))
    comparison = compare([tmp_path])
    assert only(comparison).outcome == "unknown"
    assert any("seed 0 is there 2 times" in note for note in comparison.notes)


def test_a_faster_step_is_no_faster_convergence(tmp_path: Path) -> None:
    finding = judged(tmp_path, (1.70, 1.70, 1.71), step_ms=50)
    target = next(sentence for sentence in finding.sentences if sentence.startswith("target"))
    assert target == "target val/loss ≤ 2 2.0 × sooner in train seconds and equal in updates (no faster per update)"
    assert "converge" not in finding.text


def test_fewer_updates_are_said_as_such(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    for seed in range(3):  # at step 20 instead of 30, with the same speed
        write_run(tmp_path / f"b{seed}", "adamw_fused", seed=seed, losses=(3.0, 1.9, 1.8, 1.70))
    finding = only(compare([tmp_path]))
    assert finding.sentences[-1] == "target val/loss ≤ 2 33 % sooner in train seconds and 33 % sooner in updates"


def test_overlapping_times_are_no_difference(tmp_path: Path) -> None:
    for seed, (slow, fast) in enumerate(((100, 95), (110, 90), (90, 92))):
        write_run(tmp_path / f"a{seed}", seed=seed, step_ms=slow, optimizer_ms=slow / 50)
        write_run(tmp_path / f"b{seed}", "adamw_fused", seed=seed, step_ms=fast, optimizer_ms=fast / 50)
    text = only(compare([tmp_path])).text
    assert "optimizer step no clear difference" in text
    assert "no clear difference in train seconds" in text
    assert "as fast" not in text


def test_times_of_another_machine_are_not_compared(tmp_path: Path) -> None:
    finding = judged(tmp_path, (1.70, 1.70, 1.70), step_ms=10, optimizer_ms=0.1, cpu="another processor")
    assert finding.sentences[2:] == ["times not compared (another machine)", "target val/loss ≤ 2 equal in updates"]


def test_a_setting_that_differs_is_said(tmp_path: Path) -> None:
    finding = judged(tmp_path, (1.70, 1.70, 1.70), settings={"optimizer__lr": 1e-3})
    assert finding.cautions == ["settings differ: optimizer.lr 0.001 against 0.002"]


@pytest.mark.parametrize(
    ("finals", "half", "inside"),
    [
        ((1.70, 1.70, 1.70), None, True),
        ((1.73, 1.74, 1.75), None, False),
        ((1.65, 1.66, 1.67), None, False),  # better is outside, too
        ((1.70, 1.73, 1.74), None, False),  # not settled is not within
        ((1.70, math.nan, 1.70), None, False),
        ((1.709, 1.709, 1.709), 0.01, True),
        ((1.712, 1.713, 1.712), 0.01, False),
    ],
)
def test_leaving_the_band(tmp_path: Path, finals: tuple[float, ...], half: float | None, inside: bool) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    write_seeds(tmp_path, "adamw_fused", "int8", finals)
    assert (leaves_band(compare([tmp_path], half=half)) == []) is inside


def test_nothing_to_compare_is_not_within(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    assert len(leaves_band(compare([tmp_path]))) == 1


def test_updates_are_told_apart_by_whole_validations_only(tmp_path: Path) -> None:
    """Three skipped steps make the target's validation fall on update 27 instead of 30: validations are 10 apart."""
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    write_seeds(tmp_path, "adamw_fused", "int8", BASE, skips=(2, 9, 21))
    assert only(compare([tmp_path])).sentences[-1] == "target val/loss ≤ 2 equal in train seconds and equal in updates"


def test_a_running_run_has_not_missed_its_target(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    write_seeds(tmp_path, "adamw_fused", "int8", BASE)
    write_run(tmp_path / "running", "adamw_fused", "int8", 3, losses=(4.0, 3.0), status="running")
    assert "reached by" not in only(compare([tmp_path])).text
    write_run(tmp_path / "missed", "adamw_fused", "int8", 4, losses=(4.0, 3.0, 2.5, 2.4))
    assert "target val/loss ≤ 2 reached by 3 of 4 runs against 3 of 3" in only(compare([tmp_path])).text


def test_one_run_within_the_others_times_is_no_difference(tmp_path: Path) -> None:
    for seed, step_ms in enumerate((80.0, 100.0, 120.0)):
        write_run(tmp_path / f"a{seed}", seed=seed, step_ms=step_ms)
    write_run(tmp_path / "b", "adamw_fused", seed=0, step_ms=90.0)
    said = only(compare([tmp_path])).text
    assert "training step no clear difference (90 ms against 100)" in said
    assert "with no clear difference in train seconds" in said


def test_times_of_one_run_each_are_said_to_be_that(tmp_path: Path) -> None:
    caution = "one run each, so how much times vary is not known"
    write_run(tmp_path / "a0")
    write_run(tmp_path / "b0", "adamw_fused", step_ms=50.0)
    assert caution in only(compare([tmp_path])).cautions
    write_run(tmp_path / "a1", seed=1)
    assert caution not in only(compare([tmp_path])).cautions


def test_a_target_that_nobody_has_decided_is_open(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", seed=seed)
    write_run(tmp_path / "b", "adamw_fused", losses=(4.0, 3.0), status="running")
    finding = only(compare([tmp_path]))
    assert "target val/loss ≤ 2 still open for it" in finding.sentences
    assert "nan" not in finding.text


def test_failed_runs_have_no_speed_and_other_data_no_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    reason = "NonFiniteGradientError: all bad. Lower the learning rate"
    write_run(tmp_path / "b", "adamw_fused", status="failed", reason=reason, losses=(4.0,), step_ms=1.0)
    write_run(tmp_path / "c", "adamw_fused", "int8", data_hash="sha256:two", step_ms=1.0)
    failed, other = compare([tmp_path], allow_different_data=True).findings
    assert (failed.outcome, other.outcome) == ("failed", "incomparable")
    assert "fast" not in failed.text
    assert "(NonFiniteGradientError: all bad)" in failed.text  # the remarks have the rest
    assert "target" not in other.text
