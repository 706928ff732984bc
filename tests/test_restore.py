"""What a resume takes from a checkpoint: all of it or the weights, whose settings win, in which format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fuse.config import ConfigError
from lightning_fuse.records import FolderLock, is_locked
from lightning_fuse.resume import check_checkpoint, find_start
from lightning_fuse.run import Run, train
from tests.composing import SMALL, composed
from tests.resuming import checkpoint, compose_here, equal, go_on, resumed, rows


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path / "first"
    train(composed(*SMALL, run_folder=folder), list(SMALL))
    return folder


RESTORED = [
    (("restore.mode=half",), "unknown restore.mode 'half'; known: full, weights_only"),
    (("restore.override=[optimizer.lrr]",), "unknown setting in restore.override 'optimizer.lrr'; known: optimizer."),
    (("restore.override=[optimizer.lr]",), "restore.override=[optimizer.lr] has no effect: it is 0.002"),
    (("restore.mode=weights_only", "restore.override=[optimizer.lr]"), "restore.override has no effect with restore"),
    (("restore.formats=convert", "callbacks.exact_resume=null"), "is done by callbacks.exact_resume, which is null"),
    (("restore.formats=maybe",), "unknown value of formats 'maybe'; known: convert, refuse"),
    (("optimizer.lr=1",), "or let it win with restore.override=[optimizer.lr]"),
]


@pytest.mark.parametrize(("words", "message"), RESTORED)
def test_what_a_resume_cannot_restore_is_refused(
    finished: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=4", *words)
    assert message in str(caught.value)


def test_restore_without_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"restore\.override has no effect without resume"):
        Run(composed(*SMALL, "restore.override=[optimizer.lr]", run_folder=tmp_path / "run"), [])


def test_an_overridden_lr_wins_and_its_schedule_goes_on(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten times the lr, at the same place of the same curve; weight decay as in the checkpoint."""
    words = (f"resume='{finished}'", "trainer.max_steps=4", "optimizer.lr=0.02", "restore.override=[optimizer.lr]")
    begun = resumed(finished, tmp_path, *words)
    assert begun.in_place
    capsys.readouterr()
    run = go_on(begun, words, finished)
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert "trainer.max_steps: checkpoint 2, configured 4; the configuration wins" in shown
    assert "lr: checkpoint 0.002, configured 0.02; the configuration wins" in shown
    groups = run.trainer.optimizers[0].param_groups
    assert [group["initial_lr"] for group in groups] == [0.02, 0.02]
    whole = tmp_path / "whole"
    train(composed(*SMALL, "trainer.max_steps=4", "optimizer.lr=0.02", run_folder=whole), [])
    expected = checkpoint(whole)["optimizer_states"][0]["param_groups"][0]["lr"]
    assert groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    # Said once: the next resume needs no override, and remembers the lr.
    again = resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=6")
    assert again.cfg.optimizer.lr == 0.02
    assert list(again.cfg.restore.override) == []


def test_weights_only_begins_a_new_run_with_them(finished: Path, tmp_path: Path) -> None:
    words = (f"resume='{finished}'", "restore.mode=weights_only", "optimizer.lr=0.0", "schedule=constant")
    begun = resumed(finished, tmp_path, *words)
    assert not begun.in_place
    assert begun.weights_only
    go_on(begun, words, tmp_path / "new")
    first, second = checkpoint(finished), checkpoint(tmp_path / "new")
    assert equal(first["state_dict"], second["state_dict"])  # at lr 0 they stay
    assert [row["global_step"] for row in rows(tmp_path / "new")] == [1, 2]
    state = second["optimizer_states"][0]["state"]
    assert {float(held["step"]) for held in state.values()} == {2.0}


def test_state_is_converted_where_that_is_asked_for(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"resume='{finished}'", "trainer.max_steps=4", "state=int8", "restore.formats=convert")
    run = go_on(resumed(finished, tmp_path, *words), words, finished)
    assert "int8" in run.trainer.optimizers[0].formats().values()
    shown = capsys.readouterr().out
    assert "state.format: checkpoint fp32, configured int8; the configuration wins" in shown
    assert "converted" in shown
    assert [row["update"] for row in rows(finished)] == [1, 2, 3, 4]


def test_auto_starts_goes_on_and_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (*SMALL, "+trainer.limit_train_batches=1.0", "resume=auto")

    def begin(*more: str) -> Any:
        all_words = [*words, *more]
        return find_start(composed(*all_words, run_folder=folder), all_words, compose_here(folder))

    begun = begin()
    assert (begun.checkpoint, begun.restart) == (None, False)
    go_on(begun, words, folder)
    begun = begin("trainer.max_steps=4")
    assert (begun.in_place, begun.global_step) == (True, 2)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()  # a run that was killed before its first checkpoint
    begun = begin()
    assert (begun.checkpoint, begun.restart) == (None, True)
    go_on(begun, words, folder)
    assert [row["global_step"] for row in rows(folder)] == [1, 2]
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="holds damaged checkpoints only"):
        begin()


