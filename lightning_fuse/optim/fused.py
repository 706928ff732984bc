"""The optimizer that all public classes share: groups, their specs, state from the first gradient on, one kernel call.

``state[p]`` holds plain tensors: ``step`` (float64, updates applied to this parameter), the moments under torch's names
(``exp_avg``; ``exp_avg.codes`` and ``exp_avg.scale`` for int8) and what the master weight needs (``master`` or
``remainder``). A parameter has none before its first gradient, so the model may be moved and loaded until then, and
frozen parameters cost nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias, cast
from warnings import warn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from lightning_fuse.kernels import ParamSpec, ParamUpdate, StepKernel, check_kernel_name, choose_kernel
from lightning_fuse.kernels.shards import shard_of
from lightning_fuse.optim.checkpoint.options import LoadOptions, LoadReport
from lightning_fuse.optim.checkpoint.plan import Destination, LoadPlan, plan_load
from lightning_fuse.optim.checkpoint.schema import describe_state
from lightning_fuse.optim.group_cache import GroupCache, plain_numbers
from lightning_fuse.optim.group_names import name_added_group, parameter_names
from lightning_fuse.optim.selection import Selection, StateSpec
from lightning_fuse.optim.settings import check_apart, check_parameter, check_shard, part_shared_tensors
from lightning_fuse.rules.rule import UpdateRule

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class FusedOptimizer(Optimizer):
    """A torch optimizer whose step is one call of a kernel. Use one of the public classes.

    Attributes:
        grad_scale: Set by ``torch.amp.GradScaler`` around ``step``: the loss scale that gradients still carry.
        found_inf: Set by GradScaler or the step contract around ``step``: other than 0 skips the step.
        grad_factor: Set by the step contract around ``step``: what gradients are multiplied by.
        load_options: What ``load_state_dict`` may do where a checkpoint does not fit exactly; by default nothing.
        last_load: What the last load did; None before the first.
        known_names: Names of a module's parameters, for groups that are added without any; set before the first group
            is there, patterns may match any of them.
    """

    _cache: GroupCache | None = None
    _shared_tensors: Sequence[Tensor] = ()  # learning rates that several groups were given as one tensor
    _kernel: StepKernel | None = None
    grad_factor: Tensor | None = None
    found_inf: Tensor | None = None
    known_names: Mapping[Tensor, str] | None = None
    load_options: LoadOptions = LoadOptions()
    last_load: LoadReport | None = None

    # GradScaler then neither unscales gradients in memory nor reads found_inf on the host.
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, defaults: dict[str, Any], *, state: StateSpec, master: str, kernel: str) -> None:
        check_kernel_name(kernel)
        self._selection = Selection(state, master)
        self._kernel_word = kernel
        self.reset_caches()
        super().__init__(cast(Any, params), defaults)
        if not self.specs():
            raise ValueError("the optimizer got no parameters: every group is empty")
        self._selection.check_effect(self.specs(), (self.known_names or {}).values())

    @abstractmethod
    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        """The update rule that a group's settings stand for."""

    @abstractmethod
    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses hyperparameters that no update can be computed from (ValueError)."""

    @property
    def master(self) -> str:
        """The word of the master weight format."""
        return self._selection.master.name

    @property
    def kernel_word(self) -> str:
        """The word that ``kernel=`` was given."""
        return self._kernel_word

    @property
    def state_spec(self) -> StateSpec:
        """What ``state=`` was given."""
        return self._selection.spec

    @property
    def kernel_name(self) -> str:
        """The word of the kernel that steps the parameters."""
        return self._choose_kernel().name

    def specs(self) -> list[ParamSpec]:
        """What is decided about every parameter, in the order of the groups; no memory is allocated."""
        return self._current().specs

    def specs_with_state(self) -> list[ParamSpec]:
        """The parameters that have state, or will have it after the next step.

        Before the first step those are the trainable ones; later those with state or a gradient.
        """
        if not any(self.state.values()):
            return [spec for spec in self.specs() if spec.param.requires_grad]
        return [spec for spec in self.specs() if self.state.get(spec.param) or spec.param.grad is not None]

    def describe(self) -> str:
        """What runs, in one line: ``adamw, int8 state (0.8 % fp32), native kernel (x86-64-v4, 2 threads)``."""
        specs, kernel = self.specs_with_state() or self.specs(), self._choose_kernel()
        rules = dict.fromkeys(spec.rule.name for spec in specs)
        counts: dict[str, int] = {}
        for spec in specs:
            counts[spec.state_format.name] = counts.get(spec.state_format.name, 0) + spec.param.numel()
        main, *others = sorted(counts, key=lambda word: -counts[word])
        shares = [f"{100 * counts[word] / max(1, sum(counts.values())):.1f} % {word}" for word in others]
        state = f"{main} state" + (f" ({', '.join(shares)})" if shares else "")
        master = [] if self.master == "none" else [f"{self.master} masters"]
        runs_with = f" ({kernel.description()})" if kernel.description() else ""
        return ", ".join(["+".join(rules), state, *master, f"{kernel.name} kernel{runs_with}"])

    def formats(self) -> dict[str, str]:
        """The state format of every parameter, by name (``group.index`` where the optimizer was given no names)."""
        return {spec.name: spec.state_format.name for spec in self.specs()}

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state by kind; see ``specs_with_state`` for whose."""
        total: dict[str, int] = {}
        for spec in self.specs_with_state():
            for key, count in spec.nbytes.items():
                total[key] = total.get(key, 0) + count
        return total

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checked as a whole before anything of it is kept; see ``torch.optim.Optimizer``.

        Raises:
            TypeError: A parameter is not a dense float32, bfloat16 or float16 tensor.
            ValueError: A hyperparameter cannot be used, a parameter or its memory is there twice, or a format is
                unknown.
        """
        name_added_group(param_group, self.known_names, self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if len(set(map(id, group["params"]))) != len(group["params"]):
                raise ValueError("a parameter appears twice in one group; pass each parameter once")
            self._check_names(group)
            self._shared_tensors = part_shared_tensors(self.param_groups, self._shared_tensors)
            self.check_group(plain_numbers(group))
            for name, p in zip(parameter_names(group, len(self.param_groups) - 1), group["params"], strict=True):
                check_parameter(name, p)
            specs = self.specs()
            check_apart((spec.name, spec.local) for spec in specs)
            for spec in specs:
                check_shard(spec)
        except Exception:
            self.param_groups.pop()
            self.reset_caches()
            raise
        self.reset_caches()

    @_disable_dynamo  # one native call: torch.compile has nothing to gain, and would compile anew for every lr
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies one update to every parameter that has a gradient.

        A parameter without a gradient keeps its moments and its step. Gradients are only read.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            TypeError: A gradient is sparse or of a dtype that no kernel reads; nothing has been written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.apply(self._factor(), self.found_inf)
        return loss

    def apply(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Runs the kernel over all parameters that have a gradient.

        Args:
            factor: float32, 0-dimensional; every gradient is multiplied by it. None stands for 1.
            found_inf: float32, 0-dimensional; other than 0 changes nothing. None stands for 0.
        """
        updates = self.gather()
        if updates:
            self._choose_kernel().step(updates, factor, found_inf)

    def gather(self) -> Sequence[ParamUpdate]:
        """Every parameter that has a gradient, with its state and hyperparameters; checked, and allocated if new.

        Returns:
            One update per parameter with a gradient, in the order of the groups.

        Raises:
            TypeError: A parameter or its gradient is of a kind that no kernel reads.
            ValueError: A hyperparameter is out of range.
        """
        cache = self._current()
        had = cache.states
        updates = cache.gather(self.state)
        if cache.states is not had:
            self._kernel = None
        return () if updates is None else updates

    def state_dict(self) -> dict[str, Any]:
        """State as torch keeps it, live and plain data; each parameter's says what it is under ``format``."""
        return describe_state(self.specs(), super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], options: LoadOptions | None = None) -> None:
        """Loads what ``state_dict`` returned, or the state of torch's or bitsandbytes' optimizer of the same rule.

        Everything numerical comes from the checkpoint, how the step is executed from this optimizer. Every bit of
        every state tensor is kept. Parameters are matched by name where both sides have names. Load the model first:
        master weights belong to its parameters. What was done is told by ``last_load``.

        Args:
            state_dict: The state dict; its tensors may be mapped from a file.
            options: What to do where it does not fit exactly; None stands for ``load_options``.

        Raises:
            TypeError: ``state_dict`` is not a state dict.
            ValueError: It belongs to another rule, format or set of parameters, and the options allow no other, or it
                is damaged; nothing has been changed then.
        """
        plan = self.plan_load(state_dict, options)
        plan.apply(self.param_groups, self.state)
        self.reset_caches()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
        self.last_load = plan.report()
        if self.last_load.warnings:
            more = len(self.last_load.warnings) - 1
            warn(self.last_load.warnings[0] + (f" (and {more} more parameters)" if more else ""), stacklevel=2)

    def plan_load(self, state_dict: Any, options: LoadOptions | None = None) -> LoadPlan:
        """Everything that ``load_state_dict`` would do, checked; changes nothing. Arguments and errors are its own."""
        hooks = self._optimizer_load_state_dict_pre_hooks.values()
        if hooks and isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # torch's hooks may change it
        for hook in hooks:
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        into = Destination(self.specs(), self.param_groups, type(self).__name__, self.check_group, self.rule_for)
        return plan_load(into, state_dict, self.load_options if options is None else options)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_selection", "_kernel_word", "load_options")
        return {**super().__getstate__(), **{str(key): getattr(self, key) for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.reset_caches()

    # What loading needs, besides ``specs``.

    def rule_for(self, group: Mapping[str, Any], p: Tensor) -> UpdateRule:
        """The update rule of one parameter: its group's, unless a rule treats vectors in another way.

        Args:
            group: Its group, or what the group will be.
            p: The parameter.
        """
        return self._rule(group)

    def spec_of(self, group: Mapping[str, Any], name: str, p: Tensor) -> ParamSpec:
        """The spec that a parameter has with the settings of a group, its own or what that will be."""
        chosen = self._selection
        state_format = chosen.format_of(name if "param_names" in group else None, p.dim(), group.get("state"))
        master, shard = chosen.master_of(p.dtype), shard_of(p)
        first_index = 0 if shard is None else shard.first_index
        rule = self.rule_for(group, p)
        return ParamSpec(name, p, group, rule, state_format, master, tuple(p.shape), first_index, shard)

    def reset_caches(self) -> None:
        """Forgets what was derived from groups and state; for code that has changed both."""
        self._cache = None
        self._kernel = None

    # The caches.

    def _check_names(self, group: Mapping[str, Any]) -> None:
        names = [name for other in self.param_groups for name in other.get("param_names", ())]
        twice = sorted({name for name in group.get("param_names", ()) if names.count(name) > 1})
        if twice:
            raise ValueError(f"two parameters are called {twice[0]!r}: names must differ, state is saved by name")

    def _current(self) -> GroupCache:
        """What is decided about every parameter, made anew where it follows from something that has changed."""
        cache, hypers = self._cache, list(map(plain_numbers, self.param_groups))
        if cache is not None and hypers == cache.hypers:
            changed: Iterable[int] = ()
        else:
            before = cache.hypers if cache is not None and len(cache.hypers) == len(hypers) else repeat(None)
            changed = [index for index, (new, old) in enumerate(zip(hypers, before, strict=False)) if new != old]
        for index in changed:
            self.check_group(hypers[index])
        if cache is None or not cache.still_decided(self.param_groups, hypers, self.rule_for):
            self._cache = cache = GroupCache(self.param_groups, hypers, self.spec_of)
            self._kernel = None
        return cache

    def _choose_kernel(self) -> StepKernel:
        if self._kernel is None:
            self._kernel = choose_kernel(self._kernel_word, self.specs_with_state())
        return self._kernel

    def _factor(self) -> Tensor | None:
        """What gradients are multiplied by: the contract's factor, or the inverse of GradScaler's loss scale."""
        if self.grad_factor is not None:
            return self.grad_factor
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else scale.double().reciprocal().to(torch.float32)
