"""Converts a checkpoint file to other state formats, to torch's own optimizer state, or to float32 weights alone.

    lightning-fuse convert IN OUT --state int8 --master split    to state of ours
    lightning-fuse convert IN OUT --to lightning                 a Trainer with torch's optimizer resumes
    lightning-fuse convert IN OUT --to torch                     for torch.optim's load_state_dict
    lightning-fuse convert IN OUT --weights-only fp32            for load_from_checkpoint

IN is a checkpoint of Lightning, with our state, torch's or bitsandbytes' in it, or a file that holds one optimizer's
state dict. It is read as tensors and plain data, never as code. OUT must not exist, and is complete or not there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fuse.plugins.checkpoint_conversion import TARGETS, Conversion, ConversionSpec, convert_file

ROWS = 30  # parameters to print before "and N more"


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path, metavar="IN")
    made.add_argument("target", type=Path, metavar="OUT")
    made.add_argument("--state", help="fp32, bf16, int8, int8_bf16, or patterns: 'embed.*=bf16,int8'")
    made.add_argument("--master", help="none, fp32, split, split8: master weights of 16-bit parameters")
    made.add_argument("--to", choices=TARGETS, default=TARGETS[0], help="whose state to write")
    made.add_argument("--weights-only", choices=["fp32"], help="write the weights and nothing else")
    made.add_argument("--optimizer", help="adamw, adam, sgd, lion: where the state does not tell")
    made.add_argument("--keep-nonfinite", action="store_true", help="keep NaN and infinite moments")
    return made


def patterns(text: str | None) -> str | list[str | tuple[str, str]] | None:
    """``'embed.*=bf16,int8'`` as a list of patterns and a default; a bare word as it is."""
    if text is None or "=" not in text:
        return text
    pairs = [entry.strip().rpartition("=") for entry in text.split(",")]
    return [(pattern, word) if pattern else word for pattern, _, word in pairs]


def table(result: Conversion) -> Table:
    """What was converted and what was lost."""
    shown = Table("parameter", "what happened", title="converted", title_justify="left")
    for name, note in result.rows[:ROWS]:
        shown.add_row(Text(name), Text(note))
    if len(result.rows) > ROWS:
        shown.add_row("…", f"and {len(result.rows) - ROWS} more")
    shown.caption = (
        f"{result.unchanged} kept bit for bit; {result.bytes_before:,} bytes before, {result.bytes_after:,} after"
    )
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    given = parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    try:
        spec = ConversionSpec(
            to=given.to,
            state=patterns(given.state),
            master=given.master,
            weights_only=given.weights_only is not None,
            optimizer=given.optimizer,
            nonfinite="keep" if given.keep_nonfinite else "refuse",
        )
        result = convert_file(given.source, given.target, spec)
    except (ValueError, OSError, TypeError) as error:
        errors.print(Text("not converted: ", "red") + Text(str(error)), soft_wrap=True)
        return 1
    console.print(table(result))
    console.print(Text(f"written: {given.target}"), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
