"""The flagship script: what it would run, in which order, and that finished runs are not run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts import flagship
from scripts.flagship import Job, main, plan
from tests.reports.run_folders import write_run
from tests.test_house import machine_faults

PAIRS = [("adamw_loop", "fp32"), ("adamw_torch", "fp32"), ("adamw_fused", "fp32"), ("adamw_fused", "int8")]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for training: writes the folder of a run, and notes which ran."""
    names: list[str] = []

    def run(job: Job) -> bool:
        names.append(f"{job.optimizer} {job.state} {job.seed}")
        shutil.rmtree(job.folder, ignore_errors=True)
        losses = (4.0, 3.0, 1.9, 1.7 + 0.001 * job.seed)
        write_run(job.folder, job.optimizer, job.state, job.seed, losses=losses)
        return True

    monkeypatch.setattr(flagship, "_run", run)
    monkeypatch.setattr(flagship, "_valid", lambda optimizer, state: (optimizer, state) in PAIRS)
    return names


def test_every_pair_that_can_train_is_there() -> None:
    pairs = {(o, s) for o in flagship.OPTIMIZERS for s in flagship.STATES if flagship._valid(o, s)}
    torch_own = {("adamw_loop", "fp32"), ("adamw_foreach", "fp32"), ("adamw_torch", "fp32")}
    ours = {("adamw_fused", state) for state in ("fp32", "bf16", "int8")}
    assert pairs == torch_own | ours | {("adamw_bnb", "fp32"), ("adamw_bnb", "int8")}


def test_no_pair_always_comes_first(tmp_path: Path) -> None:
    jobs = list(plan("digits", PAIRS, [0, 1, 2], None, tmp_path))
    assert [job.seed for job in jobs] == [0] * 4 + [1] * 4 + [2] * 4
    for seed in range(3):
        assert {(job.optimizer, job.state) for job in jobs if job.seed == seed} == set(PAIRS)
    assert [(job.optimizer, job.state) for job in jobs[::4]] == [PAIRS[0], PAIRS[1], PAIRS[2]]
    assert len({job.folder for job in jobs}) == 12


def test_finished_runs_are_not_run_again(tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagship, "_compare", lambda *_: None)
    words = [
        "--recipes",
        "byte_lm",
        "--updates",
        "40",
        "--runs",
        str(tmp_path / "runs"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--seeds", "0"]) == 0
    assert sorted(ran) == sorted(f"{optimizer} {state} 0" for optimizer, state in PAIRS)
    cut_short = tmp_path / "runs" / "byte_lm_40" / "adamw_loop_fp32_seed0" / "summary.json"
    cut_short.write_text(cut_short.read_text(encoding="utf-8").replace("finished", "interrupted"), encoding="utf-8")
    ran.clear()
    assert main([*words, "--seeds", "0", "1"]) == 0
    assert sorted(ran) == sorted(["adamw_loop fp32 0", *(f"{optimizer} {state} 1" for optimizer, state in PAIRS)])


def test_the_plan_runs_nothing(tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    assert ran == []
    assert capsys.readouterr().out.count("todo  ") == 2 * 3 * len(PAIRS)
    assert list(tmp_path.iterdir()) == []


def test_it_leaves_the_comparison_and_nothing_of_the_machine(tmp_path: Path, ran: list[str]) -> None:
    out = tmp_path / "out"
    assert (
        main(["--recipes", "byte_lm", "--updates", "40", "--runs", str(tmp_path / "runs"), "--output", str(out)]) == 0
    )
    folder = out / "flagship_byte_lm"
    record = json.loads((folder / "flagship.json").read_text(encoding="utf-8"))
    assert set(record["verdicts"]) == {"torch fused fp32", "ours fp32"}
    assert record["runs"] == 12
    assert record["hardware"]["cores"]
    assert record["versions"]["torch"]
    for path in (path for path in folder.rglob("*") if path.suffix != ".png" and path.is_file()):
        text = path.read_text(encoding="utf-8")
        assert list(machine_faults(text)) == []
        assert str(tmp_path) not in text


@pytest.mark.slow
def test_what_it_asks_of_train_is_understood(tmp_path: Path) -> None:
    from lightning_fuse.run import Run
    from tests.composing import composed

    for recipe in flagship.UPDATES:
        job = next(plan(recipe, PAIRS, [1], None, tmp_path))
        words = [word for word in job.words() if not word.startswith("run_folder=")]
        run = Run(composed(*words, run_folder=job.folder), words)
        assert (run.cfg.seed, run.trainer.max_steps) == (1, flagship.UPDATES[recipe])
        assert run.cfg.trainer.val_check_interval == flagship.UPDATES[recipe] // flagship.VALIDATIONS


@pytest.mark.parametrize("words", [["--update", "3"], ["--updates", "0"], ["--recipes", "chess"]])
def test_unknown_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
