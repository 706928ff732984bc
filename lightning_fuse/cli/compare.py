"""Compares finished runs: baseline against candidates over several seeds, with a headline and a verdict in plain words.

    lightning-fuse compare runs/DAY/MULTIRUN                         all runs of a multirun
    lightning-fuse compare RUN RUN RUN --baseline optimizer=adamw_torch
    lightning-fuse compare MULTIRUN --assert-within 0.01             for CI: exit status 1 outside the band

Verdicts and a table go to the terminal; page.html, comparison.md, comparison.csv and PNG figures go into a folder.
Runs are read from their folders, with neither torch nor Lightning. The page says how band and verdicts are made.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from lightning_fuse.reports.compare import compare, leaves_band
from lightning_fuse.reports.groups import NotComparable
from lightning_fuse.reports.page import write_comparison
from lightning_fuse.reports.tables import print_comparison

SEEDS = "seeds"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: As typed; None takes the process's own.

    Returns:
        0; 1 where ``--assert-within`` does not hold, 2 where the runs cannot be compared as asked.
    """
    options = _parser().parse_args(arguments)
    half = None if options.assert_within in (None, SEEDS) else options.assert_within
    try:
        comparison = compare(
            options.runs,
            baseline=options.baseline,
            metric=options.metric,
            half=half,
            allow_different_data=options.allow_different_data,
        )
        print_comparison(comparison)
        folder = options.output or _default_folder(options.runs)
        written = write_comparison(comparison, folder, title=options.title, png=not options.no_png)
    except (NotComparable, FileNotFoundError, ValueError, ImportError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"written: {', '.join(path.name for path in written)} in {folder}")
    if options.assert_within is None:
        return 0
    outside = leaves_band(comparison)
    for reason in outside:
        print(f"outside the band: {reason}", file=sys.stderr)
    return 1 if outside else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN|FOLDER",
        help="run folders, folders that hold some, or comparison.csv of an earlier comparison",
    )
    parser.add_argument(
        "--baseline", nargs="+", action="extend", default=[], metavar="KEY=WORD",
        help="words that pick the baseline, such as optimizer=adamw_torch; by default torch's fused with fp32 state",
    )  # fmt: skip
    parser.add_argument("--metric", help="the quality; by default what the recipe monitors, else val/loss")
    parser.add_argument(
        "--assert-within", type=_band, metavar="BAND",
        help="exit with 1 if a candidate's final value leaves the band: a number in the metric's unit, on either side "
        "of the baseline's mean, or 'seeds' for the band of the baseline's own seeds",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write; by default comparison/ in FOLDER"
    )
    parser.add_argument("--title", help="heading of the page")
    parser.add_argument("--no-png", action="store_true", help="no PNG figures")
    parser.add_argument(
        "--allow-different-data", action="store_true",
        help="show runs of other recipes or data side by side, without verdicts on their losses",
    )  # fmt: skip
    return parser


def _band(text: str) -> float | str:
    if text == SEEDS:
        return text
    try:
        half = float(text)
    except ValueError:
        half = math.nan
    if not (math.isfinite(half) and half > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no band; give a number above 0, or '{SEEDS}'")
    return half


def _default_folder(runs: list[str]) -> Path:
    first = Path(runs[0])
    folder = (first if len(runs) == 1 and first.is_dir() else first.parent) / "comparison"
    # A link in a run folder from elsewhere may lead anywhere; only --output is followed.
    free = (folder.with_name(f"comparison-{number}") for number in range(2, 100))
    return next(path for path in (folder, *free) if not path.is_symlink() and (path.is_dir() or not path.exists()))


if __name__ == "__main__":
    sys.exit(main())
