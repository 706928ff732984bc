"""Where a run lies and how it is gone on with: paths of any characters, folders that cannot be written."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lightning_fuse.run_place import check_writable, hydra_quoted, resume_command
from tests.composing import ROOT


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc"))))
def test_quoted_text_is_read_back_as_it_was(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={hydra_quoted(text)}"])
    assert str(override.value()) == text
    assert isinstance(override._value, str) or not text or hydra_quoted(text) != text


@pytest.mark.parametrize("text", ["null", "True", "1e3", "12", "1_000", "inf", "nan", "", "a,b", "${seed}", "it's\\"])
def test_a_folder_with_the_name_of_another_thing_is_text(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={hydra_quoted(text)}"])
    assert not override.is_sweep_override()
    assert override.value() == text


@pytest.mark.parametrize("path", ["file/x", "/proc/x/y", "/dev/null/x", "a\0b"])
def test_a_folder_that_cannot_be_made_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^run_folder=.*: nothing can be written there \(.+\); give another folder$"):
        check_writable("run_folder", tmp_path / path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path: Path) -> None:
    check_writable("run_folder", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    check_writable("run_folder", tmp_path)


@pytest.mark.parametrize(
    ("started", "program"),
    [
        ("train.py", ["train.py"]),
        ("/some where/train.py", ["/some where/train.py"]),
        ("/nowhere/bin/lightning-fuse", ["/nowhere/bin/lightning-fuse", "train"]),
        ("/site/lightning_fuse/cli/main.py", ["-m", "lightning_fuse.cli.main", "train"]),
    ],
)
def test_the_program_is_named_as_it_was_started(
    started: str, program: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [started])
    words = shlex.split(resume_command("runs/it's me"))
    assert words[:3] == ["cd", str(tmp_path), "&&"]
    assert words[-1] == r"resume='runs/it\'s me'"
    assert words[-1 - len(program) : -1] == program


NET = """
import torch
from lightning_fuse.recipes.digits import Digits


class Net(torch.nn.Sequential):
    def __init__(self, *, width: int):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
"""
RECIPE = """# @package _global_
defaults:
  - override /model: net
  - override /data: digits
recipe:
  name: mine
  requires:
    model: { target: mine.Net, words: [net] }
    data: { target: lightning_fuse.recipes.digits.DigitsData, words: [digits] }
  monitor: val/loss
  mode: min
  target: 0.1
  max_steps: 100000
  val_every: 1000
  module:
    _target_: lightning_fuse.recipes.digits.Digits
"""


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_the_printed_command_works_as_printed_from_elsewhere(tmp_path: Path) -> None:
    """A recipe of one's own, in a folder with odd characters, stopped and gone on with from another folder."""
    home = tmp_path / "it's mine"
    for name, text in {"mine.py": NET, "my conf/recipe/mine.yaml": RECIPE, "my conf/model/net.yaml": ""}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text or "_target_: mine.Net\nwidth: 8\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["--config-dir", "my conf", "recipe=mine", "logger=none", "run_folder='runs/the \\'first\\''"]
    command = [sys.executable, "-m", "lightning_fuse.cli.main", "train", *words]
    process = subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True)
    steps = home / "runs" / "the 'first'" / "steps.jsonl"
    while not steps.exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    printed = errors.strip().splitlines()[-1].removeprefix("interrupted; to go on: ")
    done = sum(1 for _ in steps.open())

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = subprocess.run(
        f"{printed} trainer.max_steps={done + 5}",
        shell=True, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert sum(1 for _ in steps.open()) == done + 5
    assert list(elsewhere.iterdir()) == []
