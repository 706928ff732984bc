"""What a run leaves on disk. Read without torch; beyond the standard library only filelock.

======================  ==========================================================================
``run_folder.py``       the layout, and the checkpoint to resume from
``manifest.py``         ``manifest.json``: what ran
``step_rows.py``        ``steps.jsonl``: every optimizer step
``metrics_table.py``    ``metrics.csv``: every measurement
``summary.py``          ``summary.json``: how it ended
``strict_json.py``      JSON that every reader accepts
``checkpoint_file.py``  whether a checkpoint is whole
``folder_lock.py``      one writer per run folder
``atomic_file.py``          files that are old or new, never half
======================  ==========================================================================
"""

from lightning_fuse.records.atomic_file import FileWriteError, replace_file, write_error
from lightning_fuse.records.checkpoint_file import DamagedCheckpointError, verify
from lightning_fuse.records.folder_lock import FolderLock, is_locked
from lightning_fuse.records.manifest import (
    add_resume,
    build_manifest,
    config_changes,
    read_manifest,
    sha256_of,
    write_manifest,
)
from lightning_fuse.records.metrics_table import MetricsTable, read_metrics
from lightning_fuse.records.run_folder import Checkpoint, RunFolder, find_checkpoint
from lightning_fuse.records.step_rows import StepRows, last_step, read_step_rows
from lightning_fuse.records.summary import OptimizerSummary, RunSummary, read_summary, summary_table, write_summary

__all__ = [
    "Checkpoint",
    "DamagedCheckpointError",
    "FileWriteError",
    "FolderLock",
    "MetricsTable",
    "OptimizerSummary",
    "RunFolder",
    "RunSummary",
    "StepRows",
    "add_resume",
    "build_manifest",
    "config_changes",
    "find_checkpoint",
    "is_locked",
    "last_step",
    "read_manifest",
    "read_metrics",
    "read_step_rows",
    "read_summary",
    "replace_file",
    "sha256_of",
    "summary_table",
    "verify",
    "write_error",
    "write_manifest",
    "write_summary",
]
