"""Where a run begins: at the beginning, or at a checkpoint.

``resume=FOLDER`` goes on with the run in that folder, in the same folder: it is the same run, so what it computes may
not change, only how and how long. ``resume=FILE`` starts a new run, in a new folder, from that checkpoint; whatever the
checkpoint fits may change.

``resume=auto`` goes on with the run in ``run_folder``, or starts it: one command for a job that is killed and started
again.

Either way the configuration is the one the run was started with, plus what is given now: a resume needs no repetition.
``restore`` says what is taken from the checkpoint: everything (``restore.mode=full``) or the weights alone, which
starts a new run; settings of the optimizer that the configuration shall decide (``restore.override=[optimizer.lr]``);
state in another format (``restore.formats=convert``). What differs is listed, with who wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from lightning_fuse.callbacks.exact_resume import MODES
from lightning_fuse.callbacks.resume_settings import Difference
from lightning_fuse.config import ConfigError, resolved
from lightning_fuse.optim import FusedOptimizer, LoadOptions
from lightning_fuse.plugins.atomic_checkpoint import read_checkpoint
from lightning_fuse.records import Checkpoint, RunFolder, find_checkpoint, read_summary
from lightning_fuse.registry import unknown_name
from lightning_fuse.run_place import hydra_quoted
from lightning_fuse.trusted_targets import check_targets

CONFIG_FOLDER = ".hydra"  # folder of a run's configuration, as Hydra names it
CONFIG = f"{CONFIG_FOLDER}/config.yaml"
OVERRIDES = f"{CONFIG_FOLDER}/overrides.yaml"
# What Lightning writes into every checkpoint, and a resume needs.
CHECKPOINT_KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")
# Keys that a run may change when it goes on: how it is executed, watched and ended. All others decide what it computes.
FREE = (
    *("restore", "keep_last", "keep_best", "callbacks.exact_resume"),
    *("kernel", "strategy", "resume", "run_folder", "logger", "ledger", "data.num_workers"),
    *(
        f"callbacks.{name}"
        for name in ("fuse.max_updates", "monitor", "target", "progress", "best", "last", "profile", "memory")
    ),
    *("recipe.target", "recipe.max_steps", "recipe.module.sample_bytes"),
    *(f"trainer.{key}" for key in ("max_steps", "accelerator", "devices", "enable_progress_bar", "log_every_n_steps")),
)

# Of those, what nobody wants to be told: where the run lies and what was said about this very resume.
UNTOLD = ("restore", "resume", "run_folder", "callbacks.exact_resume", "callbacks.best", "callbacks.last", "logger")
AUTO = "auto"
# Of an optimizer's configuration: not numbers, or such that decide which state there is.
FIXED_KEYS = ("name", "_target_", "_partial_", "foreach", "fused", "amsgrad", "min_8bit_size")
FULL, WEIGHTS_ONLY = MODES
# What state in another format may differ in.
FORMAT_KEYS = ("state", "master")

Composer = Callable[[list[str]], DictConfig]


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        cfg: Its configuration.
        overrides: The words that compose it.
        checkpoint: What it loads; None begins at the beginning.
        global_step: Optimizer steps of the checkpoint.
        in_place: Whether it goes on in the folder of the run that it resumes.
        weights_only: Whether nothing but weights is loaded.
        restart: Whether it begins anew in the folder of a run that ended before its first checkpoint.
        differences: Settings that the checkpoint's run had otherwise.
    """

    cfg: DictConfig
    overrides: list[str]
    checkpoint: Path | None = None
    global_step: int = 0
    in_place: bool = False
    weights_only: bool = False
    restart: bool = False
    differences: list[Difference] = field(default_factory=list)

    def describe(self) -> list[str]:
        """What is resumed and what differs, as lines for people; none where nothing is resumed."""
        if self.checkpoint is None:
            return []
        taken = "its weights alone" if self.weights_only else f"step {self.global_step}"
        return [f"resuming from {self.checkpoint}, {taken}", *(f"  {found}" for found in self.differences)]


def find_start(cfg: DictConfig, overrides: list[str], compose: Composer) -> Start:
    """Follows ``resume``.

    Args:
        cfg: As composed from the command line.
        overrides: The words of the command line.
        compose: Composes a configuration from words.

    Returns:
        Where the run begins, with the configuration of the run that it resumes plus what was given now.

    Raises:
        ConfigError: There is no complete checkpoint there, it is not one of Lightning's, the run in that folder is
            another one than the one asked for, or it is finished.
    """
    _check_restore(cfg)
    if cfg.resume is None:
        return Start(cfg, overrides)
    given, restart = _given(cfg)
    if given is None:
        return Start(cfg, overrides, restart=restart)
    try:
        found = find_checkpoint(given)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"resume: {error}") from error
    weights_only = cfg.restore.mode == WEIGHTS_ONLY
    in_place = found.path != given and not weights_only
    folder = given if found.path != given else found.run_folder
    if folder is None or not (folder / OVERRIDES).is_file():
        if in_place:
            raise ConfigError(f"resume={given}: it lacks {OVERRIDES}; give a run folder or a checkpoint")
        return _alone(cfg, overrides, found, weights_only)
    words = _joined([str(word) for word in OmegaConf.load(folder / OVERRIDES)], overrides)
    here = [f"resume={hydra_quoted(str(given))}"]
    here += [word for word in overrides if _is_about_resume(word) and "restore" in word]
    if in_place:
        here.append(f"run_folder={hydra_quoted(str(given.resolve()))}")
    combined = [word for word in words if not _is_about_resume(word)]
    resumed = compose(combined + here)
    check_targets(resumed, cfg, folder)
    differing = _check_same(folder, resumed, in_place, weights_only)
    step = found.global_step
    return Start(resumed, combined, found.path, step, in_place, weights_only, differences=differing)


