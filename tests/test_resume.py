"""Stopping, killing and going on: in the same folder the same run, from a file a new one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_fuse.config import ConfigError
from lightning_fuse.resume import differences, find_start
from lightning_fuse.run import Run, train
from tests.composing import ROOT, SMALL, composed
from tests.resuming import checkpoint, compose_here, equal, resumed, rows

# Dropout draws random numbers in every step, and the run is over an epoch long.
LONGER = (
    *("model.layers=1", "model.heads=2", "model.width=32", "model.context=32", "model.dropout=0.1"),
    *("data.batch_size=64", "recipe.max_steps=260", "recipe.val_every=40", "callbacks.last.every=30"),
    *("recipe.module.sample_bytes=0", "++trainer.limit_val_batches=2", "logger=none"),
)
RESULT = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "FusePrecision")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path / "first"
    train(composed(*SMALL, run_folder=folder), list(SMALL))
    return folder


def start(*words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words], env=environment, stdout=subprocess.DEVNULL
    )


def kill_after(process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    """Kills a run at some moment after so many steps, as a power cut would."""
    file = folder / "steps.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_run_killed_twice_ends_as_one_that_was_not(state: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [*LONGER, f"state={state}"]
    assert start(*words, f"hydra.run.dir={whole}").wait() == 0
    kill_after(start(*words, f"hydra.run.dir={killed}"), killed, 70)
    kill_after(start(f"resume={killed}"), killed, 160)
    assert start(f"resume={killed}").wait() == 0

    first, second = checkpoint(whole), checkpoint(killed)
    assert first["global_step"] == second["global_step"] == 260
    for key in RESULT:
        assert equal(first[key], second[key]), key
    assert rows(whole) == rows(killed)
    assert equal(checkpoint(whole, "best.ckpt")["state_dict"], checkpoint(killed, "best.ckpt")["state_dict"])
    resumes = json.loads((killed / "manifest.json").read_text())["resumed_from"]
    assert [entry["global_step"] % 10 for entry in resumes] == [0, 0]
    assert len(resumes) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "times", "code", "words"),
    [
        (signal.SIGINT, 1, 130, " resume={folder}\n"),
        (signal.SIGTERM, 1, 143, " resume={folder}\n"),
        (signal.SIGTERM, 2, 143, "interrupted before the first checkpoint: start it again\n"),
    ],
)
def test_a_signal_says_how_to_go_on(number: signal.Signals, times: int, code: int, words: str, tmp_path: Path) -> None:
    """One waits for the next closed window and its checkpoint; two, inside a window of 200 batches, do not."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), *LONGER, f"hydra.run.dir={folder}", "callbacks.last.every=1000"]
    command += ["trainer.val_check_interval=1000", f"trainer.accumulate_grad_batches={1 if times == 1 else 200}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / ("steps.jsonl" if times == 1 else "summary.json")).exists():
        time.sleep(0.05)
    time.sleep(1.0)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.3)
    output, errors = process.communicate()
    assert process.returncode == code
    assert errors.startswith("interrupted")
    assert errors.endswith(words.format(folder=folder))
    assert f"{number.name}: stopping after this window, with a checkpoint" in output
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    if times == 1:
        found = checkpoint(folder)
        assert found["global_step"] == len(rows(folder))
        assert found["lightning_fuse"]["config"]["recipe"]["name"] == "byte_lm"


def test_a_folder_goes_on_in_place_with_its_own_words(finished: Path, tmp_path: Path) -> None:
    begun = resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=4")
    assert begun.in_place
    assert begun.global_step == 2
    assert begun.cfg.run_folder == str(finished)
    assert begun.cfg.model.width == 16  # not repeated, and not lost
    assert begun.cfg.trainer.max_steps == 4
    assert [word for word in begun.overrides if "resume" in word] == []


