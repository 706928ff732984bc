"""A comparison takes runs as they are: killed, resumed, skipping, diverged, running, of other data, or half missing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from lightning_fuse.reports.compare import compare, leaves_band
from lightning_fuse.reports.comparison_csv import csv_text
from lightning_fuse.reports.groups import NotComparable
from lightning_fuse.reports.load_runs import find_runs, load_run
from lightning_fuse.reports.page import page
from lightning_fuse.reports.run import Run
from lightning_fuse.reports.run_tables import MOST_POINTS
from lightning_fuse.reports.significance import Finding
from lightning_fuse.reports.stats import Comparison
from lightning_fuse.reports.tables import Table, markdown_text, tables_of
from tests.reports.run_folders import BATCH, CONTEXT, EVERY, write_run, write_seeds

BASE = (1.69, 1.70, 1.71)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three seeds of the baseline and two of a candidate that equals it."""
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.70))
    return tmp_path


def compared(root: Path, **options: bool) -> tuple[Comparison, Finding]:
    """The comparison and its finding; every output can be made of it."""
    comparison = compare([root], **options)
    page(comparison), markdown_text(comparison), csv_text(comparison)
    return comparison, comparison.findings[0]


def notes_of(comparison: Comparison, run: str) -> str:
    return "; ".join(note for note in comparison.notes if note.startswith(f"{run}:"))


def test_a_run_that_was_killed_and_resumed(root: Path) -> None:
    write_run(root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.0, 1.9, 1.70), resumed=True)
    comparison, finding = compared(root)
    assert (finding.outcome, finding.candidate.count) == ("same", 3)
    assert "resumed 1 time; downtime is in no clock" in notes_of(comparison, "third")


def test_what_a_resume_changed_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", resumed=True)
    manifest = tmp_path / "a" / "manifest.json"
    changed = manifest.read_text(encoding="utf-8").replace(
        '"config_changes": {}', '"config_changes": {"trainer.max_steps": [40, 80]}'
    )
    manifest.write_text(changed, encoding="utf-8")
    assert load_run(tmp_path / "a").config["trainer"]["max_steps"] == 80


def test_a_run_that_skipped(root: Path) -> None:
    write_run(
        root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.0, 1.9, 1.70), skips=(3, 17), scale=1024.0
    )  # fmt: skip
    comparison, finding = compared(root)
    assert (finding.outcome, finding.step) == ("same", 4 * EVERY)
    run = next(run for run in comparison.runs if run.name == "third")
    skips = run.skipped[["step", "reason", "scale"]].to_numpy().tolist()
    assert skips == [[3, "nonfinite", 1024.0], [17, "nonfinite", 512.0]]
    assert run.scales.to_numpy().tolist() == [[1, 1024.0], [3, 512.0], [17, 256.0]]
    points = run.points["val/loss"]
    assert points["update"].tolist() == [9, 18, 28, 38]
    # Skipped steps have read their data.
    assert points["tokens"].tolist() == [step * BATCH * CONTEXT for step in (10, 20, 30, 40)]
    assert "2 skipped steps (nonfinite)" in notes_of(comparison, "third")


def test_a_run_that_diverged_is_never_equal(root: Path) -> None:
    write_run(root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.0, math.nan, math.nan))
    comparison, finding = compared(root)
    assert finding.outcome == "diverged"
    assert finding.text.startswith("ours int8: 1 of 3 runs diverged (val/loss is not a number at the end)")
    assert "val/loss is not finite, first at step 30" in notes_of(comparison, "third")
    assert leaves_band(comparison)


