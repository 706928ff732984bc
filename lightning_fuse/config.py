"""Checks of a composed configuration, before anything is written or trained.

Every value has a type and a range (``config_values``), and every combination of optimizer, state, master, kernel and
precision either trains or is refused with others that do (``combinations``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_fuse.combinations import (
    BNB_BITS,
    KEYS,
    PRECISIONS,
    RunOptions,
    alternatives,
    as_typed,
    find_conflict,
)
from lightning_fuse.config_values import check_values
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import AUTO, KERNELS
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.registry import unknown_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

STRATEGIES = ("auto", "ddp")
# Whose optimizer a factory is, by the package it comes from.
FAMILIES = {"lightning_fuse": "fused", "torch": "torch", "bitsandbytes": "bnb"}


class ConfigError(ValueError):
    """A configuration that cannot run, or would ignore what was asked for.

    Attributes:
        alternatives: Overrides that work instead, each one or several words as typed on the command line.
    """

    def __init__(self, message: str, alternatives: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.alternatives = alternatives


def check(cfg: DictConfig) -> None:
    """Refuses a configuration that cannot run as asked.

    Args:
        cfg: Composed, with its interpolations.

    Raises:
        ConfigError: It cannot run, or a choice would be ignored; the message says what works.
    """
    try:
        check_values(cfg)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_words(cfg)
    options = run_options(cfg)
    found = find_conflict(options)
    if found is not None:
        given = " ".join(f"{KEYS[name]}={as_typed(getattr(options, name))}" for name in found.involved)
        others = tuple(alternatives(options))
        raise ConfigError(f"{given}: {found.reason}; use {_listed(others)}", others)
    _check_recipe(cfg)
    _check_callbacks(cfg)


def optimizer_factory(cfg: DictConfig) -> partial[Optimizer]:
    """The factory that ``optimizer`` names, with what follows from ``state``, ``master`` and ``kernel``.

    Args:
        cfg: Composed and checked.

    Returns:
        A partial that takes parameter groups.
    """
    from hydra.utils import instantiate

    settings = resolved(cfg.optimizer)
    family = run_options(cfg).family
    settings.pop("name")
    factory: partial[Optimizer] = instantiate(settings, _convert_="all")
    if family == "fused":
        return _with(factory, state=state_spec(cfg), master=cfg.master, kernel=cfg.kernel)
    if family == "bnb":
        return _with(factory, optim_bits=BNB_BITS[cfg.state.format])
    return factory


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """A configuration as plain data, interpolations resolved."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def columns(cfg: DictConfig) -> dict[str, Any]:
    """What decides a run, one level deep: the columns of a table of runs.

    Args:
        cfg: Composed.

    Returns:
        The words under their groups' names (``optimizer``, ``state``, ``recipe``) and every single setting under the
        dotted key that a user types. How a run is logged and where files are written are left out.
    """
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        # A table with names as keys, such as state.patterns, is one value.
        if isinstance(value, dict) and value and all("." not in str(key) and "*" not in str(key) for key in value):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        else:
            found[prefix] = value

    for key, value in resolved(cfg).items():
        if key not in ("logger", "run_folder", "resume"):
            walk(key, value)
    folder = str(cfg.run_folder)
    found = {
        key: value
        for key, value in found.items()
        if not str(value).startswith(folder) and key.rpartition(".")[2] not in ("_target_", "_partial_")
    }
    words = {"recipe": cfg.recipe.name, "optimizer": cfg.optimizer.name, "state": cfg.state.format}
    return {**words, **found}


def state_spec(cfg: DictConfig) -> StateSpec:
    """The ``state`` argument of a fused optimizer: a word, or (pattern, format) pairs and the default."""
    patterns = cfg.state.patterns or {}
    return [*((str(pattern), str(word)) for pattern, word in patterns.items()), str(cfg.state.format)]


def run_options(cfg: DictConfig) -> RunOptions:
    """The part of a configuration that ``find_conflict`` judges.

    Args:
        cfg: Composed.

    Returns:
        The options.

    Raises:
        ConfigError: The optimizer comes from a package that is not known here.
    """
    return RunOptions(
        optimizer=cfg.optimizer.name,
        state=cfg.state.format,
        precision=str(cfg.precision),
        master=cfg.master,
        kernel=cfg.kernel,
        patterns=bool(cfg.state.patterns),
        # LARS keeps its buffer whatever the momentum.
        momentum=cfg.optimizer.get("momentum") if str(cfg.optimizer.name).startswith("sgd") else None,
        family=_family(str(cfg.optimizer._target_)),
    )


def _family(target: str) -> str:
    """Whose optimizer a factory is. One of another package counts as ours where it is a ``FusedOptimizer``."""
    from hydra.utils import get_class

    from lightning_fuse.optim import FusedOptimizer

    package = target.split(".")[0]
    if package in FAMILIES:
        return FAMILIES[package]
    try:
        fused = issubclass(get_class(target), FusedOptimizer)
    except Exception as error:
        raise ConfigError(f"optimizer._target_={target}: {error}; name a class that can be imported") from error
    if not fused:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"optimizer._target_={target}: what {package} keeps as state is not known here; known packages: {known}; "
            "derive the class from lightning_fuse.optim.FusedOptimizer"
        )
    return "fused"


def _check_words(cfg: DictConfig) -> None:
    """Words of the package's own tables, which files from outside may have added to."""
    formats = {f"state.patterns.{pattern}": word for pattern, word in (cfg.state.patterns or {}).items()}
    for kind, words, known in (
        ("state format", {"state.format": cfg.state.format, **formats}, STATE_FORMATS),
        ("master weight format", {"master": cfg.master}, MASTERS),
        ("kernel", {"kernel": cfg.kernel}, (AUTO, *KERNELS)),
        ("precision", {"precision": str(cfg.precision)}, PRECISIONS),
        ("strategy", {"strategy": cfg.strategy}, STRATEGIES),
    ):
        for key, word in words.items():
            if word not in known:
                raise ConfigError(f"{key}={word}: {unknown_name(kind, word, known)}")


def _check_recipe(cfg: DictConfig) -> None:
    """Model and data must be those that the recipe's module understands."""
    for group, wanted in (cfg.recipe.get("requires") or {}).items():
        given = cfg[group]._target_
        if wanted.target != given:
            words = tuple(f"{group}={word}" for word in wanted.words)
            raise ConfigError(f"recipe={cfg.recipe.name} cannot use {group} {given}; use {_listed(words)}", words)


def _check_callbacks(cfg: DictConfig) -> None:
    """The step contract must be there, and the settings of its loss scale need a loss scale."""
    fuse = cfg.callbacks.get("fuse")
    if fuse is None:
        raise ConfigError("callbacks.fuse=null: every run needs the step contract; use callbacks=default")
    if cfg.precision in ("16-mixed", "16-true"):
        return
    for key in ("init_loss_scale", "growth_interval"):
        if fuse.get(key) is not None:
            other = "precision=16-mixed"
            message = f"callbacks.fuse.{key} has no effect: precision={cfg.precision} has no loss scale; use {other}"
            raise ConfigError(message, (other,))


def _with(factory: partial[Optimizer], **more: Any) -> partial[Optimizer]:
    """A factory with more keywords, all of them readable: recipes look for ``weight_decay`` among them."""
    # functools merges a partial of a partial only where the inner one is of its own kind; Hydra's is not.
    return partial(factory, **factory.keywords, **more)


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
