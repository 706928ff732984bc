"""Words that cannot be composed are refused in one line, with exit status 2 and nothing left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fuse.cli.train import main
from lightning_fuse.cli.words import check_words
from tests.composing import CONF

# What was typed -> what the refusal says.
WRONG = {
    "optimizer=adamw_fussed": "did you mean 'adamw_fused'?",
    "recipe=digit": "did you mean 'digits'?",
    "model=tinny": "did you mean 'tiny'?",
    "state=int9": "did you mean 'int8'?",
    "multirun=digits_l": "did you mean 'digits_lr'?",
    "logger=[csv,wand]": "did you mean 'wandb'?",
    "hydra/launcher=paralel": "did you mean 'parallel'?",
    "optimiser=adamw_fused": "did you mean 'optimizer'?",
    "modle=tiny": "did you mean 'model'?",
    "seeed=1": "did you mean 'seed'?",
    "trainer.maxsteps=3": "did you mean 'trainer.max_steps'? (+trainer.maxsteps=…",
    "optimizer.lrr=1": "did you mean 'optimizer.lr'?",
    "lr=3": "did you mean 'optimizer.lr'?",
    "batch_size=3": "did you mean 'data.batch_size'?",
    "callbacks.fuze.window=sum": "did you mean 'callbacks.fuse.window'?",
    "state.pattern={a: b}": "did you mean 'state.patterns'?",
    "~trainer.foo": "unknown key 'trainer.foo'",
    "+trainer.max_steps=3": "leave the + out",
    "state": "give GROUP=WORD or KEY=VALUE",
    "data.path=it's": r"""'data.path='"'"'it\'"'"'s'"'"''""",
    "data.batch_size=[1,": "put a text with special characters in quotes",
    "seed=0,1": "add -m",
    "hydra.run.dirr=3": "--hydra-help",
    "hydra.run.dir=/proc/x": "hydra.run.dir=/proc/x: nothing can be written there",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_word_is_refused_with_the_closest_known_one(word: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        check_words([word], CONF, None, False)
    assert WRONG[word] in str(caught.value)
    assert word.lstrip("+~").split("=")[0].rstrip("]") in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer=adamw_torch,adamw_fussed", "seed=0,1,2"], "did you mean 'adamw_fused'?"),
        (["state=fp32,int8", "seed=0", "trainer.maxsteps=1,2"], "did you mean 'trainer.max_steps'?"),
    ],
)
def test_every_value_of_a_list_is_looked_at(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="did you mean") as caught:
        check_words(words, CONF, None, True)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "multirun"),
    [
        ([], False),
        ([], True),
        (["optimizer=adamw_torch,adamw_fused", "seed=range(3)"], True),
        (["recipe=glob(*)"], True),
        (["multirun=digits_lr", "optimizer.lr=1e-3,1e-2"], False),
        (["++trainer.max_steps=3", "~callbacks.best", "+trainer.max_time='00:01:00:00'"], False),
    ],
)
def test_right_words_pass(words: list[str], multirun: bool) -> None:
    check_words(words, CONF, None, multirun)


def test_own_words_are_found_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    odd = tmp_path / "my con'f, {x}=1"
    (odd / "model").mkdir(parents=True)
    (odd / "model" / "own.yaml").write_text("_target_: my.Net\n")
    check_words(["model=own"], CONF, str(odd), False)
    with pytest.raises(ValueError, match=r"model=owm: unknown word of model 'owm'; known: .*did you mean 'own'\?"):
        check_words(["model=owm"], CONF, str(odd), False)
    with pytest.raises(ValueError, match="there is no such folder"):
        check_words([], CONF, str(tmp_path / "nowhere"), False)


@pytest.mark.parametrize(
    "words",
    [["state=int9"], ["trainer.maxsteps=1"], ["-m", "state=fp32,int9"], ["--config-dir", "nowhere"], ["state"]],
)
def test_a_refused_command_ends_with_2_and_leaves_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("refused: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_explains_itself(run_python: Callable) -> None:
    helped, unknown = (run_python("-m", "lightning_fuse.cli.main", word) for word in ("--help", "compar"))
    assert helped.returncode == 0
    for command in ("train", "compare", "ledger", "convert", "import-wandb"):
        assert command in helped.stdout
    assert unknown.returncode == 2
    assert "did you mean 'compare'?" in unknown.stderr


def test_a_key_that_another_word_would_have_is_unknown() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'optimizer\.amsgrad'; known: optimizer\.betas, "):
        check_words(["optimizer=lion_fused", "optimizer.amsgrad=true"], CONF, None, False)