def test_a_file_begins_a_new_run_with_the_words_of_the_old(finished: Path, tmp_path: Path) -> None:
    words = (f"resume='{finished}/checkpoints/last.ckpt'", "trainer.max_steps=4", "schedule=constant")
    begun = resumed(finished, tmp_path, *words)
    assert not begun.in_place
    assert begun.cfg.run_folder == str(tmp_path / "new")
    assert begun.cfg.model.width == 16
    with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        train(begun.cfg, [*words, f"run_folder='{tmp_path / 'new'}'"])
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["resumed_from"][0]["checkpoint"] == f"{finished}/checkpoints/last.ckpt"
    assert [row["update"] for row in rows(tmp_path / "new")] == [3, 4]
    assert [row["update"] for row in rows(finished)] == [1, 2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("state=int8", "state.format=fp32 (now int8)"),
        ("optimizer.lr=1e-4", "optimizer.lr=0.002 (now 0.0001)"),
        ("seed=7", "seed=0 (now 7)"),
        ("precision=bf16-mixed", "precision=32-true (now bf16-mixed)"),
        ("callbacks.fuse.on_nonfinite=raise", "on_nonfinite=skip (now raise)"),
    ],
)
def test_in_place_nothing_that_computes_may_change(finished: Path, tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=4", word)
    assert message in str(caught.value)
    assert "resume=" in str(caught.value)


@pytest.mark.parametrize(
    "word", ["kernel=reference", "logger=csv", "trainer.log_every_n_steps=5", "data.num_workers=1"]
)
def test_in_place_the_execution_may_change(finished: Path, tmp_path: Path, word: str) -> None:
    assert resumed(finished, tmp_path, f"resume='{finished}'", word).in_place


def test_a_new_run_cannot_change_what_the_checkpoint_decides(finished: Path, tmp_path: Path) -> None:
    words = (f"resume='{finished}/checkpoints/last.ckpt'", "trainer.max_steps=4")
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.002"):
        resumed(finished, tmp_path, *words, "optimizer.lr=1")


REFUSED = [
    (("trainer.max_steps=2",), "the run is finished, step 2 of 2; use trainer.max_steps=4"),
    (("trainer.max_steps=4", "model.width=32"), "is of another model"),
    (("trainer.max_steps=4", "state=int8"), "state"),
    (("trainer.max_steps=4", "optimizer=sgd_fused"), "another optimizer"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_before_the_run(
    finished: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    begun = resumed(finished, tmp_path, f"resume='{finished}/checkpoints/last.ckpt'", *words)
    with pytest.raises(ValueError, match=message):
        Run(_with_resume(begun.cfg, finished), begun.overrides)
    assert not (tmp_path / "new").exists()


def _with_resume(cfg: DictConfig, finished: Path) -> DictConfig:
    """The same configuration, resumed from a copy that lies in no run folder, so that it is not composed again."""
    alone = finished.parent / "alone.ckpt"
    alone.write_bytes((finished / "checkpoints" / "last.ckpt").read_bytes())
    cfg.resume = str(alone)
    return cfg


def _damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _foreign(path: Path) -> None:
    torch.save({"global_step": 1, "weights": torch.zeros(3)}, path)


def _text(path: Path) -> None:
    path.write_text("not a checkpoint")


@pytest.mark.parametrize("spoil", [_damaged, _foreign, _text])
def test_a_damaged_or_foreign_file_is_refused(finished: Path, tmp_path: Path, spoil: Any) -> None:
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes((finished / "checkpoints" / "last.ckpt").read_bytes())
    spoil(alone)
    cfg = composed(*SMALL, f"resume='{alone}'", "trainer.max_steps=4", run_folder=tmp_path / "new")
    with pytest.raises(ConfigError, match=r"alone\.ckpt"):
        Run(cfg, [])
    assert not (tmp_path / "new").exists()


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        find_start(composed(f"resume='{tmp_path}'"), [], compose_here(tmp_path))


def test_differences_name_keys_of_both_sides() -> None:
    old, new = OmegaConf.create({"a": {"b": 1}, "seed": 0}), OmegaConf.create({"a": {"c": 1}, "seed": 0, "kernel": "x"})
    assert differences(old, new) == [("a.b", 1, None), ("a.c", None, 1)]  # the kernel is free
