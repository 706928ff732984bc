"""Checks of a composed configuration, before anything is written or trained.

Every combination of optimizer, state, master, kernel and precision either trains or is refused here with one error that
names combinations that do train. The alternatives are searched for, not written down, so they are never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import AUTO, KERNELS
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.registry import unknown_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
# Whose optimizer a factory is, by the package it comes from.
FAMILIES = {"lightning_fuse": "fused", "torch": "torch", "bitsandbytes": "bnb"}
BNB_BITS = {"fp32": 32, "int8": 8}
MOST_ALTERNATIVES = 4  # in one message


class Refusal(ValueError):
    """A configuration that cannot run, or would ignore what was asked for.

    Attributes:
        alternatives: Overrides that work instead, each one or several words as typed on the command line.
    """

    def __init__(self, message: str, alternatives: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.alternatives = alternatives


@dataclass(frozen=True)
class Choice:
    """What decides whether a combination can train.

    Attributes:
        optimizer: The word.
        state: The word of the default state format.
        precision: Lightning's word.
        master: The word.
        kernel: The word.
        patterns: Whether formats are chosen by parameter name.
        momentum: Of SGD; None for other rules.
        family: "fused", "torch" or "bnb".
    """

    optimizer: str
    state: str
    precision: str
    master: str
    kernel: str
    patterns: bool
    momentum: float | None
    family: str

    @property
    def parameters(self) -> str:
        """The dtype of the parameters, as a word: fp32, bf16 or fp16."""
        return {"bf16-true": "bf16", "16-true": "fp16"}.get(self.precision, "fp32")


def check(cfg: DictConfig) -> None:
    """Refuses a configuration that cannot run as asked.

    Args:
        cfg: Composed, with its interpolations.

    Raises:
        Refusal: It cannot run, or a choice would be ignored; the message says what works.
    """
    _check_words(cfg)
    if "sweep" in cfg:
        raise Refusal("+sweep: these files are for W&B (wandb sweep FILE); use multirun=NAME here")
    choice = choice_of(cfg)
    found = obstacle(choice)
    if found is not None:
        given = " ".join(f"{_KEYS[name]}={_shown(getattr(choice, name))}" for name in found.involved)
        others = tuple(alternatives(choice))
        raise Refusal(f"{given}: {found.reason}; use {_listed(others)}", others)
    _check_recipe(cfg)
    _check_callbacks(cfg)
    if cfg.trainer.max_steps < 1:
        raise Refusal(f"trainer.max_steps={cfg.trainer.max_steps}: a run has at least 1 step; use trainer.max_steps=1")


def choice_of(cfg: DictConfig) -> Choice:
    """The part of a configuration that ``obstacle`` judges.

    Args:
        cfg: Composed.

    Returns:
        The choice.

    Raises:
        Refusal: The optimizer comes from a package that is not known here.
    """
    return Choice(
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


@dataclass(frozen=True)
class Obstacle:
    """Why a choice cannot train.

    Attributes:
        reason: In words, without what was given and without what works.
        involved: The fields of the choice that contradict each other.
    """

    reason: str
    involved: tuple[str, ...]


def obstacle(choice: Choice) -> Obstacle | None:
    """Why a combination cannot train as asked, or None where it can.

    Args:
        choice: The combination.

    Returns:
        The first obstacle.
    """
    if choice.family == "fused":
        return _obstacle_of_fused(choice)
    found = _obstacle_of_torch(choice) if choice.family == "torch" else _obstacle_of_bnb(choice)
    if found is not None:
        return found
    if choice.patterns:
        return Obstacle("only fused optimizers choose formats by name", ("optimizer", "patterns"))
    if choice.master != "none":
        return Obstacle("only fused optimizers keep master weights", ("optimizer", "master"))
    if choice.kernel != AUTO:
        return Obstacle("the kernel is a choice of fused optimizers only", ("optimizer", "kernel"))
    return None


def alternatives(choice: Choice) -> list[str]:
    """What works in place of a choice: as few changes as possible.

    Args:
        choice: One that cannot train.

    Returns:
        Overrides as typed on the command line, those that keep most first, at most ``MOST_ALTERNATIVES``.
    """
    options = _options(choice)
    for count in range(1, len(options) + 1):
        found = [
            " ".join(f"{_KEYS[name]}={_shown(getattr(other, name))}" for name in names)
            for names in combinations(options, count)
            for other in _changed(choice, options, names)
            if obstacle(other) is None
        ]
        if found:
            return found[:MOST_ALTERNATIVES]
    return []


def optimizer_factory(cfg: DictConfig) -> partial[Optimizer]:
    """The factory that ``optimizer`` names, with what follows from ``state``, ``master`` and ``kernel``.

    Args:
        cfg: Composed and checked.

    Returns:
        A partial that takes parameter groups.
    """
    from hydra.utils import instantiate

    settings = resolved(cfg.optimizer)
    family = choice_of(cfg).family
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
    found = {key: value for key, value in found.items() if not str(value).startswith(folder)}
    words = {"recipe": cfg.recipe.name, "optimizer": cfg.optimizer.name, "state": cfg.state.format}
    return {**words, **found}


def state_spec(cfg: DictConfig) -> StateSpec:
    """The ``state`` argument of a fused optimizer: a word, or (pattern, format) pairs and the default."""
    patterns = cfg.state.patterns or {}
    return [*((str(pattern), str(word)) for pattern, word in patterns.items()), str(cfg.state.format)]


# The name under which the user changes each field of a choice.
_KEYS = {
    "optimizer": "optimizer",
    "state": "state",
    "precision": "precision",
    "master": "master",
    "kernel": "kernel",
    "patterns": "state.patterns",
    "momentum": "optimizer.momentum",
}


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
        raise Refusal(f"optimizer._target_={target}: {error}; name a class that can be imported") from error
    if not fused:
        known = ", ".join(FAMILIES)
        raise Refusal(
            f"optimizer._target_={target}: what {package} keeps as state is not known here; known packages: {known}; "
            "derive the class from lightning_fuse.optim.FusedOptimizer"
        )
    return "fused"


def _obstacle_of_fused(choice: Choice) -> Obstacle | None:
    if choice.momentum == 0 and (choice.state != "fp32" or choice.patterns):
        return Obstacle("SGD without momentum keeps no state", ("optimizer", "momentum", "state"))
    if choice.master != "none" and choice.parameters == "fp32":
        return Obstacle("float32 parameters are their own master weights", ("precision", "master"))
    if choice.master in ("split", "split8") and choice.parameters == "fp16":
        return Obstacle("only a bfloat16 parameter is the upper half of a float32 weight", ("precision", "master"))
    return None


def _obstacle_of_torch(choice: Choice) -> Obstacle | None:
    if choice.parameters == "fp16":
        reason = "torch keeps state in the parameter's dtype, and in float16 small moments become 0"
        return Obstacle(reason, ("optimizer", "precision"))
    if choice.state != choice.parameters:
        reason = f"torch keeps state in the parameter's dtype, {choice.parameters} here"
        return Obstacle(reason, ("optimizer", "state", "precision"))
    return None


def _obstacle_of_bnb(choice: Choice) -> Obstacle | None:
    if find_spec("bitsandbytes") is None:
        return Obstacle("bitsandbytes is not installed (pip install bitsandbytes)", ("optimizer",))
    if choice.state not in BNB_BITS:
        return Obstacle("bitsandbytes keeps fp32 or its own int8 state", ("optimizer", "state"))
    return None


def _options(choice: Choice) -> dict[str, tuple[Any, ...]]:
    """Other values for every field that the user could change, in the order in which they are proposed."""
    rule = choice.optimizer.split("_")[0]
    optimizers = [(f"{rule}_fused", "fused")]
    if rule == "adamw":
        optimizers.append(("adamw_bnb", "bnb"))
    return {
        "optimizer": tuple(pair for pair in optimizers if pair[0] != choice.optimizer),
        "state": tuple(word for word in STATE_FORMATS if word != choice.state),
        "master": tuple(word for word in MASTERS if word != choice.master),
        "kernel": tuple(word for word in (AUTO, *KERNELS) if word != choice.kernel),
        "precision": tuple(word for word in PRECISIONS if word != choice.precision),
        "patterns": (False,) if choice.patterns else (),
        "momentum": (0.9,) if choice.momentum == 0 else (),
    }


def _changed(choice: Choice, options: dict[str, tuple[Any, ...]], names: tuple[str, ...]) -> Iterator[Choice]:
    """The choice with every combination of other values in the given fields."""
    for values in product(*(options[name] for name in names)):
        changes = dict(zip(names, values, strict=True))
        if "optimizer" in changes:
            changes["optimizer"], changes["family"] = changes["optimizer"]
        yield replace(choice, **changes)


def _check_words(cfg: DictConfig) -> None:
    """Words that Hydra cannot check, because they are values of a key that a group's file sets."""
    formats = [cfg.state.format, *(cfg.state.patterns or {}).values()]
    for kind, words, known in (
        ("state format", formats, STATE_FORMATS),
        ("master weight format", [cfg.master], MASTERS),
        ("kernel", [cfg.kernel], (AUTO, *KERNELS)),
        ("precision", [str(cfg.precision)], PRECISIONS),
    ):
        for word in words:
            if word not in known:
                raise Refusal(unknown_name(kind, word, known))