def test_a_baseline_that_diverged(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", (math.nan, math.nan))
    write_seeds(tmp_path, "adamw_fused", "int8", (1.70, 1.70))
    comparison, finding = compared(tmp_path)
    assert (finding.outcome, finding.sentences[0]) == (
        "unknown",
        "nothing to compare: the baseline itself diverged (val/loss is not a number)",
    )
    assert leaves_band(comparison)


def test_a_run_that_is_still_going_does_not_count_beside_finished_ones(root: Path) -> None:
    write_run(root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.5), status="running")
    with (root / "third" / "steps.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"global_step": 21, "upd')  # a torn last line
    with (root / "third" / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("21,21,0,2.")
    comparison, finding = compared(root)
    assert (finding.outcome, finding.candidate.count, finding.step) == ("same", 2, 4 * EVERY)
    assert "still running, or killed: 20 steps so far" in notes_of(comparison, "third")


def test_runs_that_all_are_still_going_are_compared_so_far(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    for seed in (0, 1):
        write_run(
            tmp_path / f"b{seed}", "adamw_fused", "int8", seed, losses=(4.0, 3.0)[: 2 - seed], status="running"
        )  # fmt: skip
    comparison, finding = compared(tmp_path)
    # Seed 1 has validated once, at step 10.
    assert (finding.step, finding.cautions) == (EVERY, ["no run of it has finished"])
    assert leaves_band(comparison)


def test_a_run_that_failed_leaves_it_unsettled(root: Path) -> None:
    write_run(
        root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.0), status="failed", reason="RuntimeError: no memory"
    )  # fmt: skip
    comparison, finding = compared(root)
    assert (finding.outcome, finding.candidate.count) == ("unsettled", 2)
    assert "1 of 3 runs failed (RuntimeError: no memory)" in finding.text
    assert leaves_band(comparison)


def test_a_candidate_of_which_all_runs_failed(tmp_path: Path) -> None:
    write_seeds(tmp_path, "adamw_torch", "fp32", BASE)
    write_run(tmp_path / "b", "adamw_fused", "int8", 0, losses=(4.0, 3.0), status="failed", reason="no memory")
    _, finding = compared(tmp_path)
    assert (finding.outcome, finding.sentences[0]) == ("failed", "all of its runs failed (no memory)")


@pytest.mark.parametrize("other", [{"data_hash": "sha256:two"}, {"settings": {"recipe__name": "digits"}}])
def test_other_data_is_refused_and_flagged(root: Path, other: dict[str, object]) -> None:
    write_run(root / "other", "lion_fused", "fp32", 0, losses=(4.0, 3.0, 1.9, 1.70), **other)
    with pytest.raises(NotComparable, match=r"2 (data hashes|recipes): .*--allow-different-data"):
        compare([root])
    comparison = compare([root], allow_different_data=True)
    page(comparison)
    finding = next(finding for finding in comparison.findings if "lion" in finding.label)
    assert finding.outcome == "incomparable"
    assert "trained on other data" in finding.text
    assert all("lion" not in label for budget in comparison.budgets for label in budget.values)


def test_a_run_without_a_data_hash_is_taken_and_noted(root: Path) -> None:
    write_run(root / "third", "adamw_fused", "int8", 2, losses=(4.0, 3.0, 1.9, 1.70), data_hash=None)
    comparison, finding = compared(root)
    assert finding.candidate.count == 3
    assert "no data hash was recorded" in notes_of(comparison, "third")


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        ("summary.json", "no summary"),
        ("steps.jsonl", "no step rows"),
        ("metrics.csv", "no metrics"),
        ("checkpoints/last.ckpt", ""),
    ],
)
def test_a_missing_file_is_noted(root: Path, missing: str, note: str) -> None:
    broken = root / "adamw_fused_int8_1"
    (broken / missing).unlink()
    comparison, finding = compared(root)
    assert note in notes_of(comparison, broken.name)
    assert finding.outcome == "same"  # the other seed still says it


@pytest.mark.parametrize("broken", ["summary.json", "steps.jsonl", "metrics.csv"])
def test_a_broken_file_is_noted(root: Path, broken: str) -> None:
    (root / "adamw_fused_int8_1" / broken).write_text("nonsense\nnonsense\n", encoding="utf-8")
    comparison, _ = compared(root)
    said = notes_of(comparison, "adamw_fused_int8_1")
    assert broken in said
    assert "cannot be read" in said


@pytest.mark.parametrize("what", ["nowhere", "empty", "file"])
def test_paths_that_are_no_runs(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="give a run folder"):
        find_runs([tmp_path / what])


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10_a", "2_b", "1_c"):
        write_run(tmp_path / "multi" / name)
    found = find_runs([tmp_path / "multi", tmp_path / "multi" / "2_b"])
    assert [path.name for path in found] == ["1_c", "2_b", "10_a"]


def test_tables_have_a_row_for_everything(root: Path) -> None:
    comparison, _ = compared(root)
    tables: dict[str, Table] = {table.name: table for table in tables_of(comparison)}
    assert [row[0].text for row in tables["configurations"].rows] == ["torch fused fp32", "ours int8"]
    assert len(tables["runs"].rows) == 5
    assert len(csv_text(comparison).splitlines()) == 6


