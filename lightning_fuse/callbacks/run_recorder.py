"""RunRecorder: writes what happened into the run folder, and a table of it on the screen at the end.

``manifest.json`` when the fit starts, a row in ``steps.jsonl`` per optimizer step, a row in ``metrics.csv`` per log
step, validation and epoch, ``summary.json`` at the end, also where that is an interruption or an error. A resumed run
goes on in the same files: rows after its checkpoint are dropped first, so nothing appears twice. Only rank 0 writes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fuse.callbacks.run_clocks import RunClocks
from lightning_fuse.callbacks.run_result import (
    BestValue,
    checkpoint_cost,
    checkpoint_ms,
    column,
    is_finished,
    logged_names,
    logged_numbers,
    median,
    optimizer_share,
    peak_gpu_bytes,
    peak_memory_bytes,
    show_table,
    summarize_optimizers,
    target_record,
    target_records,
)
from lightning_fuse.callbacks.step_monitor import is_turn
from lightning_fuse.records import (
    FolderLock,
    MetricsTable,
    RunFolder,
    RunSummary,
    StepRows,
    add_resume,
    build_manifest,
    read_metrics,
    read_step_rows,
    summary_table,
    write_manifest,
    write_summary,
)
from lightning_fuse.records.strict_json import plain
from lightning_fuse.step import StepOutcome

TOKENS_PER_S = "train/tokens_per_s"


class RunRecorder(Callback):
    """Records a run in a folder.

    Args:
        run_folder: The folder; made if missing. It must be new, or that of the run that is resumed.
        config: The resolved configuration, for the manifest. ``seed`` in it is the run's seed, ``optimizer.name`` the
            optimizer's word.
        data_hash: Hash of the data; None asks the datamodule for an attribute ``data_hash``.
        best_metric: The validation metric whose best value is reported; None takes that of the first checkpoint
            callback that monitors one, or of TimeToTarget.
        mode: "min" or "max", for ``best_metric``.
        table: Print the summary as a table at the end.
        restart: Begin anew in a folder of a run that ended before its first checkpoint.

    Raises:
        ValueError: On fit, if the folder holds another run.
        RuntimeError: On fit, if another process is writing into the folder.
    """

    def __init__(
        self,
        run_folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        data_hash: str | None = None,
        best_metric: str | None = None,
        mode: str = "min",
        table: bool = True,
        restart: bool = False,
    ) -> None:
        self.folder = RunFolder(run_folder)
        self.config = dict(config or {})
        self.data_hash = data_hash
        self.table = table
        self.restart = restart
        self.clocks = RunClocks()
        self.best = BestValue(best_metric, mode)
        self.skips: dict[str, int] = {}
        self.last: dict[str, Any] = {"global_step": 0, "update": 0, "loss_scale_after": None}
        self._lock: FolderLock | None = None
        self._metrics_of_due: dict[str, float] = {}  # of a resumed log step that was not written yet
        self._ours = False  # whether the folder's manifest is of this process's run
        self._rows: StepRows | None = None
        self._metrics: MetricsTable | None = None
        self._due: dict[str, Any] | None = None  # a log step whose metrics are not complete yet
        self._step_ms = array("d")
        self._tokens_per_s = array("d")

    # Beginning.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Starts the clocks."""
        if stage == "fit":
            self.clocks.fit_begins()

    def reserve(self, resumes: bool) -> None:
        """Takes the run folder before anything is written into it; only rank 0's process may ask.

        Args:
            resumes: Whether a checkpoint is loaded; a new run needs a folder without one.

        Raises:
            ValueError: The folder holds another run.
            RuntimeError: Another process is writing into the folder.
        """
        self.folder.create()
        lock = self._lock or FolderLock(self.folder.path)
        if not lock.take():
            raise RuntimeError(
                f"run folder {self.folder.path}: another process is training in it now; wait for its end, or start a "
                f"new run from its checkpoint with resume={self.folder.checkpoints}/last.ckpt"
            )
        self._lock = lock
        self._anew = self.restart and not list(self.folder.checkpoints.glob("*.ckpt"))
        if not resumes and self.folder.manifest.exists() and not self._anew:
            self.release()
            raise ValueError(
                f"run folder {self.folder.path} already holds a run (manifest.json); "
                "resume it from its checkpoint, or name a new folder"
            )

    def release(self) -> None:
        """Lets others write into the folder; more than once is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the manifest."""
        self.best.watch(trainer)
        # Strategies that restore later than this do not yet say whether there is anything to restore.
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._take_folder(trainer)

    def _take_folder(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero or self._ours:
            return
        self.reserve(resumes=trainer.ckpt_path is not None)
        if self._anew or not self.folder.manifest.exists():
            write_manifest(self.folder.manifest, self._manifest(trainer))
        self._ours = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the tables at the step that the run goes on from."""
        self.clocks.train_begins()
        self._take_folder(trainer)
        if not trainer.is_global_zero:
            return
        self._open_tables(trainer)
        write_summary(self.folder.summary, self._summary(trainer, "running", None))

    def _open_tables(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if trainer.ckpt_path is not None:
            checkpoint = trainer.ckpt_path
            add_resume(self.folder.manifest, checkpoint=checkpoint, global_step=step, config=self.config)
        self._close()
        self._rows = StepRows(self.folder.steps, keep_through=step)
        self._metrics = MetricsTable(self.folder.metrics, keep_through=step)
        self._step_ms = array("d", column(read_step_rows(self.folder.steps), "optimizer_ms"))
        self._tokens_per_s = array("d", column(read_metrics(self.folder.metrics), TOKENS_PER_S))
        self._write_resumed_metrics()

    def _write_resumed_metrics(self) -> None:
        """Writes the last log step before the checkpoint, where the run was killed before it had done so."""
        if self._due is None:
            return
        place, self._due = self._due, None
        rows = read_metrics(self.folder.metrics)
        if not rows or rows[-1]["step"] < place["step"]:
            self._record(place, self._metrics_of_due)

    # Steps and metrics.

    def on_step_outcome(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outcome: StepOutcome) -> None:
        """Writes a step row."""
        self.last = outcome.record()
        if not outcome.applied:
            self.skips[outcome.reason] = self.skips.get(outcome.reason, 0) + 1
        if is_turn(trainer, outcome):
            self._due = self._place(trainer)
        if self._rows is None:
            return
        milliseconds = getattr(trainer.precision_plugin, "last_step_ms", None)
        if milliseconds is not None:
            self._step_ms.append(milliseconds)
        times = {"optimizer_ms": milliseconds, "train_seconds": round(self.clocks.train.seconds, 4)}
        self._rows.append({**self.last, **times})

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Writes the metrics of the last log step, those of its last hook included."""
        self._record_train_metrics(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Marks where a validation would begin."""
        self.clocks.batch_ends()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the metrics of training up to here; the validation clock runs."""
        if _in_training(trainer):
            self.clocks.validation_begins()
            self._record_train_metrics(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the metrics of a validation."""
        if not _in_training(trainer):
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        metrics = logged_numbers(trainer.callback_metrics, of=logged_names(loop, on_step=False))
        self.best.look(metrics, self.last["global_step"] or trainer.global_step)
        self._record(self._place(trainer), metrics)
        self.clocks.validation_ends()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the metrics that are averaged over an epoch."""
        self._record_train_metrics(trainer)
        metrics = logged_numbers(trainer.callback_metrics, of=logged_names(trainer.fit_loop.epoch_loop, on_step=False))
        if metrics:
            self._record(self._place(trainer), metrics)

    def _record_train_metrics(self, trainer: pl.Trainer) -> None:
        if self._due is None:
            return
        place, self._due = self._due, None
        metrics = logged_numbers(trainer.callback_metrics, of=logged_names(trainer.fit_loop.epoch_loop, on_step=True))
        if TOKENS_PER_S in metrics:
            self._tokens_per_s.append(metrics[TOKENS_PER_S])
        self._record(place, metrics)

    def _record(self, place: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.record(**place, metrics=metrics)

    def _place(self, trainer: pl.Trainer) -> dict[str, Any]:
        # Without the step contract no outcome is told, and Lightning's count is all there is.
        step = self.last["global_step"] or trainer.global_step
        update = self.last["update"] if self.last["global_step"] else step
        seconds = self.clocks.train.seconds
        return {"step": step, "update": update, "epoch": trainer.current_epoch, "train_seconds": seconds}

    # Ending.

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the last metrics; the clocks of training stand still."""
        self._record_train_metrics(trainer)
        self.clocks.train_ends()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes and shows the summary."""
        self._finish(trainer, "finished", None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes the summary of a run that was interrupted or failed."""
        interrupted = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        name, text = type(exception).__name__, str(exception).strip()
        self._finish(trainer, "interrupted" if interrupted else "failed", f"{name}: {text}" if text else name)

    def _finish(self, trainer: pl.Trainer, status: str, reason: str | None) -> None:
        self.clocks.fit_ends()
        try:
            self._write_end(trainer, status, reason)
        finally:
            self.release()

    def _write_end(self, trainer: pl.Trainer, status: str, reason: str | None) -> None:
        if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
            return
        if self._ours and self._rows is None and status == "finished":
            # A fit that had nothing to do leaves the summary of the one that had, unless that was killed before it.
            if is_finished(self.folder.summary):
                return
            self._open_tables(trainer)
        self._close()
        if not self._ours:
            return
        summary = self._summary(trainer, status, reason)
        newest = self.folder.newest_checkpoint()
        summary.last_checkpoint = None if newest is None else str(newest.path)
        write_summary(self.folder.summary, summary)
        if self.table and status != "failed":
            show_table("lightning_fuse run", summary_table(summary))

    def _summary(self, trainer: pl.Trainer, status: str, reason: str | None) -> RunSummary:
        word = self.config.get("optimizer")
        word = word.get("name") if isinstance(word, Mapping) else word
        place = self._place(trainer)
        return RunSummary(
            status=status,
            reason=reason,
            global_step=place["step"],
            planned_steps=trainer.max_steps if trainer.max_steps >= 0 else None,
            updates=place["update"],
            skips=dict(self.skips),
            epochs=trainer.current_epoch,
            loss_scale=self.last["loss_scale_after"],
            optimizers=summarize_optimizers(trainer, word),
            peak_memory_bytes=peak_memory_bytes(),
            peak_gpu_bytes=peak_gpu_bytes(trainer),
            tokens_per_s=median(self._tokens_per_s),
            optimizer_ms=median(self._step_ms),
            checkpoint_ms=checkpoint_ms(trainer),
            optimizer_share=optimizer_share(trainer, self._step_ms, self.clocks.train.seconds),
            train_seconds=self.clocks.train.seconds,
            validation_seconds=self.clocks.validation.seconds,
            wall_seconds=self.clocks.wall.seconds,
            target=target_record(trainer),
            targets=target_records(trainer),
            best=self.best.record(trainer),
            checkpoints=checkpoint_cost(trainer),
            run_folder=str(self.folder.path),
        )

    def _close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._rows = self._metrics = None

    def _hash(self, trainer: pl.Trainer) -> str | None:
        return self.data_hash or getattr(getattr(trainer, "datamodule", None), "data_hash", None)

    def _manifest(self, trainer: pl.Trainer) -> dict[str, Any]:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        cuda = {} if torch.version.cuda is None else {"cuda": torch.version.cuda}
        return build_manifest(
            config=self.config,
            command=sys.argv,
            seed=self.config.get("seed"),
            data_hash=self._hash(trainer),
            gpus=gpus,
            versions=cuda,
        )

    # Checkpoints.

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds what the run is, and the log step whose metrics are not written yet."""
        about = {"config": plain(self.config), "data_hash": self._hash(trainer), "run_folder": str(self.folder.path)}
        checkpoint["lightning_fuse"] = {**checkpoint.get("lightning_fuse", {}), **about}
        if self._due is not None:
            names = logged_names(trainer.fit_loop.epoch_loop, on_step=True)
            metrics = logged_numbers(trainer.callback_metrics, of=names)
            checkpoint["callbacks"][self.state_key]["due"] = {"place": dict(self._due), "metrics": metrics}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Says where the data are other ones."""
        saved, now = checkpoint.get("lightning_fuse", {}).get("data_hash"), self._hash(trainer)
        if trainer.state.fn == TrainerFn.FITTING and None not in (saved, now) and saved != now:
            rank_zero_warn(f"the data are not those of the checkpoint: {now}, the checkpoint's were {saved}")

    def state_dict(self) -> dict[str, Any]:
        """Counts, clocks and the best value."""
        return {
            "skips": dict(self.skips),
            "last": dict(self.last),
            "clocks": self.clocks.state_dict(),
            "best": self.best.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with them."""
        self.skips = {str(reason): int(count) for reason, count in state_dict["skips"].items()}
        self.last = dict(state_dict["last"])
        self.clocks.load_state_dict(state_dict["clocks"])
        self.best.load_state_dict(state_dict["best"])
        due = state_dict.get("due")
        if due is not None:
            self._due, self._metrics_of_due = dict(due["place"]), dict(due["metrics"])


def _in_training(trainer: pl.Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
