"""``lightning-fuse COMMAND …``: one word chooses the command, the rest is its own.

Each command is a module with ``main(arguments) -> exit status``; it is imported when it is asked for, so that none pays
for what another needs.
"""

from __future__ import annotations

import sys
from importlib import import_module

from lightning_fuse import __version__
from lightning_fuse.registry import unknown_name

# The word -> its module in this folder, and what it does.
COMMANDS = {
    "train": ("train", "trains a recipe: lightning-fuse train optimizer=adamw_fused state=int8"),
    "compare": ("compare", "compares finished runs over their seeds, and writes a page"),
    "ledger": ("ledger", "counts the memory and traffic of a run before it is started"),
    "convert": ("convert", "converts a checkpoint to other state formats, or to torch's"),
    "sweep": ("sweep", "prints a list of runs (multirun=NAME) as a W&B sweep"),
    "import-wandb": ("import_wandb", "makes run folders of offline W&B runs"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words behind the program's name; None takes those of this process.

    Returns:
        The exit status: the command's own, or 2 for a word that is no command.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help"):
        print("usage: lightning-fuse COMMAND …\n")
        for word, (_, purpose) in COMMANDS.items():
            print(f"  {word:<14}{purpose}")
        print("\nlightning-fuse COMMAND --help explains a command. --version prints the version.")
        return 0
    if words[0] == "--version":
        print(f"lightning_fuse {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"refused: {unknown_name('command', words[0], COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = import_module(f"lightning_fuse.cli.{COMMANDS[words[0]][0]}")
        return int(module.main(words[1:]) or 0)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "lightning_fuse":
            raise
        print(f"refused: {words[0]} needs {error.name}; pip install 'lightning_fuse[train]'", file=sys.stderr)
        return 2
    except BrokenPipeError:  # … | head
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
