"""The flagship comparison: every AdamW in every state it can keep, over several seeds, on the small recipes.

    python scripts/flagship.py --plan                 what would run, and about how long
    python scripts/flagship.py                        all of it, about half an hour on two idle cores
    python scripts/flagship.py --updates 40           the same in small, to see that it works

Runs go one after another, each in a process of its own, and seed by seed in an order that rotates, so that a machine
that warms up or slows down favours nobody. Stop it when you like: finished runs are kept in runs/flagship and not run
again, one that was cut short starts anew (a resumed run would be as good, but its clock would have paused).

The comparison of each recipe goes to benchmarks/flagship_RECIPE: page.html, comparison.md, comparison.csv, figures, and
flagship.json with hardware, versions and the verdicts, against torch's fused AdamW and against our own fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lightning_fuse.records import RunFolder, read_summary  # noqa: E402
from lightning_fuse.records.manifest import hardware, installed_versions  # noqa: E402
from lightning_fuse.reports.compare import compare  # noqa: E402
from lightning_fuse.reports.page import write_comparison  # noqa: E402
from lightning_fuse.reports.stats import Comparison  # noqa: E402
from lightning_fuse.reports.tables import print_comparison  # noqa: E402

OPTIMIZERS = ("adamw_loop", "adamw_foreach", "adamw_torch", "adamw_bnb", "adamw_fused")
STATES = ("fp32", "bf16", "int8")
BASELINES = (("optimizer=adamw_torch", "state=fp32"), ("optimizer=adamw_fused", "state=fp32"))
VALIDATIONS = 10  # per run
# Updates of each recipe, and seconds of one run on two idle cores: what is not training, and an update.
UPDATES = {"byte_lm": 750, "digits": 400}
SECONDS = {"byte_lm": (14.0, 0.067), "digits": (7.0, 0.010)}
BUSY = 0.6  # load average above which others are at work before we begin


@dataclass(frozen=True)
class Job:
    """One run: the words of its command, and the folder that it fills."""

    recipe: str
    optimizer: str
    state: str
    seed: int
    updates: int
    folder: Path

    @property
    def name(self) -> str:
        """What progress calls it."""
        return f"{self.recipe} {self.optimizer} {self.state} seed {self.seed}"

    def words(self) -> list[str]:
        """The arguments of train.py: the recipe as it is, without what only costs time."""
        return [
            *(f"recipe={self.recipe}", f"optimizer={self.optimizer}", f"state={self.state}", f"seed={self.seed}"),
            *(f"trainer.max_steps={self.updates}", f"recipe.val_every={max(1, self.updates // VALIDATIONS)}"),
            *(f"run_folder={self.folder}", f"callbacks.last.every={max(1, self.updates // 3)}", "logger=none"),
            *(["recipe.module.sample_bytes=0"] if self.recipe == "byte_lm" else []),
        ]

    def finished(self) -> bool:
        """Whether its folder holds a run that came to its end."""
        try:
            return read_summary(RunFolder(self.folder).summary).status == "finished"
        except (FileNotFoundError, ValueError):
            return False


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing, then compares.

    Args:
        arguments: As typed; None takes the process's own.

    Returns:
        0, or 1 where a run failed.
    """
    options = _parser().parse_args(arguments)
    pairs = [(optimizer, state) for optimizer in OPTIMIZERS for state in STATES if _valid(optimizer, state)]
    jobs = [
        job for recipe in options.recipes for job in plan(recipe, pairs, options.seeds, options.updates, options.runs)
    ]
    todo = [job for job in jobs if not job.finished()]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} finished already; about {_minutes(todo)} min on two idle cores")
    if options.plan:
        print("\n".join(f"{'done' if job.finished() else 'todo'}  {job.name}  {job.updates} updates" for job in jobs))
        return 0
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): losses will be right, times will mean little")
    failed = _run_all(todo)
    for recipe in options.recipes:
        folder = options.output / f"flagship_{recipe}"
        _compare(recipe, [job.folder for job in jobs if job.recipe == recipe and job.finished()], folder, load)
    for job in failed:
        print(f"failed: {job.name}; see {_log(job)}", file=sys.stderr)
    return 1 if failed else 0


