"""Counts a run before it is started: ``lightning-fuse ledger`` from a clone. ``--help`` explains it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a source tree that is not installed, too

from lightning_fuse.cli.ledger import main

if __name__ == "__main__":
    sys.exit(main())