def test_two_settings_never_hide_in_one_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1)
    write_run(tmp_path / "c", seed=1, settings={"optimizer__lr": 1e-3})
    labels = {group.label: len(group.runs) for group in compare([tmp_path]).groups}
    assert labels == {"torch fused fp32 optimizer.lr=0.002": 2, "torch fused fp32 optimizer.lr=0.001": 1}


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ((), "adamw torch fused fp32"),
        (("optimizer=adamw_fused", "state=fp32"), "adamw ours fp32"),
        (("state=int8",), "adamw ours int8"),
        (("optimizer.lr=0.001",), "sgd ours fp32"),
    ],
)
def test_the_baseline_is_chosen_by_words(tmp_path: Path, words: tuple[str, ...], label: str) -> None:
    write_run(tmp_path / "a", "adamw_fused", "fp32")
    write_run(tmp_path / "b", "adamw_fused", "int8")
    write_run(tmp_path / "c", "adamw_torch", "fp32")
    write_run(tmp_path / "d", "sgd_fused", "fp32", settings={"optimizer__lr": 1e-3})
    assert compare([tmp_path], baseline=words).baseline.label == label


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer=adamw_fused", "fits 2 groups"),
        ("optimizer=lion_fused", "fits no group"),
        ("optimzer=adamw_fused", "did you mean 'optimizer'"),
        ("adamw_fused", "is not KEY=WORD"),
    ],
)
def test_a_baseline_that_names_no_group(tmp_path: Path, word: str, message: str) -> None:
    write_run(tmp_path / "a", "adamw_fused", "fp32")
    write_run(tmp_path / "b", "adamw_fused", "int8")
    with pytest.raises(NotComparable, match=message):
        compare([tmp_path], baseline=[word])


def test_equal_budgets_take_what_was_measured_by_then(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=(4.0, 3.0, 2.0, 1.0), step_ms=100)  # ends at 4 s
    write_run(tmp_path / "b", "adamw_fused", losses=(4.0, 3.0, 2.0, 1.0), step_ms=50)  # ends at 2 s
    budgets = {budget.axis: budget for budget in compare([tmp_path]).budgets}
    assert (budgets["update"].limit, budgets["tokens"].limit, budgets["seconds"].limit) == (40, 40 * 1024, 2.0)
    means = {axis: [spread.mean for spread in budget.values.values()] for axis, budget in budgets.items()}
    assert means == {"update": [1.0, 1.0], "tokens": [1.0, 1.0], "seconds": [3.0, 1.0]}


def test_reading_needs_neither_torch_nor_lightning(tmp_path: Path, run_python: object) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", "adamw_fused")
    code = (
        "import sys\nfor name in ('torch', 'lightning', 'matplotlib'): sys.modules[name] = None\n"
        "from lightning_fuse.reports.compare import compare\n"
        "from lightning_fuse.reports.page import page\n"
        f"print(len(page(compare([{str(tmp_path)!r}]))))\n"
    )
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr


def test_a_run_knows_its_measures(tmp_path: Path) -> None:
    run: Run = load_run(write_run(tmp_path / "a", optimizer_ms=3.0, step_ms=25))
    assert (run.optimizer_ms, run.checkpoint_bytes, run.state_bytes) == (3.0, 5000, 8000)
    assert run.training_step_ms == pytest.approx(25)
    assert run.notes == []


SPOILT: list[tuple[str, tuple[str | int, ...], object]] = [
    ("summary.json", ("target", "train_seconds"), []),
    ("summary.json", ("target",), 7.0),
    ("summary.json", ("optimizers", 0, "state_bytes"), {"exp_avg": None}),
    ("summary.json", ("wall_seconds",), "long"),
    ("steps.jsonl", ("train_seconds",), {}),
    ("steps.jsonl", ("global_step",), None),
    ("steps.jsonl", ("optimizer_ms",), "x"),
    ("metrics.csv", (), None),
]


@pytest.mark.parametrize(("name", "place", "value"), SPOILT)
def test_a_file_of_another_shape_is_noted(
    tmp_path: Path, name: str, place: tuple[str | int, ...], value: object
) -> None:
    """Valid JSON or CSV that no run writes: edited by hand, or another program's."""
    write_run(tmp_path / "a")
    folder = write_run(tmp_path / "b", "adamw_fused")
    _spoil(folder / name, place, value)
    comparison = compare([tmp_path])
    assert any(note.startswith(f"b: {name}") for note in comparison.notes), comparison.notes
    assert page(comparison)
    assert markdown_text(comparison)


