"""Offline W&B runs as run folders: ``lightning-fuse import-wandb SOURCE --out FOLDER``.

SOURCE is a ``run-*.wandb`` file or a folder that holds some at any depth (``wandb``, ``runs``). Each run becomes a
folder ``FOLDER/NAME_ID`` with ``manifest.json``, ``metrics.csv``, ``steps.jsonl`` and ``summary.json``, which
``lightning-fuse compare`` reads like any other. Needs the wandb package (extra ``train``), no server and no account.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

from lightning_fuse.reports.wandb_import import import_run
from lightning_fuse.reports.wandb_log import WandbRun, find_logs, read_wandb

STEP = "trainer/global_step"  # as Lightning's WandbLogger names it


def main(arguments: list[str] | None = None) -> int:
    """Imports every run that is found.

    Args:
        arguments: The command line's words; None takes those of this process.

    Returns:
        The exit code: 0, 1 if a run could not be read, 2 if there is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a run-*.wandb file, or a folder that holds some")
    parser.add_argument("--out", type=Path, default=Path("runs/wandb"), metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        logs = find_logs(options.source)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    found: dict[str, tuple[WandbRun, Path]] = {}
    for log in logs:  # in the order of their names, which begin with the time
        try:
            run = read_wandb(log)
        except Exception as error:  # a log is data: whatever is wrong with one, the others go on
            print(f"{log}: {error}", file=sys.stderr)
            failed = 1
            continue
        if run.run_id in found:  # the run was resumed: this log continues the one before
            run = joined(found[run.run_id][0], run)
        found[run.run_id] = run, log
    for run, log in found.values():
        try:
            print(import_run(run, options.out / folder_name(run), source=str(log)))
        except Exception as error:
            print(f"{log}: {error}", file=sys.stderr)
            failed = 1
    return failed


def joined(before: WandbRun, after: WandbRun) -> WandbRun:
    """One run of the two logs of a run that was resumed; what both have, because it was done again, is the later's.

    Args:
        before: The earlier log.
        after: The later one.

    Returns:
        The later log with the rows of the earlier up to where it goes on.
    """
    steps = [row[STEP] for row in after.history if isinstance(row.get(STEP), (int, float))]
    begin = min(steps, default=math.inf)
    kept = [row for row in before.history if not (isinstance(row.get(STEP), (int, float)) and row[STEP] >= begin)]
    return replace(after, history=[*kept, *after.history], started=before.started)


def folder_name(run: WandbRun) -> str:
    """A run's folder: its name and id, of which nothing can leave the folder that it is put into.

    Args:
        run: The run; both names come from its log.

    Returns:
        Letters, digits, ".", "_" and "-", not beginning with ".".
    """
    parts = (re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in (run.name or "run", run.run_id))
    return "_".join(parts).lstrip(".") or "run"


if __name__ == "__main__":
    raise SystemExit(main())