def _given(cfg: DictConfig) -> tuple[Path | None, bool]:
    """What ``resume`` names, None for a start; and whether records of a run without a checkpoint lie there."""
    if cfg.resume != AUTO:
        return Path(cfg.resume), False
    folder = RunFolder(cfg.run_folder)
    if folder.newest_checkpoint() is not None:
        return folder.path, False
    broken = folder.checkpoint_files()
    if broken:
        raise ConfigError(
            f"resume=auto: {folder.path} holds damaged checkpoints only ({', '.join(path.name for path in broken)}); "
            "put a complete one there, or name another run_folder"
        )
    return None, folder.manifest.exists()


def _alone(cfg: DictConfig, overrides: list[str], found: Checkpoint, weights_only: bool) -> Start:
    """A checkpoint that lies in no run folder: its own configuration, where it holds one, is only compared."""
    return Start(cfg, overrides, found.path, found.global_step, weights_only=weights_only)


def _check_restore(cfg: DictConfig) -> None:
    """Refuses settings of ``restore`` that are unknown or would have no effect."""
    restore = cfg.restore
    if restore.mode not in MODES:
        raise ConfigError(unknown_name("restore.mode", restore.mode, MODES))
    LoadOptions(formats=restore.formats)
    asked = [key for key, default in (("mode", FULL), ("formats", "refuse")) if restore[key] != default]
    asked += ["override"] if restore.override else []
    if asked and cfg.resume is None:
        raise ConfigError(f"restore.{asked[0]} has no effect without resume; give resume=PATH or leave it out")
    if asked and cfg.callbacks.get("exact_resume") is None:
        raise ConfigError(f"restore.{asked[0]} is done by callbacks.exact_resume, which is null; use callbacks=default")
    if restore.mode == WEIGHTS_ONLY and len(asked) > 1:
        raise ConfigError(f"restore.{asked[1]} has no effect with restore.mode=weights_only; leave it out")
    known = [f"optimizer.{key}" for key in cfg.optimizer if key not in FIXED_KEYS]
    for key in restore.override:
        if key not in known:
            raise ConfigError(unknown_name("setting in restore.override", key, known))


def check_checkpoint(start: Start, module: torch.nn.Module, optimizer: Optimizer, data_hash: str | None = None) -> None:
    """Refuses a checkpoint that cannot be gone on from, before the run writes anything.

    Args:
        start: Where the run begins.
        module: The module that will load it; left as it is.
        optimizer: One like the run's, which looks at its state to see whether it can load it.
        data_hash: That of the data; a run that goes on in its folder must have had the same.

    Raises:
        ConfigError: The file is damaged, is no checkpoint of Lightning's, is at the end of the run, or is of another
            recipe, model or data.
        ValueError: It is of another optimizer; from the optimizer.
    """
    path, steps, end = start.checkpoint, start.global_step, start.cfg.trainer.max_steps
    if path is None:
        return
    if 0 <= end <= steps and not start.weights_only and not _is_pending(start):
        raise ConfigError(
            f"resume={start.cfg.resume}: the run is finished, step {steps} of {end}; use trainer.max_steps={2 * steps} "
            "to go on"
        )
    try:
        contents = read_checkpoint(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume: {error}") from error
    missing = [key for key in CHECKPOINT_KEYS[: 1 if start.weights_only else None] if key not in contents]
    if missing:
        raise ConfigError(f"{path} is not a Lightning checkpoint, it lacks {', '.join(missing)}; give one of a run")
    _check_recipe(path, contents, start.cfg)
    _check_data(path, contents, start, data_hash)
    _check_model(path, contents["state_dict"], module.state_dict())
    if start.weights_only:
        return
    state = contents["optimizer_states"][0]
    if isinstance(optimizer, FusedOptimizer):
        optimizer.plan_load(state, _load_options(start.cfg))
    else:
        optimizer.load_state_dict(state)


def _is_pending(start: Start) -> bool:
    """Whether the run that is resumed was stopped after its last step, before its summary was written."""
    summary = RunFolder(start.cfg.run_folder).summary
    return start.in_place and summary.is_file() and read_summary(summary).status != "finished"


def _load_options(cfg: DictConfig) -> LoadOptions:
    """What the run's optimizer will be told; one that steps on NaN gradients may go on with NaN moments."""
    stepping = OmegaConf.select(cfg, "callbacks.fuse.on_nonfinite") == "step"
    return LoadOptions(formats=cfg.restore.formats, nonfinite="keep" if stepping else "refuse")


def differences(old: DictConfig, new: DictConfig, free: Iterable[str] = FREE) -> list[tuple[str, Any, Any]]:
    """Keys with different values, save those that a resumed run may change.

    Args:
        old: One configuration, resolved.
        new: Another.
        free: Keys that may differ, with all below them.

    Returns:
        (key, old value, new value); None stands for a missing key.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = sorted(before.keys() | after.keys())
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not _is_under(key, free)
    ]


def _check_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses weights of other names or shapes."""
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (saved, wanted)]
    names = [name for name in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]
    if names:
        given, needed = (side.get(names[0], "nothing") for side in shapes)
        raise ConfigError(
            f"{path} is of another model: {len(names)} weights differ, first {names[0]}, {given} there and {needed} "
            "here; leave model as the checkpoint's run had it"
        )


