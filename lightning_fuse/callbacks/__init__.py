"""Lightning callbacks: Fuse installs the step contract; the others watch, time, record and resume a run."""

from lightning_fuse.callbacks.fuse import Fuse

__all__ = ["Fuse"]
