"""The figures' data and declarations, and palettes that people with any kind of colour vision tell apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lightning_fuse.reports.charts import MOST_POINTS, Figure, figures_of, write_pngs
from lightning_fuse.reports.compare import compare
from lightning_fuse.reports.stats import Comparison, curve
from lightning_fuse.reports.theme import DASHES, INK, PALETTES, PAPER, SHAPES
from tests.reports.run_folders import write_run, write_seeds

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
LEAST_DISTANCE = 25.0  # in CIELAB; about ten just noticeable differences
LEAST_CONTRAST = 3.0  # WCAG, for graphics


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(light, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, vision: str) -> float:
    matrix = np.array(VISION[vision])
    return float(np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other))))


def contrast(one: str, other: str) -> float:
    a, b = sorted((float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("mode", PALETTES)
def test_colours_keep_apart(mode: str, vision: str) -> None:
    pairs = {(a, b): distance(a, b, vision) for a, b in itertools.combinations(PALETTES[mode], 2)}
    assert min(pairs.values()) >= LEAST_DISTANCE, min(pairs, key=lambda pair: pairs[pair])


@pytest.mark.parametrize("mode", PALETTES)
def test_colours_stand_out_from_the_paper(mode: str) -> None:
    assert min(contrast(colour, PAPER[mode]) for colour in PALETTES[mode]) >= LEAST_CONTRAST
    assert contrast(INK[mode], PAPER[mode]) >= 7


def test_the_simulation_takes_red_and_green_for_one() -> None:
    """A control: colours that are known to be confused come out as near, and far for usual vision."""
    assert distance("#a04040", "#606030", "usual") > LEAST_DISTANCE
    assert distance("#a04040", "#606030", "deuteranopia") < LEAST_DISTANCE
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


def test_a_series_is_told_by_more_than_colour() -> None:
    assert len({tuple(dash) for dash in DASHES}) == len(set(SHAPES)) == len(PALETTES["light"]) == len(PALETTES["dark"])


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    write_seeds(tmp_path, "adamw_torch", "fp32", (1.69, 1.70, 1.71))
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.70, 1.70), optimizer_ms=1.5)
    write_run(tmp_path / "scaled", "adamw_fused", "bf16", losses=(4.0, 3.0, 1.9, 1.9), skips=(2, 9), scale=2.0**16)
    return compare([tmp_path])


def figures(comparison: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(comparison, ["val/loss", "train/loss"])}


def test_every_figure_is_there_the_answer_first(comparison: Comparison) -> None:
    assert list(figures(comparison)) == [
        *("final-by-state", "curves", "difference-by-step", "loss-scale", "state-bytes", "optimizer-step"),
        *("training-step", "target-seconds", "target-updates"),
    ]


def test_the_answer_is_final_quality_against_bytes_of_state(comparison: Comparison) -> None:
    rows = figures(comparison)["final-by-state"].spec["datasets"]
    assert [(row["group"], row["bytes"], row["value"]) for row in rows["means"]] == [
        ("torch fused fp32", 8000, 1.7),
        ("ours int8", 2062, 1.7),
        ("ours bf16", 4000, 1.9),
    ]
    assert len(rows["runs"]) == 7
    labels = [line for name in rows if "words" in name for row in rows[name] for line in row["label"]]
    assert sorted(labels) == ["ours bf16", "ours int8", "torch fused fp32"]


def test_configurations_in_one_place_share_a_label(tmp_path: Path) -> None:
    for optimizer in ("adamw_torch", "adamw_loop", "adamw_fused"):
        write_seeds(tmp_path, optimizer, "fp32", (1.69, 1.71))
    spec = figures(compare([tmp_path]))["final-by-state"].spec
    assert [row["label"] for row in spec["datasets"]["words3"]] == [
        ["torch fused fp32", "ours fp32", "torch loop fp32"]
    ]


def test_curves_are_means_with_the_seeds_range(comparison: Comparison) -> None:
    rows = [row for row in figures(comparison)["curves"].spec["datasets"]["means"] if row["metric"] == "val/loss"]
    last = [row for row in rows if row["group"] == "torch fused fp32"][-1]
    assert (last["value"], last["low"], last["high"], last["update"], last["seconds"]) == (1.7, 1.69, 1.71, 40, 4)
    assert last["seeds"] == "seed 0: 1.69, seed 1: 1.7, seed 2: 1.71"


def test_a_curve_ends_where_a_seed_diverged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses=(4.0, 3.0, 2.0))
    write_run(tmp_path / "b", seed=1, losses=(4.0, 3.0, float("nan")))
    assert curve(compare([tmp_path]).baseline, "val/loss")["step"].tolist() == [10, 20]


def test_a_point_of_a_shorter_run_still_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses=(4.0, 3.0))
    write_run(tmp_path / "b", seed=1, losses=(4.0, 2.0, 1.0))
    assert curve(compare([tmp_path]).baseline, "val/loss")["value"].tolist() == [4.0, 2.5, 1.0]


def test_long_curves_are_thinned_and_keep_ends_and_extremes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    steps = pd.DataFrame({"step": range(1, 5001)})
    table = steps.assign(update=steps["step"], epoch=0, train_seconds=steps["step"] / 10, **{"val/loss": 2.0})
    table.loc[1234, "val/loss"] = 0.5
    table.to_csv(folder / "metrics.csv", index=False)
    rows = figures(compare([tmp_path]))["curves"].spec["datasets"]
    for drawn in (rows["means"], rows["seeds"]):
        assert len(drawn) <= MOST_POINTS
        assert (drawn[0]["step"], drawn[-1]["step"]) == (1, 5000)
        assert min(row["value"] for row in drawn) == 0.5


def test_bars_have_the_median_and_the_range(comparison: Comparison) -> None:
    rows = figures(comparison)["optimizer-step"].spec["datasets"]["rows"]
    assert [(row["group"], row["value"], row["text"]) for row in rows] == [
        ("torch fused fp32", 2.0, "2 ms"),
        ("ours int8", 1.5, "1.5 ms"),
        ("ours bf16", 2.0, "2 ms"),
    ]


def test_the_loss_scale_is_drawn_to_the_end_with_its_skips(comparison: Comparison) -> None:
    rows = figures(comparison)["loss-scale"].spec["datasets"]
    assert [(row["step"], row["scale"]) for row in rows["lines"]] == [(1, 65536), (2, 32768), (9, 16384), (40, 16384)]
    assert [row["step"] for row in rows["marks"]] == [2, 9]


def test_pictures_are_drawn_without_a_browser(comparison: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "pictures"
    out.mkdir()
    write_pngs([figure for name, figure in figures(comparison).items() if name in ("curves", "state-bytes")], out)
    assert sorted(path.name for path in out.iterdir()) == [
        *("state-bytes.png", "val-loss-by-seconds.png", "val-loss-by-update.png"),
    ]
    for path in out.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 3000