def plan(recipe: str, pairs: list[tuple[str, str]], seeds: list[int], updates: int | None, runs: Path) -> Iterator[Job]:
    """The runs of one recipe, seed by seed, each seed beginning with another pair.

    Args:
        recipe: The word.
        pairs: Optimizer and state.
        seeds: The seeds.
        updates: Of each run; None takes the recipe's own of ``UPDATES``.
        runs: Where run folders go, in a folder per recipe and length.

    Yields:
        The jobs, in the order in which they run.
    """
    count = UPDATES[recipe] if updates is None else updates
    for turn, seed in enumerate(seeds):
        start = turn * len(pairs) // max(1, len(seeds))
        for optimizer, state in (*pairs[start:], *pairs[:start]):
            folder = runs / f"{recipe}_{count}" / f"{optimizer}_{state}_seed{seed}"
            yield Job(recipe, optimizer, state, seed, count, folder)


def _run_all(todo: list[Job]) -> list[Job]:
    failed = []
    began = time.perf_counter()
    for number, job in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {job.name} ", end="", flush=True)
        start = time.perf_counter()
        if _run(job):
            summary = read_summary(RunFolder(job.folder).summary)
            best = summary.best or {}
            left = (time.perf_counter() - began) / number * (len(todo) - number)
            value = f"{best.get('metric')} {best['value']:.4f}" if best.get("value") is not None else "no validation"
            print(f"{time.perf_counter() - start:.0f} s, best {value}; about {left / 60:.0f} min left", flush=True)
        else:
            failed.append(job)
            print("failed", flush=True)
    return failed


def _run(job: Job) -> bool:
    """Trains in a process of its own; what an earlier try left is removed first."""
    shutil.rmtree(job.folder, ignore_errors=True)
    _log(job).parent.mkdir(parents=True, exist_ok=True)
    with _log(job).open("w", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "train.py"), *job.words()]
        process = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    return process.returncode == 0 and job.finished()


def _log(job: Job) -> Path:
    return job.folder.parent / "logs" / f"{job.folder.name}.txt"


def _compare(recipe: str, folders: list[Path], output: Path, load: float) -> None:
    if not folders:
        return
    comparisons: dict[str, Comparison] = {}
    for words in BASELINES:
        comparison = compare(folders, baseline=words)
        comparisons[comparison.baseline.label] = comparison
    first = next(iter(comparisons.values()))
    print_comparison(first)
    write_comparison(first, output, title=f"{recipe}: AdamW in every state, {len(first.runs)} runs")
    record = {"recipe": recipe, **_circumstances(first, load)}
    record["verdicts"] = {
        label: [finding.text for finding in comparison.findings] for label, comparison in comparisons.items()
    }
    (output / "flagship.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {output}")


def _circumstances(comparison: Comparison, load: float) -> dict[str, Any]:
    started = sorted(run.provenance.get("started", "") for run in comparison.runs)
    revisions = {run.provenance.get("revision", "") for run in comparison.runs}
    return {
        "command": "python scripts/flagship.py",
        "updates": max(run.updates or 0 for run in comparison.runs),
        "runs": len(comparison.runs),
        "first_started": started[0],
        "last_started": started[-1],
        "load_before": round(load, 2),
        "revisions": sorted(revisions),
        "hardware": hardware(),
        "versions": installed_versions(),
    }


def _valid(optimizer: str, state: str) -> bool:
    """Asks the configuration's own check, so that the table of pairs is written down in one place only."""
    from hydra import compose, initialize_config_dir

    from lightning_fuse.config import ConfigError, check

    with redirect_stderr(sys.stdout), initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        try:
            check(compose("config", [f"optimizer={optimizer}", f"state={state}", "run_folder=nowhere"]))
        except ConfigError:
            return False
    return True


def _minutes(jobs: list[Job]) -> int:
    return round(sum(SECONDS[job.recipe][0] + SECONDS[job.recipe][1] * job.updates for job in jobs) / 60)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipes", nargs="+", choices=sorted(UPDATES), default=sorted(UPDATES), help="which ones")
    parser.add_argument("--updates", type=_positive, help=f"of every run; by default {UPDATES}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="by default 0 1 2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "flagship", help="where run folders go")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", help="where the comparisons go")
    parser.add_argument("--plan", action="store_true", help="list the runs and stop")
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of updates; give at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
