"""The optimizer that all public classes share: groups, slots over regions of state, and one kernel call per step.

``state[p]`` holds plain tensors: ``step`` (int64, updates applied to this parameter), the moments under torch's names
(``exp_avg``; ``exp_avg.codes`` and ``exp_avg.scale`` for int8) and what the master weight needs (``master`` or
``remainder``). It is allocated at the first step, so the model may be moved and loaded until then.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, TypeAlias, cast
from warnings import warn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.formats.format import StateFormat, state_tensors
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.kernels import Slot, StepKernel, StoredMoment, Work, check_kernel_name, choose_kernel
from lightning_fuse.kernels.kernel import PARAM_DTYPES
from lightning_fuse.optim import state_io
from lightning_fuse.optim.group_names import name_added_group
from lightning_fuse.optim.load_options import LoadOptions, LoadReport
from lightning_fuse.optim.regions import Request, allocate
from lightning_fuse.optim.selection import Selection, StateSpec
from lightning_fuse.optim.settings import check_apart, check_gradient, check_parameter, plain_numbers
from lightning_fuse.rules.rule import UpdateRule

_GRAD, _LAYOUT, _DTYPE = attrgetter("grad"), attrgetter("layout"), attrgetter("dtype")
_STRIDED, _READABLE = frozenset({torch.strided}), frozenset(PARAM_DTYPES)
_AS_WORK = partial(tuple.__new__, Work)  # from (slot, grad, numbers): Work(...) runs a Python function for each

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


@dataclass
class Line:
    """The slots of one group, beside what they were made of.

    Attributes:
        params: The group's parameters.
        held: ``state[p]`` of each.
        tensors: All tensors of the state, in order.
        slots: One per parameter.
        numbers: Hyperparameters that the rules were last chosen by.
    """

    params: list[Tensor]
    held: list[dict[str, Tensor]]
    tensors: list[Tensor]
    slots: list[Slot]
    numbers: Mapping[str, Any]


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
        self._reset_caches()
        super().__init__(cast(Any, params), defaults)
        if not self._members():
            raise ValueError("the optimizer got no parameters: every group is empty")
        self._selection.check_effect(self._members(), self._keeps_moments(), (self.known_names or {}).values())

    @abstractmethod
    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        """The update rule that a group's settings stand for."""

    def _rule_of(self, group: Mapping[str, Any], p: Tensor) -> UpdateRule:
        """The update rule of one parameter: its group's, unless a rule treats vectors in another way."""
        return self._rule(group)

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses hyperparameters that no update can be computed from (ValueError)."""

    @property
    def master(self) -> str:
        """The word of the master weight format."""
        return self._selection.master.name

    @property
    def kernel_name(self) -> str:
        """The word of the kernel that steps the parameters."""
        return self._choose_kernel().name

    def describe(self) -> str:
        """What runs, in one line: ``adamw, int8 state (0.8 % fp32), native kernel (x86-64-v4, 2 threads)``."""
        members, kernel = self._members(), self._choose_kernel()
        rules = dict.fromkeys(self._rule_of(group, p).name for group, _, p in members)
        counts: dict[str, int] = {}
        for group, name, p in members:
            word = self._format(group, name, p).name
            counts[word] = counts.get(word, 0) + p.numel()
        main, *others = sorted(counts, key=lambda word: -counts[word])
        shares = [f"{100 * counts[word] / max(1, sum(counts.values())):.1f} % {word}" for word in others]
        state = f"{main} state" + (f" ({', '.join(shares)})" if shares else "")
        master = [] if self.master == "none" else [f"{self.master} masters"]
        how = f" ({kernel.how()})" if kernel.how() else ""
        return ", ".join(["+".join(rules), state, *master, f"{kernel.name} kernel{how}"])

    def formats(self) -> dict[str, str]:
        """The state format of every parameter, by name (``group.index`` where the optimizer was given no names)."""
        return {name: self._format(group, name, p).name for group, name, p in self._members()}

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state by kind, as they are or will be once the first step has allocated them."""
        total: dict[str, int] = {}
        for group, name, p in self._members():
            for request in self._requests(group, name, p):
                count = request.dtype.itemsize * torch.Size(request.shape).numel()
                total[request.key] = total.get(request.key, 0) + count
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
            self._check_group(plain_numbers(group))
            for name, p in zip(parameter_names(group, len(self.param_groups) - 1), group["params"], strict=True):
                check_parameter(name, p)
                self._format(group, name, p)
            check_apart((name, p) for _, name, p in self._members())
        except Exception:
            self.param_groups.pop()
            raise
        self._reset_caches()

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
        found = [self._gradients(index, group) for index, group in enumerate(self.param_groups)]
        if not any(grad is not None for _, grads in found for grad in grads):
            return
        work: list[Work] = []
        for line, (numbers, grads) in zip(self._lined_up([numbers for numbers, _ in found]), found, strict=True):
            parts: Iterable[Any] = zip(line.slots, grads, repeat(numbers))
            if any(map(is_, grads, repeat(None))):
                parts = (part for part in parts if part[1] is not None)
            work += map(_AS_WORK, parts)
        self._choose_kernel().step(work, factor, found_inf)

    def state_dict(self) -> dict[str, Any]:
        """State as torch keeps it, with one entry ``lightning_fuse`` that says what it holds; plain data only."""
        return state_io.describe(self, super().state_dict())

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
        self.last_load = state_io.load(self, state_dict, self.load_options if options is None else options)
        if self.last_load.warnings:
            more = len(self.last_load.warnings) - 1
            warn(self.last_load.warnings[0] + (f" (and {more} more parameters)" if more else ""), stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_selection", "_kernel_word", "load_options")
        return {**super().__getstate__(), **{str(key): getattr(self, key) for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches()

    # What the base class, state_io and the step share.

    def _reset_caches(self) -> None:
        self._lines: list[Line] = []
        self._entries: dict[Tensor, dict[str, Tensor]] = {}  # of state, as they were when the lines were made
        self._kernel: StepKernel | None = None

    def _members(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        return [
            (group, name, p)
            for index, group in enumerate(self.param_groups)
            for name, p in zip(parameter_names(group, index), group["params"], strict=True)
        ]

    def _check_names(self, group: Mapping[str, Any]) -> None:
        names = [name for other in self.param_groups for name in other.get("param_names", ())]
        twice = sorted({name for name in group.get("param_names", ()) if names.count(name) > 1})
        if twice:
            raise ValueError(f"two parameters are called {twice[0]!r}: names must differ, state is saved by name")

    def _keeps_moments(self) -> bool:
        return any(self._rule(group).moments for group in self.param_groups)

    def _format(self, group: Mapping[str, Any], name: str, p: Tensor) -> StateFormat:
        named = "param_names" in group
        return self._selection.format_of(name if named else None, p.dim(), group.get("state"))

    def _master(self, p: Tensor) -> MasterFormat:
        return self._selection.master_of(p.dtype)

    def _requests(self, group: Mapping[str, Any], name: str, p: Tensor) -> list[Request]:
        fmt, shape = self._format(group, name, p), tuple(p.shape)
        wanted = [Request("step", (), torch.int64, p.device)]
        for moment in self._rule_of(group, p).moments:
            for part in fmt.codec(moment).parts(shape):
                wanted.append(Request(moment.name + part.suffix, part.shape, part.dtype, p.device))
        for part in self._master(p).parts(shape):
            wanted.append(Request(part.suffix, part.shape, part.dtype, p.device))
        return wanted

    def _ensure_state(self) -> None:
        """Allocates what is missing, for all parameters at once, and starts their master weights."""
        missing: list[tuple[Tensor, Request]] = []
        for group, name, p in self._members():
            held = self.state[p]
            missing += [(p, request) for request in self._requests(group, name, p) if request.key not in held]
        if not missing:
            return
        for (p, request), tensor in zip(missing, allocate([r for _, r in missing]), strict=True):
            self.state[p][request.key] = tensor
        started = {id(p): p for p, request in missing if request.key in ("master", "remainder")}
        for p in started.values():
            master = self._master(p)
            for part, value in zip(master.parts(tuple(p.shape)), master.start(p), strict=True):
                self.state[p][part.suffix].copy_(value)

    def _gradients(self, index: int, group: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor | None]]:
        """A group's hyperparameters and gradients, checked; None where a parameter has no gradient."""
        numbers = plain_numbers(group)
        self._check_group(numbers)
        grads = list(map(_GRAD, group["params"]))
        found = [grad for grad in grads if grad is not None]
        if not (_STRIDED.issuperset(map(_LAYOUT, found)) and _READABLE.issuperset(map(_DTYPE, found))):
            for name, p in zip(parameter_names(group, index), group["params"], strict=True):
                check_gradient(name, p)
        return numbers, grads

    def _lined_up(self, numbers: Sequence[Mapping[str, Any]]) -> list[Line]:
        """The slots of every group; made anew where parameters, state or rules are not those they were made of."""
        entries = self._entries
        # Lightning and others replace state[p], or a tensor in it, by a moved copy: identities tell.
        known = (
            len(self._lines) == len(self.param_groups)
            and len(self.state) == len(entries)
            and all(map(is_, self.state, entries))
            and all(map(is_, self.state.values(), entries.values()))
        )
        if not known or not all(map(self._still_holds, self._lines, self.param_groups, numbers)):
            self._ensure_state()
            self._lines = [
                self._line_up(index, group, mine)
                for index, (group, mine) in enumerate(zip(self.param_groups, numbers, strict=True))
            ]
            self._entries = dict(self.state)
            self._kernel = None
        return self._lines

    def _line_up(self, index: int, group: Mapping[str, Any], numbers: Mapping[str, Any]) -> Line:
        params, names = list(group["params"]), parameter_names(group, index)
        held = [self.state[p] for p in params]
        slots = [self._make_slot(group, *each) for each in zip(names, params, held, strict=True)]
        return Line(params, held, list(chain.from_iterable(map(dict.values, held))), slots, numbers)

    def _still_holds(self, line: Line, group: Mapping[str, Any], numbers: Mapping[str, Any]) -> bool:
        if not (
            len(line.params) == len(group["params"])
            and all(map(is_, group["params"], line.params))
            and sum(map(len, line.held)) == len(line.tensors)
            and all(map(is_, chain.from_iterable(map(dict.values, line.held)), line.tensors))
        ):
            return False
        if numbers != line.numbers:
            # Settings may stand for another rule now, for instance after momentum was set.
            line.numbers = numbers
            return all(slot.rule is self._rule_of(group, slot.param) for slot in line.slots)
        return True

    def _make_slot(self, group: Mapping[str, Any], name: str, p: Tensor, held: Mapping[str, Tensor]) -> Slot:
        rule, fmt, master, shape = (
            self._rule_of(group, p),
            self._format(group, name, p),
            self._master(p),
            tuple(p.shape),
        )
        moments = tuple(
            StoredMoment(m, fmt.codec(m), state_tensors(m, fmt.codec(m), held, shape)) for m in rule.moments
        )
        kept = tuple(held[part.suffix] for part in master.parts(shape))
        return Slot(name, p, rule, moments, master, kept, held["step"])

    def _choose_kernel(self) -> StepKernel:
        if self._kernel is None:
            slots = [self._preview(group, name, p) for group, name, p in self._members()]
            self._kernel = choose_kernel(self._kernel_word, slots)
        return self._kernel

    def _preview(self, group: Mapping[str, Any], name: str, p: Tensor) -> Slot:
        """A slot without memory: enough to ask kernels what they support before anything is allocated."""
        held = {
            request.key: torch.empty(request.shape, dtype=request.dtype, device="meta")
            for request in self._requests(group, name, p)
        }
        return self._make_slot(group, name, p, held)

    def _factor(self) -> Tensor | None:
        """What gradients are multiplied by: the contract's factor, or the inverse of GradScaler's loss scale."""
        if self.grad_factor is not None:
            return self.grad_factor
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else scale.double().reciprocal().to(torch.float32)


def parameter_names(group: Mapping[str, Any], index: int) -> Sequence[str]:
    """Names of a group's parameters, for messages: those it was given, or ``group.position``.

    Args:
        group: A parameter group of any torch optimizer.
        index: The group's place among the groups.

    Returns:
        One name per parameter.
    """
    return group.get("param_names") or [f"{index}.{i}" for i in range(len(group["params"]))]
