"""Taking over the optimizers that a module has configured: their groups, settings, names, hooks and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch import Tensor
from torch.optim import Adam, Optimizer

from lightning_fuse.kernels import check_kernel_name
from lightning_fuse.optim import (
    FusedOptimizer,
    LoadOptions,
)
from lightning_fuse.optim.catalog import CATALOG, entry_of
from lightning_fuse.optim.group_names import parameter_names
from lightning_fuse.optim.groups import check_patterns
from lightning_fuse.optim.selection import Selection, StateSpec
from lightning_fuse.optim.settings import EXECUTION_KEYS
from lightning_fuse.plugins.optimizer_loan import Loan, Step, loan_of, take_torch_keys
from lightning_fuse.plugins.schedulers import holders, mark_step
from lightning_fuse.registry import unknown_name

FUSED: dict[str, type[FusedOptimizer]] = {entry.word: entry.cls for entry in CATALOG}
SAME_RULE: dict[type[Optimizer], str] = {
    entry.torch_twin: entry.word for entry in CATALOG if entry.torch_twin is not None
}
AUTO = "auto"


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
    """Converts the optimizers of one trainer, fit after fit, and gives them back.

    Args:
        spec: What the optimizers should be.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._undo: list[Callable[[], None]] = []

    def convert(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
        configs: Sequence[Any] = (),
        step: Step | None = None,
    ) -> list[Optimizer]:
        """The optimizers that step the parameters of those that a module configured.

        Args:
            optimizers: The configured ones. A torch optimizer is on loan until ``give_back``.
            names: Names of the module's parameters.
            configs: Lightning's configurations of schedulers, which drive ours from now on.
            step: What a call of ``step`` of an optimizer on loan runs, given ours and the closure.

        Returns:
            One for each, in order.

        Raises:
            ValueError: The spec cannot be had, or has no effect on any of them.
        """
        result: list[Optimizer] = []
        for old in optimizers:
            spec = self.spec if len(optimizers) == 1 else _narrowed(self.spec, old, optimizers, names)
            if self.spec.optimizer is None or isinstance(old, _MockOptimizer):
                # The mock stands for "no optimizer": configure_optimizers returned None.
                self._undo += keep_execution(old)
                result.append(old)
            elif isinstance(old, FusedOptimizer):
                _check_same(old, spec)
                self._name_later_groups(old, names)
                result.append(old)
            else:
                loan = convert_optimizer(old, spec, names)
                self._undo.append(loan.end)
                loan.begin(holders(configs, old), step)
                if loan.bound:
                    mark_step(loan.fused)
                result.append(loan.fused)
        return result

    def give_back(self) -> None:
        """Ends what ``convert`` began: every optimizer of the user's is what it was, with the state of now."""
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()

    def keep_nonfinite(self, optimizers: Sequence[Optimizer]) -> None:
        """Lets NaN and infinite moments be loaded: a run that steps on such gradients has them, and goes on with them.

        Args:
            optimizers: Those of the run.
        """
        for optimizer in optimizers:
            if isinstance(optimizer, FusedOptimizer):
                before = optimizer.load_options
                optimizer.load_options = replace(before, nonfinite="keep")
                self._undo.append(partial(setattr, optimizer, "load_options", before))

    def _name_later_groups(self, optimizer: FusedOptimizer, names: Mapping[Tensor, str]) -> None:
        """Lets groups that are added in training be named as the module names them, where those of now have names."""
        if all("param_names" in group for group in optimizer.param_groups):
            self._undo.append(partial(setattr, optimizer, "known_names", optimizer.known_names))
            optimizer.known_names = names


