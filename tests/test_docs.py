"""What README.md and docs/ show is true: examples run as they are, commands run or are composed, links lead somewhere.

Examples run in this process, page by page, in an empty folder: a block whose first line is ``# folder/file`` is written
there, too. Commands of ``train.py`` are composed and checked in the default tests, and run with a tiny model in the
slow ones. What can be neither is in ``ELSEWHERE``, with the reason.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from lightning_fuse.cli.main import COMMANDS as CLI
from lightning_fuse.config import ConfigError, check
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.rules import RULES
from tests.composing import SMALL
from tests.pages import PAGES, ROOT, Command, blocks, commands, text_of

# Each once, where it stands first.
COMMANDS = list({command.words: command for page in reversed(PAGES) for command in reversed(commands(page))}.values())
TRAIN = [c for c in COMMANDS if c.words[:2] in (("python", "train.py"), ("lightning-fuse", "train"))]
SCRIPTS = [
    c for c in COMMANDS
    if c not in TRAIN and (c.words[0] == "lightning-fuse" or " ".join(c.words).startswith("python scripts/"))
]  # fmt: skip

# Commands that are not run here: what they begin with or hold -> why, and what is done instead.
ELSEWHERE = {
    "make": "sets up a machine; tests/test_packaging.py looks at what it would do",
    "pip install": "downloads; tests/test_packaging.py builds the wheel and holds the extras to the pins",
    "python3 -m venv": "makes an environment",
    ". .venv/bin/activate": "changes the shell",
    "wandb sweep": "needs W&B's server; tests/test_sweeps.py checks what is printed against its schema",
    "wandb agent": "needs W&B's server; tests/test_sweeps.py runs its substitution of the command",
    "wandb sync": "needs W&B's server",
    "scripts/format_error.py": "takes minutes; tests/formats/test_format_error.py runs its short form",
    "scripts/flagship.py --recipes byte_lm --updates 400": "takes 19 minutes; tests/reports runs it in small",
}
# Commands of train.py that are composed and checked, but not run here.
NOT_RUN = {
    "--help": "prints; tests/test_run.py reads it",
    "strategy=ddp": "starts processes; tests/test_run.py trains so",
    "hydra/launcher=parallel": "starts processes; tests/test_sweeps.py trains so",
    "hydra/launcher=slurm": "submits to a queue; tests/test_sweeps.py composes the launcher",
    "trainer.accelerator=gpu": "needs a GPU",
    "logger.wandb.offline=false": "needs W&B's server",
}
# What stands in a page for what the reader has, and the key of `Workshop` that has it here.
PLACEHOLDERS = {
    **dict.fromkeys(("RUN", "PATH", "runs/DAY/RUN"), "run"),
    **dict.fromkeys(("MULTIRUN", "runs/DAY/MULTIRUN", "runs/compare"), "multirun"),
    **{"FILE": "text", "NAME": "name", "IN.ckpt": "checkpoint"},
}
SHORT = ["trainer=debug", "trainer.limit_val_batches=1"]
# Words that make a recipe train in a blink.
TINY = {
    "byte_lm": [word for word in SMALL if not word.startswith("logger")],
    "digits": ["model.width=8", *SHORT],
    "digits_gan": ["model.width=8", *SHORT],
    "sine": ["model.width=8", *SHORT],
}


def names(entries: list[Command]) -> list[str]:
    return [str(entry) for entry in entries]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in; what an example registers or imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = [(table, dict(table._entries)) for table in (RULES, STATE_FORMATS)]
    modules = set(sys.modules)
    yield tmp_path
    for table, entries in tables:
        table._entries = entries
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("my", "example"):
            del sys.modules[name]
    GlobalHydra.instance().clear()
    torch.set_default_dtype(torch.float32)


def write_files(pages: list[str], where: Path) -> None:
    """The files that pages show, by the path in their first line."""
    for block in [block for page in pages for block in blocks(text_of(page), "python", "yaml")]:
        if block.label is not None:
            path = where / block.label
            path.parent.mkdir(parents=True, exist_ok=True)
            # Hydra reads its own directive in the first line only.
            text = block.text.split("\n", 1)[1] if block.language == "yaml" else block.text
            path.write_text(text, encoding="utf-8")
    importlib.invalidate_caches()


def test_there_are_examples_and_commands() -> None:
    assert sum(len(blocks(text_of(page), "python")) for page in PAGES) >= 10
    assert len(TRAIN) >= 20
    assert len(SCRIPTS) >= 4


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(text_of(page), "python")])
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_a_page_run_as_they_are(page: str, folder: Path) -> None:
    write_files([page], folder)
    for number, block in enumerate(blocks(text_of(page), "python")):
        if block.label is None:
            example = folder / f"example_{number}.py"
            example.write_text(block.text, encoding="utf-8")
            runpy.run_path(str(example), run_name="__main__")


def test_every_command_is_run_or_named(repo_root: Path) -> None:
    ours = {str(command) for command in (*TRAIN, *SCRIPTS)}
    others = [command for command in COMMANDS if str(command) not in ours]
    lost = [str(c) for c in others if not any(" ".join(c.words).startswith(start) for start in ELSEWHERE)]
    assert lost == []
    for command in SCRIPTS:
        assert command.words[1] in CLI or (repo_root / command.words[1]).is_file(), command
    for command in others:
        assert all((repo_root / word).is_file() for word in command.words if word.startswith("lightning_fuse/conf/")), (
            command
        )


def test_every_reason_is_needed() -> None:
    lines = [" ".join(command.words) for command in COMMANDS]
    assert [
        start for start in ELSEWHERE if not any(line.removeprefix("python ").startswith(start) for line in lines)
    ] == []
    assert [word for word in NOT_RUN if not any(f" {word}" in line for line in lines)] == []


@pytest.mark.parametrize("command", TRAIN, ids=names(TRAIN))
def test_a_command_of_train_py_composes(command: Command, folder: Path) -> None:
    write_files(PAGES, folder)
    words, many = _without_options(command)
    for run in _runs(words) if many else [words]:
        try:
            check(_composed(run))
        except ConfigError:
            assert many or "state=int8" in run, f"{command} is refused"


def _without_options(command: Command) -> tuple[list[str], bool]:
    """The words for Hydra's composer, placeholders left in, and whether they are a multirun."""
    words = [word for word in command.words[2:] if word not in ("-m", "--help")]
    if "--config-dir" in words:
        place = words.index("--config-dir")
        where = Path(words[place + 1]).resolve()
        words[place : place + 2] = [f"hydra.searchpath=[file://{where}]"]
    return words, "-m" in command.words or any(word.startswith("multirun=") for word in words)


