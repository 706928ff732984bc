"""One run from a composed configuration: check, build, then train. Nothing is written before all of it is built."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.optim import Optimizer

from lightning_fuse.callbacks import RunRecorder
from lightning_fuse.callbacks.run_columns import RunColumns
from lightning_fuse.config import ConfigError, check, columns, optimizer_factory, resolved
from lightning_fuse.config_values import check_values
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.plugins import stock_precision
from lightning_fuse.plugins.atomic_checkpoint import AtomicCheckpointIO
from lightning_fuse.records import FileWriteError, RunFolder, is_locked, replace_file, write_error
from lightning_fuse.resume import AUTO, CONFIG_FOLDER, Start, check_checkpoint, find_start
from lightning_fuse.run_place import check_writable, forget_folder, resume_command, short_path

PARAMETER_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}  # of the others: float32
# What goes wrong because of what the user asked for, while a run is built.
USER_ERRORS = (
    ValueError,
    TypeError,
    RuntimeError,  # torch: no memory for such a model
    MemoryError,
    OSError,
    ImportError,
    HydraException,
    OmegaConfBaseException,
    MisconfigurationException,
)


class Run:
    """A run that is built and checked, and has written nothing yet.

    Args:
        cfg: Composed.
        overrides: The words that composed it.

    Attributes:
        cfg: The configuration; of a resumed run, the resumed one's with what was given now.
        trainer: Lightning's Trainer.
        module: The recipe.
        data: Its data.

    Raises:
        ConfigError: The configuration cannot run; see ``config.check`` and ``resume.find_start``.
        ValueError: A setting is refused by what it is for.
        FileNotFoundError: A file that the configuration names is not there.
    """

    def __init__(self, cfg: DictConfig, overrides: list[str]) -> None:
        check_values(cfg)
        _check_auto(cfg)
        self.start = find_start(cfg, overrides, _compose)
        self.cfg = self.start.cfg
        self.cfg.run_folder = str(short_path(Path(self.cfg.run_folder)))
        check(self.cfg)
        _check_folder(self.start)
        _quieten()
        L.seed_everything(self.cfg.seed, workers=True, verbose=False)
        self.data: L.LightningDataModule = instantiate(self.cfg.data)
        factory = optimizer_factory(self.cfg)
        recipe = instantiate(self.cfg.recipe.module, _partial_=True)
        schedule = instantiate(self.cfg.schedule)
        self.module: L.LightningModule = recipe(instantiate(self.cfg.model), factory, schedule)
        data_hash = getattr(self.data, "data_hash", None)
        rehearsed = _dry_build(self.module, self.cfg)
        check_checkpoint(self.start, self.module, rehearsed, data_hash)
        # Our optimizers say what steps them; Fuse says it where a Trainer's own messages are not silenced.
        self._what = [f"lightning_fuse: {rehearsed.describe()}"] if isinstance(rehearsed, FusedOptimizer) else []
        elements = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        about = {"parameters": elements, "data_hash": data_hash}
        self.trainer = _trainer(self.cfg, {**columns(self.cfg), **about}, self.start.restart)

    @rank_zero_only
    def _begin(self) -> None:
        """Takes the run folder, then writes the configuration; the loser of two starts writes nothing."""
        recorder = next(found for found in self.trainer.callbacks if isinstance(found, RunRecorder))  # type: ignore[attr-defined]
        recorder.reserve(resumes=self.start.in_place)
        try:
            _write_config(self.cfg, self.start)
        except BaseException:
            recorder.release()
            raise

    def fit(self) -> dict[str, float]:
        """Trains.

        Returns:
            The last value of every logged metric.
        """
        self._begin()
        _say([*self.start.describe(), *self._what])
        with _own_wandb_run():
            self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.start.checkpoint, weights_only=True)
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # While all ranks are alive: an interpreter that ends with a process group may abort.
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        return metrics


def train(cfg: DictConfig, overrides: list[str] | None = None) -> dict[str, float]:
    """Checks a configuration, builds what it describes and trains it.

    Args:
        cfg: Composed; ``run_folder`` says where everything is written.
        overrides: The words that composed it, so that a resume can compose it again; None takes Hydra's.

    Returns:
        The last value of every logged metric.

    Raises:
        ConfigError: The configuration cannot run; nothing has been written then.
    """
    return Run(cfg, _typed() if overrides is None else overrides).fit()


def main(
    cfg: DictConfig, before: Callable[[dict[str, Any], L.LightningModule], None] | None = None
) -> dict[str, float] | None:
    """``train`` for the command line: what the user can mend is one line without a traceback.

    ``HYDRA_FULL_ERROR=1`` shows the traceback all the same.

    Args:
        cfg: As Hydra composed it.
        before: Called with the resolved configuration and the recipe before anything is written, on rank 0.

    Returns:
        The last value of every logged metric; None in a multirun for a combination that was refused, so that the others
        go on.

    Raises:
        SystemExit: With 2 if the configuration was refused, 1 if training failed for a reason that has a message of
            this package, 130 or 143 if it was interrupted by Ctrl-C or a SIGTERM.
    """
    hydras = Path(HydraConfig.get().runtime.output_dir)  # made already
    try:
        if _in_multirun() and cfg.strategy != "auto":
            raise ConfigError(
                f"strategy={cfg.strategy} starts this command again on every device, which a multirun (-m) "
                "cannot be; use strategy=auto, or one command per run"
            )
        run = Run(cfg, _typed())
        if before is not None:
            rank_zero_only(before)(resolved(run.cfg), run.module)
    except USER_ERRORS as error:
        forget_folder(hydras)
        _give_up(error, code=2)
        return None
    if hydras.resolve() != Path(run.cfg.run_folder).resolve():
        forget_folder(hydras)
    try:
        metrics = run.fit()
    except SystemExit as stopped:  # Lightning's answer to Ctrl-C, and a SIGTERM
        _say_how_to_go_on(run)
        raise SystemExit(143 if isinstance(stopped, SIGTERMException) else 130) from None
    except (ValueError, RuntimeError, NotImplementedError, FileWriteError) as error:
        # A multirun finishes its other jobs and then fails with this error.
        if not _is_ours(error) or _in_multirun():
            raise
        _give_up(error, code=1)
        return None
    if run.trainer.received_sigterm:
        _say_how_to_go_on(run)
        raise SystemExit(143)
    return metrics


def _trainer(cfg: DictConfig, shown: dict[str, Any], restart: bool) -> L.Trainer:
    """Lightning's Trainer with the callbacks, loggers and plugins of a configuration."""
    wanted = {name: entry for name, entry in cfg.callbacks.items() if entry is not None}
    if not cfg.trainer.enable_progress_bar:
        wanted.pop("progress", None)  # Lightning refuses a bar that it is told not to show
    callbacks: list[Callback] = [instantiate(entry) for entry in wanted.values()]
    callbacks += [RunColumns(shown), RunRecorder(Path(cfg.run_folder), resolved(cfg), restart=restart)]
    loggers: list[Logger] = [instantiate(entry) for entry in cfg.logger.values() if entry is not None]
    plugins: list[Any] = [AtomicCheckpointIO()]
    precision: dict[str, Any] = {"precision": str(cfg.precision)}
    if cfg.precision == "16-mixed" and _on_cpu(cfg.trainer.accelerator):
        # Lightning turns the word into bf16-mixed on a CPU; the plugin is real float16 with a real loss scale.
        precision = {}
        plugins.append(stock_precision("16-mixed", "cpu"))
    factory = instantiate(cfg.trainer, _partial_=True)
    return factory(
        callbacks=callbacks,
        logger=loggers or False,
        plugins=plugins,
        strategy=cfg.strategy,
        default_root_dir=cfg.run_folder,
        use_distributed_sampler=False,  # the recipes' loaders know their rank, and stay resumable
        **precision,
    )


