"""``lightning-fuse train WORDS``, and ``python train.py WORDS`` in a clone: composes the words and trains.

The shipped configuration is in ``lightning_fuse/conf``; ``--config-dir FOLDER`` adds own files to it. Modules of the
working directory can be imported, so a recipe of one's own needs no installation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch starts its threads. By default they spin while they wait for one another; where other processes share
# the cores that made the default job 4 to 7 times as slow. OMP_WAIT_POLICY=ACTIVE in the environment lets them spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from lightning_fuse.cli.words import check_words

CONF = Path(__file__).resolve().parents[1] / "conf"


def main(arguments: list[str] | None = None) -> None:
    """Trains what the words compose.

    Args:
        arguments: The words; None takes those of this process.

    Raises:
        SystemExit: With 2 if the words are refused, with 1 if the training failed; see ``run.main``.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    _job.argv = list(sys.argv)  # type: ignore[attr-defined]
    if arguments is not None:
        sys.argv[1:] = arguments  # Hydra reads them there
    options = get_args_parser().parse_args(sys.argv[1:])
    prints = options.help or options.hydra_help or options.shell_completion or options.experimental_rerun
    if not prints and "LOCAL_RANK" not in os.environ:  # a process that Lightning starts has words that were checked
        try:
            check_words(options.overrides, CONF, options.config_dir, options.multirun)
        except ValueError as error:
            if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
                raise
            print(f"refused: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_job)()


def _job(cfg: DictConfig) -> dict[str, float] | None:
    """Hands a composed configuration on; returns the run's last metrics, or None where it was refused."""
    sys.argv[:] = getattr(_job, "argv", sys.argv)  # Lightning starts further processes with the words as typed
    # Imported late, so that --help and a misspelt word answer at once.
    from lightning_fuse.run import main

    if not cfg.ledger:
        return main(cfg)
    from lightning_fuse.ledger.tables import show_run

    return main(cfg, before=show_run)


if __name__ == "__main__":
    main()
