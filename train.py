"""Trains a recipe: ``python train.py optimizer=adamw_fused state=int8``. ``python train.py --help`` explains it."""

from __future__ import annotations

from lightning_fuse.cli.train import main

if __name__ == "__main__":
    main()