def _runs(words: list[str]) -> list[list[str]]:
    first_seed = [word.split(",")[0] if word.startswith("seed=") else word for word in words]
    overrides = OverridesParser.create().parse_overrides(first_seed)
    (batch,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [list(run) for run in batch]


def _composed(words: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        return hydra.compose("config", [*words, "run_folder=unused"])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a reader has by then: a text, a run that was stopped, and a multirun to compare."""
    base = tmp_path_factory.mktemp("workshop")
    text = base / "text.txt"
    text.write_bytes(b"the quick brown fox " * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        tiny = ["recipe=digits", *TINY["digits"]]
        run_train(patch, [*tiny, "logger=wandb", "run_folder=stopped"])
        run_train(patch, ["-m", *tiny, "state=fp32,int8", "seed=0,1", "hydra.sweep.dir=many"])
    checkpoint = str(base / "stopped" / "checkpoints" / "last.ckpt")
    places = {"text": str(text), "run": str(base / "stopped"), "multirun": str(base / "many"), "checkpoint": checkpoint}
    return {**places, "name": "gpu"}


def run_train(patch: pytest.MonkeyPatch, words: list[str]) -> None:
    """``python train.py WORDS`` in this process."""
    patch.setattr(sys, "argv", [str(ROOT / "train.py"), *words])
    try:
        # As the main module, since Hydra looks for conf/ beside that.
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    finally:
        GlobalHydra.instance().clear()
        if wandb := sys.modules.get("wandb"):
            wandb.finish()  # or it writes its log at the end of the process, wherever that then stands


RUN_HERE = [c for c in TRAIN if not any(word.startswith(tuple(NOT_RUN)) for word in c.words)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", RUN_HERE, ids=names(RUN_HERE))
def test_a_command_of_train_py_runs(
    command: Command, folder: Path, workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(PAGES, folder)
    words = _filled(command.words[2:], workshop)
    multirun = [word for word in words if word.startswith("multirun=")]
    before = _steps(workshop)
    if any(word.startswith("resume=/") for word in words):
        # It has done all that it had to do. A word that is given twice counts as given last.
        words += [f"trainer.max_steps={before + 1}"]
    else:
        recipe = "digits" if multirun else next((w.split("=")[1] for w in words if w.startswith("recipe=")), "byte_lm")
        words = [word.split(",")[0] if word.startswith("seed=") else word for word in words] + TINY[recipe]
        words += ["seed=0", "optimizer.lr=1e-3"] if multirun and len(command.words) == 3 else []  # one of a whole list
    refused = "optimizer=adamw_torch" in words and "state=int8" in words
    if refused:
        with pytest.raises(SystemExit) as caught:
            run_train(monkeypatch, words)
        assert caught.value.code == 2
        return
    run_train(monkeypatch, words)
    assert list(folder.rglob("summary.json")) or _steps(workshop) == before + 1


def _steps(workshop: dict[str, str]) -> int:
    return json.loads((Path(workshop["run"]) / "summary.json").read_text())["global_step"]


def _filled(words: tuple[str, ...], workshop: dict[str, str]) -> list[str]:
    """Placeholders replaced by what is there, as a whole word, a value, or the folder at the beginning of either."""
    found = []
    for word in words:
        key, equals, value = word.rpartition("=")
        start, slash, rest = (value, "", "") if value in PLACEHOLDERS else value.partition("/")
        there = workshop[PLACEHOLDERS[start]] if start in PLACEHOLDERS and not key.startswith("hydra.") else start
        found.append(f"{key}{equals}{there}{slash}{rest}")
    return found


SCRIPTS_HERE = [c for c in SCRIPTS if not any(" ".join(c.words[1:]).startswith(start) for start in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.parametrize("command", SCRIPTS_HERE, ids=names(SCRIPTS_HERE))
def test_a_script_runs(
    command: Command, folder: Path, workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(PAGES, folder)
    name = Path(command.words[1]).stem
    given = command.words[: command.words.index(">")] if ">" in command.words else command.words
    words = _filled(given[2:], workshop)
    if name == "bench_step":  # its rows belong to the checkout
        words += ["--output", str(folder / "step.csv")]
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as for any script
    module = importlib.import_module(f"lightning_fuse.cli.{CLI[name][0]}" if name in CLI else f"scripts.{name}")
    assert module.main(words) in (None, 0)
