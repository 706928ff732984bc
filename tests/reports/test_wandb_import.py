"""Offline W&B runs as run folders: a real one has the values of its own records, a foreign one its numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_fuse.cli.import_wandb import folder_name, joined
from lightning_fuse.records import read_metrics, read_step_rows, read_summary
from lightning_fuse.reports.groups import group_runs
from lightning_fuse.reports.load_runs import load_run
from lightning_fuse.reports.wandb_import import import_run
from lightning_fuse.reports.wandb_log import WandbRun, find_logs, read_wandb
from lightning_fuse.run import train
from scripts.import_wandb import main
from tests.composing import SMALL, composed


class Trained(NamedTuple):
    """A run of train.py, and what W&B kept of it."""

    folder: Path
    wandb: WandbRun
    log: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """Two runs of one process, as a multirun makes them; the first skips a step."""
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"seed{seed}") / "run"
        words = [*SMALL, "logger=wandb", f"seed={seed}", "trainer.max_steps=6", "trainer.val_check_interval=3"]
        words += ["precision=16-mixed", "trainer.accelerator=cpu", "state=int8", "recipe.target=99"]
        words += ["state.patterns={model.tokens.*: fp32}"]
        # The gradients of a first loss overflow float16 at 2^19, not at 256.
        words += [f"callbacks.fuse.init_loss_scale={2**19 if seed == 0 else 256}"]
        train(composed(*words, run_folder=folder), words)
        (log,) = find_logs(folder)
        found.append(Trained(folder, _ended(log), log))
    return found


def _ended(log: Path) -> WandbRun:
    """A run whose end is written: that is done by a process of W&B's own, which may still be at it."""
    until = time.monotonic() + 30
    while read_wandb(log).exit_code is None and time.monotonic() < until:
        time.sleep(0.1)
    return read_wandb(log)


def test_every_run_of_a_process_is_a_run_of_its_own(runs: list[Trained]) -> None:
    first, second = runs
    assert first.wandb.run_id != second.wandb.run_id
    assert (first.wandb.config["seed"], second.wandb.config["seed"]) == (0, 1)
    assert first.wandb.exit_code == second.wandb.exit_code == 0


def test_what_decides_a_run_is_a_column(runs: list[Trained]) -> None:
    config = runs[0].wandb.config
    wanted = {"recipe": "byte_lm", "optimizer": "adamw_fused", "state": "int8", "master": "none"}
    wanted |= {"precision": "16-mixed", "kernel": "auto", "seed": 0, "optimizer.lr": 0.002, "model.width": 16}
    assert {key: config[key] for key in wanted} == wanted
    assert config["parameters"] > 1000
    assert config["data_hash"].startswith("sha256:")
    assert not [key for key in config if str(runs[0].folder) in str(config[key])]  # folders are no columns


def test_an_imported_run_has_the_values_of_its_own_records(runs: list[Trained], tmp_path: Path) -> None:
    for index, run in enumerate(runs):
        folder = import_run(run.wandb, tmp_path / str(index), source=str(run.log))
        own, imported = read_metrics(run.folder / "metrics.csv"), read_metrics(folder / "metrics.csv")
        assert len(own) == 6
        assert [_without_seconds(row) for row in imported] == [_without_seconds(row) for row in own]
        for theirs, ours in zip(imported, own, strict=True):
            assert theirs["train_seconds"] == pytest.approx(ours["train_seconds"], abs=0.5)

        kept = ("global_step", "update", "applied", "reason", "grad_norm", "clip_coef", "optimizer", "loss_scale_after")
        rows = [{key: row[key] for key in kept} for row in read_step_rows(run.folder / "steps.jsonl")]
        assert [{key: row[key] for key in kept} for row in read_step_rows(folder / "steps.jsonl")] == rows
        assert any(not row["applied"] for row in rows) == (index == 0)

        a, b = read_summary(run.folder / "summary.json"), read_summary(folder / "summary.json")
        for key in ("status", "global_step", "updates", "skips", "loss_scale", "optimizer_ms"):
            assert getattr(a, key) == pytest.approx(getattr(b, key)), key
        assert {**a.best, "checkpoint": None} == b.best
        assert {k: v for k, v in a.target.items() if "seconds" not in k} == {
            k: v for k, v in b.target.items() if "seconds" not in k
        }
        assert b.target["reached"]
        assert a.optimizers[0].total_bytes == b.optimizers[0].total_bytes
        assert a.optimizers[0].parameters == b.optimizers[0].parameters


