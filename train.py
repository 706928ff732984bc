"""Trains a recipe: ``python train.py optimizer=adamw_fused state=int8``. ``python train.py --help`` explains it."""

from __future__ import annotations

import os

import hydra
from omegaconf import DictConfig

# Before torch starts its threads. By default they spin while they wait for one another; where other processes share
# the cores that made the default job 4 to 7 times as slow. OMP_WAIT_POLICY=ACTIVE in the environment lets them spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> dict[str, float] | None:
    """Hands the composed configuration on; returns the run's last metrics, or None where it was refused."""
    # Imported late, so that --help and a misspelt word answer at once.
    from lightning_fuse.run import command

    if not cfg.ledger:
        return command(cfg)
    from lightning_fuse.reports.ledger_table import show_run

    return command(cfg, before=show_run)


if __name__ == "__main__":
    main()
