"""Taking over the optimizers that a module has configured: their groups, settings, names, hooks and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD
from lightning_fuse.optim.fused import parameter_names
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import EXECUTION_KEYS
from lightning_fuse.registry import unknown_name

FUSED: dict[str, type[FusedOptimizer]] = {"adamw_fused": FusedAdamW, "adam_fused": FusedAdam, "sgd_fused": FusedSGD}
SAME_RULE: dict[type[Optimizer], str] = {AdamW: "adamw_fused", Adam: "adam_fused", SGD: "sgd_fused"}
AUTO = "auto"
# Keys of torch's groups that our optimizers do not keep; "decoupled_weight_decay" has decided the class by then.
LEFT_BEHIND = {*EXECUTION_KEYS, "decoupled_weight_decay", "params", "param_names"}


@dataclass(frozen=True)
class Wish:
    """What the user wants the optimizers to be.

    Attributes:
        optimizer: "auto" for our optimizer of the same rule, a word of ``FUSED``, or None to keep what is there.
        state: State format; None leaves the default.
        master: Master weights; None leaves the default.
        kernel: Kernel; None leaves the default.
    """

    optimizer: str | None = AUTO
    state: StateSpec | None = None
    master: str | None = None
    kernel: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer != AUTO and self.optimizer not in FUSED:
            raise ValueError(unknown_name("optimizer", self.optimizer, [AUTO, *FUSED]))
        if self.optimizer is None and self.choices():
            given = ", ".join(f"{key}={value!r}" for key, value in self.choices().items())
            raise ValueError(
                f'{given} has no effect with optimizer=None, which keeps your optimizer; use optimizer="auto"'
            )

    def choices(self) -> dict[str, Any]:
        """The settings that were given, by name."""
        settings = {"state": self.state, "master": self.master, "kernel": self.kernel}
        return {key: value for key, value in settings.items() if value is not None}


def adopt(old: Optimizer, wish: Wish, names: Mapping[Tensor, str]) -> Optimizer:
    """The optimizer that takes the place of one that a module configured.

    Its groups are the same dict objects, so whoever still holds the old optimizer (a scheduler of an unknown kind, the
    module) goes on driving the new one.

    Args:
        old: The configured optimizer.
        wish: What it should be.
        names: Names of the module's parameters.

    Returns:
        A new optimizer, or ``old`` where nothing is to change.

    Raises:
        ValueError: The wish cannot be had for this optimizer.
    """
    if wish.optimizer is None:
        keep_execution(old)
        return old
    if isinstance(old, FusedOptimizer):
        _check_same(old, wish)
        return old
    cls = FUSED[_word(old, wish)]
    groups = [_group(group, index, names) for index, group in enumerate(old.param_groups)]
    defaults = {key: value for key, value in old.defaults.items() if key in _arguments(cls)}
    made = cls(groups, **defaults, **wish.choices())
    for group in made.param_groups:
        for key in LEFT_BEHIND - {"params", "param_names"}:
            group.pop(key, None)
    if old.state:
        made.load_state_dict(old.state_dict())
    for kind in ("step_pre", "step_post"):
        getattr(made, f"_optimizer_{kind}_hooks").update(getattr(old, f"_optimizer_{kind}_hooks"))
    old.state.clear()
    old.param_groups = made.param_groups
    return made


def keep_execution(optimizer: Optimizer) -> None:
    """Lets an optimizer of torch's keep the way it is executed when a checkpoint is loaded.

    torch takes ``fused`` and ``foreach`` from the checkpoint, and so resumes on another path than was asked for.

    Args:
        optimizer: Any torch optimizer; one of ours does so by itself.
    """
    if isinstance(optimizer, FusedOptimizer):
        return
    configured = [{key: group[key] for key in EXECUTION_KEYS if key in group} for group in optimizer.param_groups]

    def restore(loaded: Optimizer) -> None:
        for group, execution in zip(loaded.param_groups, configured, strict=False):
            group.update(execution)
            on_device = bool(execution.get("fused") or execution.get("capturable"))
            for p in group["params"] if on_device else ():
                if isinstance(loaded.state.get(p, {}).get("step"), Tensor):
                    loaded.state[p]["step"] = loaded.state[p]["step"].to(p.device, torch.float32)

    optimizer.register_load_state_dict_post_hook(restore)


def _word(old: Optimizer, wish: Wish) -> str:
    if wish.optimizer != AUTO:
        return str(wish.optimizer)
    if type(old) is Adam and any(group.get("decoupled_weight_decay") for group in old.param_groups):
        return "adamw_fused"
    if type(old) not in SAME_RULE:
        known = ", ".join(sorted(cls.__name__ for cls in SAME_RULE))
        raise ValueError(
            f"optimizer='auto' found {type(old).__module__}.{type(old).__name__}: can take over torch's {known}; "
            "use optimizer=None to keep it and run only the step contract, or name one of " + ", ".join(FUSED)
        )
    return SAME_RULE[type(old)]


def _group(group: Mapping[str, Any], index: int, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """A group for our optimizer, with names: the group's own, the module's, or its place for a foreign parameter."""
    fallback = parameter_names(group, index)
    named = [(names.get(p, name), p) for name, p in zip(fallback, group["params"], strict=True)]
    return {**{key: value for key, value in group.items() if key not in LEFT_BEHIND}, "params": named}


def _arguments(cls: type[FusedOptimizer]) -> set[str]:
    shared = {"lr", "weight_decay", "maximize"}
    return shared | ({"momentum", "dampening", "nesterov"} if cls is FusedSGD else {"betas", "eps", "amsgrad"})


def _check_same(old: FusedOptimizer, wish: Wish) -> None:
    """Refuses a wish that contradicts one of our optimizers that the module built itself."""
    found = {"state": old._selection.spec, "master": old.master, "kernel": old._kernel_word}
    for key, wanted in wish.choices().items():
        if wanted != found[key]:
            raise ValueError(
                f"{key}={wanted!r}, but the module configures {type(old).__name__}({key}={found[key]!r}): "
                "say it in one place only"
            )
    if wish.optimizer != AUTO and FUSED[str(wish.optimizer)] is not type(old):
        raise ValueError(
            f"optimizer={wish.optimizer!r}, but the module configures {type(old).__name__}: say it in one place only"
        )