def convert_optimizer(old: Optimizer, spec: OptimizerSpec, names: Mapping[Tensor, str]) -> Loan:
    """Makes our optimizer over the groups of a user's.

    Its groups are the same dict objects, changed in place. An optimizer that was converted before in the same way, and
    not stepped or loaded since, goes on with the state of then.

    Args:
        old: The configured optimizer.
        spec: What it should be.
        names: Names of the module's parameters.

    Returns:
        The loan, to be begun, with our optimizer and the old one's state in it.

    Raises:
        ValueError: The spec cannot be had for this optimizer, which is unchanged then.
    """
    known = loan_of(old)
    cls = FUSED[_word(old, spec)]
    if known is not None and type(known.fused) is cls and known.spec == spec and known.take_back(names):
        known.fused.known_names = names
        return known
    if known is not None and known.active:
        raise ValueError(
            f"the optimizer is in use by another Trainer, as {known.fused.describe()}: "
            "end that fit first, or give both Trainers the same settings"
        )
    defaults = {key: value for key, value in old.defaults.items() if key in _arguments(cls)}
    state = old.state_dict() if old.state else None
    before = [dict(group) for group in old.param_groups]
    named = all("param_names" in group for group in before)
    try:
        taken = [_prepare(group, index, names) for index, group in enumerate(old.param_groups)]
        _unshare_numbers(old.param_groups)
        made = cls.__new__(cls)
        made.known_names = names  # before the groups are there: patterns may mean parameters that come later
        cls.__init__(made, old.param_groups, **defaults, **spec.choices())
        if state is not None:
            made.load_state_dict(state, options=LoadOptions(nonfinite="keep"))  # it is the run's own, not a file's
    except Exception:
        for group, original in zip(old.param_groups, before, strict=True):
            group.clear()
            group.update(original)
        raise
    made.param_groups = old.param_groups  # the same list, too
    return Loan(old, made, spec, named, taken)


def keep_execution(optimizer: Optimizer) -> list[Callable[[], None]]:
    """Lets an optimizer of torch's keep the way it is executed when a checkpoint is loaded.

    torch takes ``fused`` and ``foreach`` from the checkpoint, and so resumes on another path than was asked for.

    Args:
        optimizer: Any torch optimizer; one of ours does so by itself.

    Returns:
        What takes the change back.
    """
    if isinstance(optimizer, FusedOptimizer):
        return []
    configured = [{key: group[key] for key in EXECUTION_KEYS if key in group} for group in optimizer.param_groups]

    def restore(loaded: Optimizer) -> None:
        for group, execution in zip(loaded.param_groups, configured, strict=False):
            group.update(execution)
            on_device = bool(execution.get("fused") or execution.get("capturable"))
            for p in group["params"] if on_device else ():
                if isinstance(loaded.state.get(p, {}).get("step"), Tensor):
                    loaded.state[p]["step"] = loaded.state[p]["step"].to(p.device, torch.float32)

    return [optimizer.register_load_state_dict_post_hook(restore).remove]


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


def _prepare(group: dict[str, Any], index: int, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Makes a group ours, in place, with names: the module's, the group's own, or its place for a foreign parameter."""
    fallback = parameter_names(group, index)
    named = [(names.get(p, name), p) for name, p in zip(fallback, group["params"], strict=True)]
    group.pop("param_names", None)
    group["params"] = named
    return take_torch_keys(group)


def _unshare_numbers(groups: Sequence[dict[str, Any]]) -> None:
    """Gives every group a tensor of its own where torch put one learning rate into several: schedules set each."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, Tensor):
                if id(value) in seen:
                    group[key] = value.clone()
                seen.add(id(value))


def _narrowed(
    spec: OptimizerSpec, old: Optimizer, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]
) -> OptimizerSpec:
    """What of a spec concerns one of several optimizers; a choice need not have an effect on each of them."""
    state, master = spec.state, spec.master
    if state is not None and not isinstance(state, str):
        check_patterns([entry[0] for entry in state if not isinstance(entry, str)], list(names.values()))
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
    entry = entry_of(cls)
    return set() if entry is None else set(entry.settings)


def _check_same(old: FusedOptimizer, spec: OptimizerSpec) -> None:
    """Refuses a spec that contradicts one of our optimizers that the module built itself."""
    found = {"state": old.state_spec, "master": old.master, "kernel": old.kernel_word}
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