def _check_recipe(cfg: DictConfig) -> None:
    """Model and data must be those that the recipe's module understands."""
    for group in ("model", "data"):
        wanted, given = cfg.recipe.requires[group], cfg[group]._target_
        if wanted.target != given:
            words = tuple(f"{group}={word}" for word in wanted.words)
            raise Refusal(f"recipe={cfg.recipe.name} cannot use {group} {given}; use {_listed(words)}", words)


def _check_callbacks(cfg: DictConfig) -> None:
    """The step contract must be there, and the settings of its loss scale need a loss scale."""
    fuse = cfg.callbacks.get("fuse")
    if fuse is None:
        raise Refusal("callbacks.fuse=null: every run needs the step contract; use callbacks=default")
    if cfg.precision in ("16-mixed", "16-true"):
        return
    for key in ("init_loss_scale", "growth_interval"):
        if fuse.get(key) is not None:
            other = "precision=16-mixed"
            message = f"callbacks.fuse.{key} has no effect: precision={cfg.precision} has no loss scale; use {other}"
            raise Refusal(message, (other,))


def _with(factory: partial[Optimizer], **more: Any) -> partial[Optimizer]:
    """A factory with more keywords, all of them readable: recipes look for ``weight_decay`` among them."""
    # functools merges a partial of a partial only where the inner one is of its own kind; Hydra's is not.
    return partial(factory, **factory.keywords, **more)


def _shown(value: Any) -> str:
    if value is False:
        return "null"
    return "{…}" if value is True else str(value)


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


assert set(_KEYS) == {field.name for field in fields(Choice)} - {"family"}