DEEP = "[" * 100_000 + "]" * 100_000
ODD_MANIFESTS = {
    "no JSON": "{",
    "a list": "[]",
    "nested deeply": f'{{"config": {DEEP}}}',
    "no configuration": '{"config": null, "seed": 1}',
    "words for a configuration": '{"config": "x"}',
}
ODD_ENTRIES = [
    ("seed", 1.5),
    ("seed", 10**400),
    ("seed", True),
    ("data_hash", ["x"]),
    ("hardware", "x"),
    ("git", 7),
    ("resumed_from", "x"),
    ("resumed_from", [{"config_changes": {"seed": 3, "trainer.max_steps.x": [1, 2]}}, 5]),
    ("versions", {"torch": {"nested": [1]}}),
]


@pytest.mark.parametrize("text", ODD_MANIFESTS.values(), ids=ODD_MANIFESTS)
def test_an_odd_manifest_is_a_note_and_not_the_end(root: Path, text: str) -> None:
    (root / "adamw_fused_int8_1" / "manifest.json").write_text(text, encoding="utf-8")
    comparison, finding = compared(root)
    assert (len(comparison.runs), finding.outcome) == (4, "same")
    assert "left out: manifest.json" in notes_of(comparison, "adamw_fused_int8_1")


@pytest.mark.parametrize(("key", "value"), ODD_ENTRIES, ids=[f"{key}-{i}" for i, (key, _) in enumerate(ODD_ENTRIES)])
def test_an_odd_entry_is_left_out(root: Path, key: str, value: object) -> None:
    _spoil(root / "adamw_fused_int8_1" / "manifest.json", (key,), value)
    comparison, _ = compared(root)
    assert len(comparison.runs) == 5
    if key not in ("versions", "resumed_from") or value == "x":
        assert f"{key} is" in notes_of(comparison, "adamw_fused_int8_1")


@pytest.mark.parametrize("name", ["manifest.json", "steps.jsonl", "metrics.csv", "summary.json"])
def test_a_pipe_is_never_waited_for(root: Path, name: str) -> None:
    path = root / "adamw_fused_int8_1" / name
    path.unlink()
    os.mkfifo(path)
    comparison, _ = compared(root)
    assert "it is no regular file" in notes_of(comparison, "adamw_fused_int8_1")


def test_numbers_beyond_reckoning_are_left_out(root: Path) -> None:
    folder = root / "adamw_fused_int8_1"
    _spoil(folder / "summary.json", ("wall_seconds",), 10**400)
    _spoil(folder / "steps.jsonl", ("optimizer_ms",), 10**400)
    _spoil(folder / "manifest.json", ("config", "optimizer", "lr"), 10**400)
    comparison, _ = compared(root)
    said = notes_of(comparison, folder.name)
    assert "wall_seconds is 1000000" in said
    assert "1 values of optimizer_ms are no number" in said
    assert max(len(group.label) for group in comparison.groups) < 150


def test_a_folder_without_one_run_that_can_be_read_is_refused(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(NotComparable, match="names no configuration; name other run folders"):
        compare([tmp_path])


def test_a_long_run_keeps_its_ends_and_few_points(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    rows = "".join(f"{step},{step},0,{step / 10},{1 + 1 / step},\n" for step in range(1, 60_001))
    (folder / "metrics.csv").write_text(f"step,update,epoch,train_seconds,val/loss,train/loss\n{rows}60001,60", "utf-8")
    points = load_run(folder).points["val/loss"]
    assert len(points) <= MOST_POINTS + 1
    assert points["step"].iloc[-1] == 60_000
    assert "train/loss" not in load_run(folder).points


def _spoil(path: Path, place: tuple[str | int, ...], value: object) -> None:
    if path.suffix == ".csv":
        head, first, *rest = path.read_text(encoding="utf-8").splitlines()
        cells = first.split(",")
        cells[head.split(",").index("train_seconds")] = ""
        path.write_text("\n".join([head, ",".join(cells), *rest, ""]), encoding="utf-8")
        return
    first, *rest = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    entries = json.loads(first)
    inner = entries
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text("\n".join([json.dumps(entries), *rest, ""]), encoding="utf-8")