def _on_cpu(accelerator: str) -> bool:
    if accelerator != "auto":
        return accelerator == "cpu"
    return not (torch.cuda.is_available() or torch.backends.mps.is_available())


def _dry_build(module: Any, cfg: DictConfig) -> Optimizer:
    """Builds optimizer and schedule once over parameters as they will be, so that they refuse before the run."""
    dtype = PARAMETER_DTYPES.get(str(cfg.precision), torch.float32)
    groups = module.optimizer_groups()
    for group in groups:
        group["params"] = [(name, torch.empty_like(p, dtype=dtype)) for name, p in group["params"]]
    optimizer: Optimizer = module.optimizer_factory(groups)
    # Ours chooses its kernel late; asking for it finds out now whether there is one.
    getattr(optimizer, "kernel_name", None)
    module.schedule_factory(optimizer, cfg.trainer.max_steps)
    return optimizer


def _check_folder(start: Start) -> None:
    """Refuses to write a new run over an old one, or beside another process."""
    folder = RunFolder(start.cfg.run_folder)
    if start.in_place and not getattr(rank_zero_only, "rank", 0) and is_locked(folder.path):
        raise ConfigError(
            f"resume={start.cfg.resume}: another process is training in that folder now; wait for its end, or start a "
            f"new run with resume={folder.checkpoints}/last.ckpt"
        )
    check_writable("run_folder", folder.path)
    if folder.manifest.exists() and not start.in_place and not start.restart:
        raise ConfigError(
            f"run folder {folder.path} holds a run already; use resume={folder.path} or another run_folder"
        )


