"""The command: what it writes, what it refuses, and its exit status for CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compare_runs import main
from tests.reports.run_folders import write_seeds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_seeds(tmp_path / "runs", "adamw_torch", "fp32", (1.69, 1.70, 1.71))
    write_seeds(tmp_path / "runs", "adamw_fused", "int8", (1.715, 1.716, 1.715))
    return tmp_path / "runs"


def test_it_writes_and_says_where(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), "--no-png"]) == 0
    said = capsys.readouterr().out
    assert "same" in said
    assert "74 % less state" in said.replace("\n", " ")
    folder = root / "comparison"
    assert f"written: page.html, comparison.md, comparison.csv in {folder}" in said
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.csv", "comparison.md", "page.html"]


@pytest.mark.parametrize(
    ("band", "status"), [("seeds", 0), ("0.05", 0), ("0.016", 0), ("0.015", 1), ("0.001", 1)]
)  # the candidate's mean is 0.01533 above the baseline's
def test_assert_within(root: Path, capsys: pytest.CaptureFixture[str], band: str, status: int) -> None:
    assert main([str(root), "--no-png", "--assert-within", band]) == status
    said = capsys.readouterr().err
    assert ("outside the band: ours int8: worse val/loss" in said) is bool(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--asert-within", "1"], "unrecognized arguments: --asert-within"),
        (["--assert", "1"], "unrecognized arguments: --assert"),
        (["--assert-within", "-1"], "is no band"),
        (["--assert-within", "nan"], "is no band"),
        (["--assert-within", "wide"], "is no band"),
    ],
)
def test_unknown_options_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(root), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "optimizer=sgd"], "fits no group; there are 'ours int8' (optimizer=adamw_fused state=int8)"),
        (["--metric", "val/los"], "no run measured the metric 'val/los'; measured: train/loss, val/loss"),
    ],
)
def test_refusals_write_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(root), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (root / "comparison").exists()


def test_other_data_is_refused_unless_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_seeds(root, "lion_fused", "fp32", (1.7,), data_hash="sha256:two")
    assert main([str(root), "--no-png"]) == 2
    assert "--allow-different-data" in capsys.readouterr().err
    assert main([str(root), "--no-png", "--allow-different-data"]) == 0
    assert "trained on other data" in capsys.readouterr().out.replace("\n", " ")


def test_a_second_comparison_replaces_the_first_and_does_not_read_it(root: Path) -> None:
    assert main([str(root), "--no-png"]) == 0
    first = (root / "comparison" / "page.html").read_bytes()
    assert main([str(root), "--no-png"]) == 0
    assert (root / "comparison" / "page.html").read_bytes() == first


def test_a_link_in_a_run_folder_is_no_place_to_write(root: Path) -> None:
    aim = root.parent / "aim"
    aim.mkdir()
    (root / "comparison").symlink_to(aim)
    assert main([str(root), "--no-png"]) == 0
    assert list(aim.iterdir()) == []
    assert (root / "comparison-2" / "page.html").exists()


@pytest.mark.slow
def test_a_multirun_is_compared(tmp_path: Path) -> None:
    """The newcomer's path: a multirun with a pair that is refused, then its comparison."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    multirun = tmp_path / "multi"
    trained = python(
        *("train.py", "-m", "recipe=digits", "optimizer=adamw_torch,adamw_fused", "state=fp32,int8", "seed=0,1"),
        *("trainer.max_steps=20", "recipe.val_every=10", f"hydra.sweep.dir={multirun}"),
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert trained.stderr.count("refused: optimizer=adamw_torch state=int8") == 2
    compared = python("scripts/compare_runs.py", str(multirun), "--assert-within", "0.5")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    rows = (multirun / "comparison" / "comparison.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 6
    html = (multirun / "comparison" / "page.html").read_text(encoding="utf-8")
    assert "ours int8" in html
