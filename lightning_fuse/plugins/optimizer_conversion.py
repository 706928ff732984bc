"""Taking over the optimizers that a module has configured: their groups, settings, names, hooks and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fuse.kernels import check_kernel_name
from lightning_fuse.optim import (
    FusedAdam,
    FusedAdamW,
    FusedAdEMAMix,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedOptimizer,
    FusedSGD,
    LoadOptions,
)
from lightning_fuse.optim.fused import parameter_names
from lightning_fuse.optim.groups import check_patterns
from lightning_fuse.optim.selection import Selection, StateSpec
from lightning_fuse.optim.settings import EXECUTION_KEYS
from lightning_fuse.registry import unknown_name

FUSED: dict[str, type[FusedOptimizer]] = {
    "adamw_fused": FusedAdamW,
    "adam_fused": FusedAdam,
    "sgd_fused": FusedSGD,
    "lion_fused": FusedLion,
    "lars_fused": FusedLARS,
    "lamb_fused": FusedLAMB,
    "ademamix_fused": FusedAdEMAMix,
}
SAME_RULE: dict[type[Optimizer], str] = {AdamW: "adamw_fused", Adam: "adam_fused", SGD: "sgd_fused"}
AUTO = "auto"
# Keys of torch's groups that our optimizers do not keep; "decoupled_weight_decay" has decided the class by then.
LEFT_BEHIND = {*EXECUTION_KEYS, "decoupled_weight_decay", "params", "param_names"}

HOOKS = [
    f"_optimizer_{kind}_hooks"
    for kind in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
]


@dataclass(frozen=True)
class OptimizerSpec:
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

        # Unknown words are refused now, not at the first fit.
        Selection("fp32" if self.state is None else self.state, self.master or "none")
        check_kernel_name(self.kernel or "auto")

    def choices(self) -> dict[str, Any]:
        """The settings that were given, by name."""
        settings = {"state": self.state, "master": self.master, "kernel": self.kernel}
        return {key: value for key, value in settings.items() if value is not None}


class OptimizerConverter:
    """Takes over the optimizers of one trainer, whatever number of fits it runs.

    Args:
        spec: What the optimizers should be.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        # A module may build its optimizer once and return it at every fit: it stays the same one, with its state.
        self._made: WeakKeyDictionary[Optimizer, Optimizer] = WeakKeyDictionary()

    def convert(self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> list[Optimizer]:
        """The optimizers that take the places of those that a module configured.

        Args:
            optimizers: The configured ones.
            names: Names of the module's parameters.

        Returns:
            One for each, in order.

        Raises:
            ValueError: The spec cannot be had, or has no effect on any of them.
        """
        result = []
        for old in optimizers:
            spec = self.spec if len(optimizers) == 1 else _narrowed(self.spec, old, optimizers, names)
            if self.spec.optimizer is None or isinstance(old, _MockOptimizer):
                # The mock stands for "no optimizer": configure_optimizers returned None.
                keep_execution(old)
                result.append(old)
            elif isinstance(old, FusedOptimizer):
                _check_same(old, spec)
                result.append(old)
            else:
                if old not in self._made:
                    self._made[old] = convert_optimizer(old, spec, names)
                result.append(self._made[old])
        return result


def convert_optimizer(old: Optimizer, spec: OptimizerSpec, names: Mapping[Tensor, str]) -> Optimizer:
    """The optimizer that takes the place of one that a module configured.

    Its groups are the same dict objects, changed in place, so whoever still holds the old optimizer or its groups (a
    scheduler of an unknown kind, the module) goes on driving the new one.

    Args:
        old: The configured optimizer.
        spec: What it should be.
        names: Names of the module's parameters.

    Returns:
        The new optimizer, with the old one's state; the old one keeps its groups and nothing else.

    Raises:
        ValueError: The spec cannot be had for this optimizer, which is unchanged then.
    """
    cls = FUSED[_word(old, spec)]
    defaults = {key: value for key, value in old.defaults.items() if key in _arguments(cls)}
    state = old.state_dict() if old.state else None
    before = [dict(group) for group in old.param_groups]
    try:
        for index, group in enumerate(old.param_groups):
            _prepare(group, index, names)
        made = cls(old.param_groups, **defaults, **spec.choices())
        if state is not None:
            made.load_state_dict(state, options=LoadOptions(nonfinite="keep"))  # it is the run's own, not a file's
    except Exception:
        for group, original in zip(old.param_groups, before, strict=True):
            group.clear()
            group.update(original)
        raise
    made.known_names = names
    for kind in HOOKS:
        getattr(made, kind).update(getattr(old, kind))
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


def keep_nonfinite(optimizers: Sequence[Optimizer]) -> None:
    """Lets NaN and infinite moments be loaded: a run that steps on such gradients has them, and goes on with them.

    Args:
        optimizers: Those of the run.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, FusedOptimizer):
            optimizer.load_options = replace(optimizer.load_options, nonfinite="keep")


def _word(old: Optimizer, spec: OptimizerSpec) -> str:
    if spec.optimizer != AUTO:
        return str(spec.optimizer)
    if type(old) is Adam and any(group.get("decoupled_weight_decay") for group in old.param_groups):
        return "adamw_fused"
    if type(old) not in SAME_RULE:
        known = ", ".join(sorted(cls.__name__ for cls in SAME_RULE))
        raise ValueError(
            f"optimizer='auto' found {type(old).__module__}.{type(old).__name__}: can take over torch's {known}; "
            "use optimizer=None to keep it and run only the step contract, or name one of " + ", ".join(FUSED)
        )
    return SAME_RULE[type(old)]


def _prepare(group: dict[str, Any], index: int, names: Mapping[Tensor, str]) -> None:
    """Makes a group ours, in place, with names: the module's, the group's own, or its place for a foreign parameter."""
    fallback = parameter_names(group, index)
    named = [(names.get(p, name), p) for name, p in zip(fallback, group["params"], strict=True)]
    for key in LEFT_BEHIND:
        group.pop(key, None)
    group["params"] = named


def _narrowed(
    spec: OptimizerSpec, old: Optimizer, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> OptimizerSpec:
    """What of a spec concerns one of several optimizers; a choice need not have an effect on each of them."""
    state, master = spec.state, spec.master
    if state is not None and not isinstance(state, str):
        everywhere = [names.get(p, "") for other in optimizers for p in _params(other)]
        check_patterns([entry[0] for entry in state if not isinstance(entry, str)], everywhere)
        mine = [names.get(p, "") for p in _params(old)]
        state = [entry for entry in state if isinstance(entry, str) or any(fnmatchcase(n, entry[0]) for n in mine)]
    if any(_keeps_moments(other) for other in optimizers) and not _keeps_moments(old):
        state = None
    if any(_is_narrow(other) for other in optimizers) and not _is_narrow(old):
        master = None
    return replace(spec, state=state, master=master)


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _keeps_moments(optimizer: Optimizer) -> bool:
    return any(group.get("momentum") != 0.0 for group in optimizer.param_groups)


def _is_narrow(optimizer: Optimizer) -> bool:
    return any(p.dtype != torch.float32 for p in _params(optimizer))


def _arguments(cls: type[FusedOptimizer]) -> set[str]:
    """The settings that a class takes over; those that another rule has besides mean nothing to it."""
    own = {
        FusedSGD: {"momentum", "dampening", "nesterov"},
        FusedLARS: {"momentum", "nesterov"},
        FusedLion: {"betas"},
        FusedLAMB: {"betas", "eps"},
        FusedAdEMAMix: {"eps"},  # of three betas two are another optimizer's
    }
    return {"lr", "weight_decay", "maximize"} | own.get(cls, {"betas", "eps", "amsgrad"})


def _check_same(old: FusedOptimizer, spec: OptimizerSpec) -> None:
    """Refuses a spec that contradicts one of our optimizers that the module built itself."""
    found = {"state": old._selection.spec, "master": old.master, "kernel": old._kernel_word}
    for key, wanted in spec.choices().items():
        if wanted != found[key]:
            raise ValueError(
                f"{key}={wanted!r}, but the module configures {type(old).__name__}({key}={found[key]!r}): "
                "say it in one place only"
            )
    if spec.optimizer != AUTO and FUSED[str(spec.optimizer)] is not type(old):
        raise ValueError(
            f"optimizer={spec.optimizer!r}, but the module configures {type(old).__name__}: say it in one place only"
        )