def _check_recipe(path: Path, contents: Mapping[str, Any], cfg: DictConfig) -> None:
    config = contents.get("lightning_fuse", {}).get("config") or {}
    recipe = config.get("recipe", {}).get("name") if isinstance(config, dict) else None
    if recipe not in (None, cfg.recipe.name):
        raise ConfigError(
            f"{path} is of recipe={recipe}, this run is one of recipe={cfg.recipe.name}; use recipe={recipe}"
        )


def _check_data(path: Path, contents: Mapping[str, Any], start: Start, now: str | None) -> None:
    """Other data is refused where the same run goes on, and listed where a new one begins."""
    saved = contents.get("lightning_fuse", {}).get("data_hash")
    if None in (saved, now) or saved == now:
        return
    if start.in_place:
        raise ConfigError(
            f"resume={start.cfg.resume}: this run was trained on other data ({saved}, now {now}); put them back, or "
            f"start a new run from it with resume={path}"
        )
    start.differences.append(Difference("data_hash", saved, now, "configuration"))


def _check_same(folder: Path, cfg: DictConfig, in_place: bool, weights_only: bool) -> list[Difference]:
    """Refuses settings that the run had otherwise: all that compute; of a new run, those that the checkpoint holds.

    Returns:
        Those that may differ, but for the optimizer's, which are compared when it is loaded.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"resume={folder}: it lacks {CONFIG}; give another run folder or checkpoint")
    old = OmegaConf.load(path)
    assert isinstance(old, DictConfig)
    changed = differences(old, cfg)
    _check_override(cfg, [key for key, _, _ in changed])
    allowed = list(cfg.restore.override) + (list(FORMAT_KEYS) if cfg.restore.formats == "convert" else [])
    refused = [] if weights_only else [entry for entry in changed if not _is_under(entry[0], allowed)]
    if not in_place:
        # An optimizer that takes over another one's state may have settings that the other lacks.
        refused = [(key, was, now) for key, was, now in refused if _in_checkpoint(key) and None not in (was, now)]
        if _rule(old) != _rule(cfg):
            refused = []  # the optimizer will refuse that state, for a better reason
    if refused:
        listed = ", ".join(f"{key}={was} (now {now})" for key, was, now in refused)
        advice = f", or start a new run from it with resume={folder}/checkpoints/last.ckpt" if in_place else ""
        if all(_in_checkpoint(key) for key, _, _ in refused):
            advice += f", or let it win with restore.override=[{','.join(key for key, _, _ in refused)}]"
        reason = "this run was started with" if in_place else "the checkpoint's own values win, and they are"
        raise ConfigError(f"resume={cfg.resume}: {reason} {listed}; leave that as it was{advice}")
    return [
        Difference(key, was, now, "configuration")
        for key, was, now in differences(old, cfg, free=UNTOLD)
        if weights_only or not _in_checkpoint(key)
    ]


def _check_override(cfg: DictConfig, changed: list[str]) -> None:
    """Refuses to override what is the same on both sides."""
    for key in cfg.restore.override:
        if not _is_under_any(key, changed):
            raise ConfigError(
                f"restore.override=[{key}] has no effect: it is {OmegaConf.select(cfg, key)} in the checkpoint's run, "
                f"too; give {key}=VALUE, or leave it out"
            )


def _is_under(key: str, prefixes: Iterable[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _is_under_any(prefix: str, keys: Iterable[str]) -> bool:
    return any(_is_under(key, (prefix,)) for key in keys)


def _rule(cfg: DictConfig) -> str:
    return str(cfg.optimizer.name).split("_")[0]


def _in_checkpoint(key: str) -> bool:
    return key.startswith("optimizer.") and key not in ("optimizer.name", "optimizer._target_")


def _joined(old: list[str], new: list[str]) -> list[str]:
    """The words of a run and those of now; what is added or taken away by both is so once, as it is said now."""
    again = {(word[0], word.split("=")[0]) for word in new if word.startswith(("+", "~"))}
    return [word for word in old if (word[0], word.split("=")[0]) not in again] + new


def _is_about_resume(word: str) -> bool:
    """Whether a word of the command line is about one resume, and not about the run."""
    return word.lstrip("+~").startswith(("resume=", "restore."))


def _leaves(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            yield prefix, value

    yield from walk("", resolved(cfg))