def test_the_first_run_did_skip(runs: list[Trained]) -> None:
    assert read_summary(runs[0].folder / "summary.json").skips["nonfinite"] >= 1
    assert read_summary(runs[1].folder / "summary.json").skips == {}


def _without_targets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: _without_targets(held) for key, held in value.items() if key not in ("_target_", "_partial_")}
    return {key: held for key, held in kept.items() if held != {} or value[key] == {}}


def test_the_configuration_comes_back_nested(runs: list[Trained], tmp_path: Path) -> None:
    own = json.loads((runs[0].folder / "manifest.json").read_text())
    imported = json.loads((import_run(runs[0].wandb, tmp_path / "run") / "manifest.json").read_text())
    assert imported["config"]["state"]["patterns"] == {"model.tokens.*": "fp32"}
    watching = {"logger", "resume", "run_folder"}
    assert set(own["config"]) - set(imported["config"]) == watching
    for key, value in imported["config"].items():
        wanted = own["config"][key]
        if key == "callbacks":  # without the folders of their files
            wanted = {name: _without_folder(entry) for name, entry in wanted.items()}
        assert value == _without_targets(wanted), key
    assert imported["config"]["optimizer"]["name"] == "adamw_fused"
    assert imported["data_hash"] == own["data_hash"]
    assert imported["seed"] == own["seed"]
    assert imported["hardware"]["cores"] == own["hardware"]["cores"]
    assert imported["imported_from"]["wandb_run"] == runs[0].wandb.run_id


