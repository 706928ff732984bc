"""Offline W&B runs as run folders: ``lightning-fuse import-wandb SOURCE --out FOLDER``.

SOURCE is a ``run-*.wandb`` file or a folder that holds some at any depth (``wandb``, ``runs``). Each run becomes a
folder ``FOLDER/NAME_ID`` with ``manifest.json``, ``metrics.csv``, ``steps.jsonl`` and ``summary.json``, which
``lightning-fuse compare`` reads like any other. Needs the wandb package (extra ``train``), no server and no account.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_fuse.reports.wandb_import import import_run
from lightning_fuse.reports.wandb_log import find_logs, read_wandb


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
    for log in logs:
        try:
            run = read_wandb(log)
            print(import_run(run, options.out / f"{run.name or 'run'}_{run.run_id}", source=str(log)))
        except ValueError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