def test_two_processes_do_not_train_in_one_folder(finished: Path, tmp_path: Path) -> None:
    lock = FolderLock(finished)
    assert lock.take()
    begun = resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=4")
    with pytest.raises(ConfigError, match="another process is training in that folder now; wait for its end"):
        go_on(begun, (f"resume='{finished}'", "trainer.max_steps=4"), finished)
    lock.release()
    assert not is_locked(finished)


def test_other_data_or_another_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    begun = resumed(finished, tmp_path, f"resume='{finished}'", "trainer.max_steps=4")
    module = torch.nn.Linear(1, 1)
    with pytest.raises(
        ConfigError, match=r"this run was trained on other data \(sha256:.*, now sha256:other\); put them"
    ):
        check_checkpoint(begun, module, None, "sha256:other")
    begun.cfg.recipe.name = "digits"
    with pytest.raises(
        ConfigError, match=r"is of recipe=byte_lm, this run is one of recipe=digits; use recipe=byte_lm"
    ):
        check_checkpoint(begun, module, None)


def test_the_cost_of_checkpoints_is_in_the_summary(finished: Path, tmp_path: Path) -> None:
    cost = json.loads((finished / "summary.json").read_text())["checkpoints"]
    assert cost["bytes"] == (finished / "checkpoints" / "last.ckpt").stat().st_size
    assert cost["saves"] == 2  # best and last
    assert cost["save_seconds"] > 0
    assert cost["load_bytes"] is None
    words = (f"resume='{finished}'", "trainer.max_steps=4")
    go_on(resumed(finished, tmp_path, *words), words, finished)
    cost = json.loads((finished / "summary.json").read_text())["checkpoints"]
    assert cost["load_bytes"] > 10_000
    assert cost["load_seconds"] > 0


def test_as_many_best_checkpoints_stay_as_are_asked_for(tmp_path: Path) -> None:
    words = (*SMALL, "trainer.max_steps=6", "trainer.val_check_interval=1", "keep_best=2", "keep_last=1")
    train(composed(*words, run_folder=tmp_path), list(words))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[-1] == "last.ckpt"
    assert len(names) == 3
    assert all(name.startswith("best-") for name in names[:2])


HOSTILE = [
    "+callbacks.extra={_target_: builtins.exec, _args_: ['raise SystemExit(7)']}",
    "+callbacks.extra._target_=torch.hub.load",
    "callbacks.monitor._target_=os.system",
    "++logger.more={inner: [{_target_: subprocess.run, args: [true]}]}",
    "+model.layers={_target_: torch.load, f: weights.pt}",
]


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("how", ["folder", "file", "weights alone"])
def test_words_of_a_run_folder_build_nothing_of_their_own(finished: Path, tmp_path: Path, word: str, how: str) -> None:
    """A folder from elsewhere is data: a target that only it names is refused before anything is imported."""
    words = finished / ".hydra" / "overrides.yaml"
    words.write_text(words.read_text(encoding="utf-8") + f'- "{word}"\n', encoding="utf-8")
    resume = finished if how == "folder" else finished / "checkpoints" / "last.ckpt"
    given = [f"resume='{resume}'", "trainer.max_steps=4"]
    given += ["restore.mode=weights_only"] if how == "weights alone" else []
    with pytest.raises(ConfigError, match=r"asks to build .*_target_='.*', which no configuration file here names"):
        resumed(finished, tmp_path, *given)


def test_a_target_that_is_given_now_is_built(finished: Path, tmp_path: Path) -> None:
    words = finished / ".hydra" / "overrides.yaml"
    mine = "+callbacks.extra={_target_: lightning.pytorch.callbacks.Timer}"
    words.write_text(words.read_text(encoding="utf-8") + f'- "{mine}"\n', encoding="utf-8")
    given = (f"resume='{finished / 'checkpoints' / 'last.ckpt'}'", "trainer.max_steps=4", "restore.mode=weights_only")
    with pytest.raises(ConfigError, match=r"callbacks\.extra\._target_"):
        resumed(finished, tmp_path, *given)
    assert resumed(finished, tmp_path, *given, mine).cfg.callbacks.extra["_target_"].endswith("Timer")


def test_another_file_of_a_group_is_no_foreign_target(tmp_path: Path) -> None:
    """optimizer=sgd_fused builds another class than the default, and a file here names it."""
    words = (*SMALL, "optimizer=sgd_fused")
    folder = tmp_path / "sgd"
    train(composed(*words, run_folder=folder), list(words))
    begun = resumed(folder, tmp_path, f"resume='{folder}'", "trainer.max_steps=4")
    assert begun.cfg.optimizer["_target_"].endswith("FusedSGD")
