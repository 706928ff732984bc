"""Composed configurations for tests: the words a user would type, and small settings that train in a blink."""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "lightning_fuse" / "conf"

# A GPT of a few thousand parameters, two updates, nothing but the run folder's records.
SMALL = (
    *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "data.batch_size=2"),
    *("recipe.module.sample_bytes=0", "trainer=debug", "trainer.limit_val_batches=1", "logger=none"),
)


def composed(*words: str, run_folder: Path | str = "unused") -> DictConfig:
    """What `python train.py WORDS` composes, with a run folder of the test's own."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", [*words, f"run_folder='{run_folder}'"])
