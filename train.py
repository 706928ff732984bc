"""Trains a recipe: ``python train.py optimizer=adamw_fused state=int8``. ``python train.py --help`` explains it."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> dict[str, float] | None:
    """Hands the composed configuration on; returns the run's last metrics, or None where it was refused."""
    # Imported late, so that --help and a misspelt word answer at once.
    from lightning_fuse.run import command

    return command(cfg)


if __name__ == "__main__":
    main()