def test_a_run_torn_in_two_comes_back_to_there(runs: list[Trained], tmp_path: Path) -> None:
    data = runs[0].log.read_bytes()
    torn = tmp_path / "run-torn.wandb"
    torn.write_bytes(data[: len(data) // 2])
    run = read_wandb(torn)
    assert run.exit_code is None
    assert 0 < len(run.history) < len(runs[0].wandb.history)
    folder = import_run(run, tmp_path / "run")
    assert read_summary(folder / "summary.json").status == "running"
    own = read_metrics(runs[0].folder / "metrics.csv")
    imported = read_metrics(folder / "metrics.csv")
    for theirs, ours in zip(imported, own[: len(imported)], strict=True):
        assert _without_seconds(theirs).items() <= _without_seconds(ours).items()


def test_the_command_imports_all_and_refuses_twice(
    runs: list[Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(runs[0].folder)
    assert main([source, "--out", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.name == f"byte_lm_adamw_fused_int8_0_{runs[0].wandb.run_id}"
    assert (folder / "manifest.json").is_file()
    assert main([source, "--out", str(tmp_path)]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert "no offline W&B run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "/x", "..", "a/../../b", "\\x", "-", "", "x\n/y", "~root/.ssh"])
@pytest.mark.parametrize("run_id", ["abc", "../../y", "/y"])
def test_names_of_a_log_stay_inside_the_folder(tmp_path: Path, name: str, run_id: str) -> None:
    inside = (tmp_path / folder_name(WandbRun(run_id=run_id, name=name))).resolve()
    assert inside.parent == tmp_path.resolve()
    assert inside != tmp_path.resolve()


def test_an_unreadable_log_is_a_note_and_the_others_go_on(
    runs: list[Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "wandb"
    source.mkdir()
    (source / "run-a.wandb").write_bytes(b"\x00" * 100)
    (source / "run-b.wandb").mkdir()
    (source / "run-c.wandb").write_bytes(runs[1].log.read_bytes())
    assert main([str(source), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "run-a.wandb" in said.err
    assert (Path(said.out.strip()) / "manifest.json").is_file()


def test_the_second_log_of_a_resumed_run_continues_the_first() -> None:
    first = WandbRun("r", started="one", history=[{"trainer/global_step": n, "loss": 1.0} for n in (1, 2, 3, 4)])
    second = WandbRun("r", started="two", exit_code=0, history=[{"trainer/global_step": n} for n in (3, 4, 5)])
    run = joined(first, second)
    assert [row["trainer/global_step"] for row in run.history] == [1, 2, 3, 4, 5]
    assert [("loss" in row) for row in run.history] == [True, True, False, False, False]
    assert (run.started, run.exit_code) == ("one", 0)


def foreign(**changes: Any) -> WandbRun:
    """A run that somebody else logged with Lightning's WandbLogger, or by hand."""
    rows = [
        {"trainer/global_step": 9, "epoch": 0, "loss": 2.0, "_runtime": 1.5, "_step": 0, "image": {"path": "a.png"}},
        {"trainer/global_step": 19, "epoch": 1, "loss": float("nan"), "_runtime": 3.0, "_step": 1, "best": True},
    ]
    return WandbRun(**{"run_id": "abc", "config": {"lr": 0.1, "net": {"width": 3}}, "history": rows, **changes})


def test_a_foreign_run_gives_its_numbers(tmp_path: Path) -> None:
    folder = import_run(foreign(exit_code=1), tmp_path / "run")
    first, second = read_metrics(folder / "metrics.csv")
    assert first == {"step": 10, "update": 10, "epoch": 0, "train_seconds": 1.5, "loss": 2.0}
    assert second["step"] == 20
    assert second["loss"] != second["loss"]
    assert json.loads((folder / "manifest.json").read_text())["config"] == {"lr": 0.1, "net": {"width": 3}}
    assert read_summary(folder / "summary.json").status == "failed"
    assert read_summary(folder / "summary.json").optimizers == []


def test_a_run_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logged no number"):
        import_run(foreign(history=[{"_step": 0, "note": "hello"}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_comparison_takes_an_imported_run_for_what_it_is(runs: list[Trained], tmp_path: Path) -> None:
    own = [load_run(run.folder) for run in runs]
    imported = [load_run(import_run(run.wandb, tmp_path / str(i))) for i, run in enumerate(runs)]
    assert len(group_runs([*own, *imported])) == len(group_runs(own))
    for theirs, ours in zip(imported, own, strict=True):
        columns = ["step", "update", "tokens", "value"]
        assert theirs.points["val/loss"][columns].equals(ours.points["val/loss"][columns])
        assert theirs.scales.equals(ours.scales)
        assert theirs.skipped[["step", "reason"]].equals(ours.skipped[["step", "reason"]])


def test_steps_that_were_not_logged_count(runs: list[Trained], tmp_path: Path) -> None:
    """Rows of every third step give the same tokens, and the same time of one step, as rows of all."""
    whole = import_run(runs[1].wandb, tmp_path / "whole")
    sparse = import_run(runs[1].wandb, tmp_path / "sparse")
    rows = list(read_step_rows(sparse / "steps.jsonl"))
    for number, row in enumerate(rows):
        row["train_seconds"] = 0.25 * (number + 1)
    for folder, kept in ((whole, rows), (sparse, rows[2::3])):
        (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    a, b = load_run(whole), load_run(sparse)
    assert a.training_step_ms == b.training_step_ms == 250.0
    steps = {row["global_step"] for row in rows[2::3]}
    tokens, sparse_tokens = (run.points["train/loss"].set_index("step")["tokens"] for run in (a, b))
    assert (tokens[tokens.index.isin(steps)] == sparse_tokens[sparse_tokens.index.isin(steps)]).all()


def _without_folder(entry: Any) -> Any:
    folders = ("dirpath", "folder")
    return {k: v for k, v in entry.items() if k not in folders} if isinstance(entry, dict) else entry


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "train_seconds"}
