"""A run that is killed again and again: one process imports everything once and forks a child for each life.

``python tests/soak/lives.py FOLDER KILLS SEED`` trains a run to its end and another one that is killed so often at
random moments, and prints a report as JSON. A third of the kills are aimed at saves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import hydra
import torch

from lightning_fuse.records import read_step_rows
from lightning_fuse.run import Run
from tests.composing import ROOT

WORDS = (
    *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "model.dropout=0.1"),
    *("data.batch_size=4", "recipe.max_steps=260", "recipe.val_every=20", "callbacks.last.every=2", "state=int8"),
    *(
        "recipe.module.sample_bytes=0",
        "++trainer.limit_val_batches=1",
        "logger=none",
        "trainer.accumulate_grad_batches=2",
    ),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "recipe.target=4.5", "recipe.monitor=val/loss"),
)
STEPS_A_LIFE = 5  # at most
PATIENCE = 60.0  # seconds for a life to show a step
DOWNTIME = 0.05  # seconds between two lives, which no clock may count


def live(folder: Path) -> None:
    """One life of the run: the same command every time."""
    words = [*WORDS, "resume=auto", f"run_folder='{folder}'"]
    with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        Run(hydra.compose("config", words), words).fit()


def born(folder: Path) -> int:
    """Forks a life; it ends with 0 where the run is finished."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        live(folder)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def steps_of(folder: Path) -> int:
    """Rows so far; a torn one does not count."""
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def parts_of(folder: Path) -> set[tuple[str, int]]:
    """Files that are, or were when somebody was killed, in the middle of being written."""
    found = set()
    for path in (folder / "checkpoints").glob("*.part"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found.add((path.name, path.stat().st_ino))
    return found


def kill_sometime(child: int, folder: Path, draw: random.Random) -> bool:
    """Kills a life at a random moment; says whether a checkpoint was being written then."""
    begun, before, left = time.monotonic(), steps_of(folder), parts_of(folder)
    kind, wanted = draw.choice(("start", "steps", "steps", "save", "save")), draw.randint(1, STEPS_A_LIFE)
    first: int | None = None  # rows when this life began to write; a resume drops some first
    if kind == "start":
        time.sleep(draw.uniform(0.0, 0.4))
    while kind != "start" and time.monotonic() - begun < PATIENCE:
        now = steps_of(folder)
        first = now if first is None and now != before else first
        if first is not None and now - first >= wanted:
            if kind == "steps":
                time.sleep(draw.uniform(0.0, 0.02))
                break
            if parts_of(folder) - left:
                break
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            raise RuntimeError(f"a life ended by itself after {time.monotonic() - begun:.1f} s; see the log")
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bool(parts_of(folder) - left)


def main(base: Path, kills: int, seed: int) -> None:
    """Trains both runs and prints the report."""
    torch.set_num_threads(1)
    base.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    whole, killed = base / "whole", base / "killed"
    _, status = os.waitpid(born(whole), 0)
    alive, during_saves = 0.0, 0
    for _ in range(kills):
        begun = time.monotonic()
        during_saves += kill_sometime(born(killed), killed, draw)
        alive += time.monotonic() - begun
        time.sleep(DOWNTIME)
    begun = time.monotonic()
    _, last = os.waitpid(born(killed), 0)
    alive += time.monotonic() - begun
    rows = [row["global_step"] for row in read_step_rows(killed / "steps.jsonl")]
    print(
        json.dumps(
            {
                "codes": [os.waitstatus_to_exitcode(status), os.waitstatus_to_exitcode(last)],
                "kills": kills,
                "during_saves": during_saves,
                "rows": len(rows),
                "alive": alive,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