def _check_auto(cfg: DictConfig) -> None:
    """``resume=auto`` looks into a folder that the next start has, too; one named by the time of the start is new."""
    if cfg.resume != AUTO or not HydraConfig.initialized() or not OmegaConf.is_interpolation(cfg, "run_folder"):
        return
    if not any(word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for word in HydraConfig.get().overrides.hydra):
        raise ConfigError("resume=auto without run_folder: a new folder holds no run; give run_folder=FOLDER, too")


def _compose(overrides: list[str]) -> DictConfig:
    name = HydraConfig.get().job.config_name if HydraConfig.initialized() else "config"
    return compose(name, overrides)


def _typed() -> list[str]:
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def _write_config(cfg: DictConfig, start: Start) -> None:
    """Keeps the configuration where Hydra would, resolved, and the words that compose it."""
    folder = Path(cfg.run_folder) / CONFIG_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    replace_file(folder / "config.yaml", [OmegaConf.to_yaml(cfg, resolve=True)])
    words = [word for word in start.overrides if not word.startswith(("resume=", "restore."))]
    replace_file(folder / "overrides.yaml", [OmegaConf.to_yaml(OmegaConf.create(words))])


@contextmanager
def _own_wandb_run() -> Iterator[None]:
    """Ends the W&B run that the fit began: the next run of this process would otherwise go on in it."""
    before = _wandb_run()
    code = 1
    try:
        yield
        code = 0
    finally:
        run = _wandb_run()
        if run is not None and run is not before:
            run.finish(exit_code=code)


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _quieten() -> None:
    """Silences Lightning's tips and the warnings that are no news in this setting."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        ".*does not have many workers.*",  # the data is in memory
        ".*GPU available but not used.*",
        ".*The dirpath has changed from.*",  # a new run from a checkpoint
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run's own
        ".*'set_vital' is deprecated.*",  # torchdata's own
        ".*treespec, LeafSpec.*",  # Lightning's own
    ):
        warnings.filterwarnings("ignore", message=text)


@rank_zero_only
def _say(lines: list[str]) -> None:
    for line in lines:
        print(line)


@rank_zero_only
def _say_how_to_go_on(run: Run) -> None:
    if RunFolder(run.cfg.run_folder).newest_checkpoint() is None:
        print("interrupted before the first checkpoint: start it again", file=sys.stderr)
    else:
        print(f"interrupted; to go on: {resume_command(run.cfg.run_folder)}", file=sys.stderr)


def _give_up(error: Exception, code: int) -> None:
    """Says what was wrong, and ends the process unless other runs are to come."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
        raise error
    print(f"{'refused' if code == 2 else 'failed'}: {_message(error)}", file=sys.stderr)
    # One of many: the others go on. W&B's agent gives a sweep up after three runs that end with an error.
    if not _in_multirun() and not (code == 2 and "WANDB_SWEEP_ID" in os.environ):
        raise SystemExit(code)


def _in_multirun() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _message(error: BaseException) -> str:
    """The error's own words; Hydra wraps those of what it instantiates."""
    if isinstance(error, HydraException) and error.__cause__ is not None:
        return _message(error.__cause__)
    return str(error).strip() or type(error).__name__


def _is_ours(error: Exception) -> bool:
    """Whether an error was raised by this package, whose messages are written for the user."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(__file__).parent in Path(frame.filename).parents
