"""The command line from end to end: what is refused, what is written, what a multirun and other loggers do."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from lightning_fuse.run import Run, train
from tests.composing import CONF, ROOT, SMALL, composed

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def train_py(run_python: Callable[..., CompletedProcess[str]]) -> Command:
    """`python train.py WORDS` in an empty folder."""
    return lambda *words: run_python(str(ROOT / "train.py"), *words)


def only_run(folder: Path) -> Path:
    """The one run folder that a command has left."""
    (found,) = [path.parent for path in folder.glob("runs/**/manifest.json")]
    return found


def test_a_run_leaves_its_records(train_py: Command, tmp_path: Path) -> None:
    done = train_py("state=int8", "recipe.module.sample_bytes=8", *[w for w in SMALL if "sample" not in w])
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    assert folder.name.endswith("_byte_lm_adamw_fused_int8")
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == {
        *(".lock", "manifest.json", "steps.jsonl", "metrics.csv", "summary.json"),
        *("checkpoints/best.ckpt", "checkpoints/last.ckpt", ".hydra/config.yaml", ".hydra/overrides.yaml"),
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["state"]["format"] == "int8"
    assert manifest["data_hash"].startswith("sha256:")
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2]
    assert "A sample of 8 bytes:" in done.stdout
    assert "state bytes" in done.stdout
    assert done.stdout.index("A sample") < done.stdout.index("state bytes")  # the table comes last
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer=adamw_torch", "state=int8"), "use optimizer=adamw_fused, optimizer=adamw_bnb or state=fp32"),
        (("data.path=nowhere.txt",), "data.path=nowhere.txt: there is no such file"),
        (("optimizer.lr=nan",), "lr=nan"),
        (("+optimizer.fused=true",), "no argument 'fused'"),
        (("resume=nowhere",), "nowhere"),
        (("resume=auto",), "give run_folder=FOLDER"),
        (("run_folder=/proc/x",), "run_folder=/proc/x: nothing can be written there"),
        (("seed=1.5",), "seed=1.5 is a number with a point; give a whole number from 0"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    train_py: Command, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = train_py(*words, *SMALL)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer.betas=[0.9,1.0]",), "betas"),
        (("state=int8", "state.patterns={hed.*: fp32}"), "pattern 'hed.*' matches no parameter"),
        (("model.heads=3",), "model.heads=3"),
        (("schedule.warmup=1.5",), "schedule.warmup=1.5"),
        (("data.batch_size=100000",), "one batch is 100000"),
        (("recipe=digits", "model.width=7"), "model.width=7"),
        (("recipe=digits", "data.validation=0"), "data.validation=0"),
    ],
)
def test_a_bad_setting_is_refused_before_the_run(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    small = () if "recipe=digits" in words else SMALL
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra wraps what it instantiates
        Run(composed(*small, *words, run_folder=tmp_path / "run"), [])
    text = f"{caught.value} {caught.value.__cause__}"
    assert message in text
    assert not (tmp_path / "run").exists()


def test_a_text_shorter_than_one_context_is_refused(train_py: Command, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    done = train_py(f"data.path={text}")
    assert done.returncode == 2
    assert "has 9 bytes" in done.stderr
    assert list(tmp_path.iterdir()) == [text]


def test_an_own_text_is_trained_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefgh" * 400)
    words = [*SMALL, f"data.path={text}", "trainer.max_steps=60", "trainer.val_check_interval=60", "optimizer.lr=1e-2"]
    metrics = train(composed(*words, run_folder=tmp_path / "run"), words)
    assert metrics["val/loss"] < 1.0  # eight bytes in a circle are soon known
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / 0.6931472, rel=1e-5)
    assert metrics["train/tokens_per_s"] > 0


def test_sixteen_mixed_on_a_cpu_is_float16_with_a_loss_scale(tmp_path: Path) -> None:
    words = [*SMALL, "precision=16-mixed", "trainer.accelerator=cpu", "callbacks.fuse.init_loss_scale=1024"]
    run = Run(composed(*words, run_folder=tmp_path / "run"), words)
    seen = []
    run.module.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.fit()
    assert set(seen) == {torch.float16}
    rows = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [row["loss_scale_before"] for row in rows] == [1024.0, 1024.0]


def test_a_run_folder_of_ones_own_is_the_only_one(train_py: Command, tmp_path: Path) -> None:
    done = train_py("recipe=digits", "model.width=8", "trainer=debug", "logger=none", "run_folder=mine/first")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine" / "first" / "summary.json").is_file()


def test_a_multirun_trains_the_valid_pairs_and_names_the_others(train_py: Command, tmp_path: Path) -> None:
    done = train_py("-m", "optimizer=adamw_loop,adamw_fused", "state=fp32,int8", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("refused: ") == 1
    assert "refused: optimizer=adamw_loop state=int8" in done.stderr
    trained = sorted(path.parent.name for path in tmp_path.glob("runs/**/summary.json"))
    assert trained == ["0_byte_lm_adamw_loop_fp32", "2_byte_lm_adamw_fused_fp32", "3_byte_lm_adamw_fused_int8"]
    assert not list(tmp_path.glob("runs/**/1_*"))


def test_a_failure_inside_the_run_is_one_line_too(train_py: Command, tmp_path: Path) -> None:
    done = train_py(*SMALL, "optimizer.lr=1e30", "trainer.max_steps=40", "callbacks.fuse.max_consecutive_skips=3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "failed: " in done.stderr
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["status"] == "failed"


def test_an_old_run_is_not_written_over(tmp_path: Path) -> None:
    cfg = composed(*SMALL, run_folder=tmp_path / "run")
    train(cfg, [])
    with pytest.raises(ValueError, match="holds a run already; use resume="):
        train(composed(*SMALL, run_folder=tmp_path / "run"), [])


@pytest.mark.slow
def test_several_loggers_work_without_a_network(train_py: Command, tmp_path: Path) -> None:
    done = train_py(*SMALL, "logger=[csv,wandb,tensorboard]")
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert list(folder.glob("tensorboard/events.out.tfevents.*"))
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        assert any(row["step/grad_norm"] for row in csv.DictReader(file))


@pytest.mark.slow
def test_two_processes_train_as_one_run(train_py: Command, tmp_path: Path) -> None:
    done = train_py(*SMALL, "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "state=int8")
    assert done.returncode == 0, done.stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["updates"] == 2
    assert done.stdout.count("lightning_fuse run") == 1


def test_a_multirun_of_several_processes_is_refused(train_py: Command) -> None:
    done = train_py("-m", "seed=0,1", "strategy=ddp", "trainer.devices=2", *SMALL)
    assert done.stderr.count("refused: strategy=ddp") == 2


def test_help_names_every_group_and_word(train_py: Command) -> None:
    text = train_py("--help").stdout
    for path in CONF.glob("*/*.yaml"):
        assert path.parent.name in text
        assert path.stem in text, f"--help does not name {path.parent.name}={path.stem}"
    written = text.split("THE WORDS OF EACH GROUP")[0]  # the lists below are Hydra's
    assert max(len(line) for line in written.splitlines()) <= 120
