"""Lightning callbacks: Fuse installs the step contract; the others watch, time, record and resume a run."""

from lightning_fuse.callbacks.exact_resume import ExactResume
from lightning_fuse.callbacks.fuse import Fuse
from lightning_fuse.callbacks.memory_timeline import MemoryTimeline
from lightning_fuse.callbacks.run_recorder import RunRecorder
from lightning_fuse.callbacks.step_monitor import StepMonitor
from lightning_fuse.callbacks.step_profile import StepProfile
from lightning_fuse.callbacks.time_to_target import TimeToTarget

__all__ = ["ExactResume", "Fuse", "MemoryTimeline", "RunRecorder", "StepMonitor", "StepProfile", "TimeToTarget"]
