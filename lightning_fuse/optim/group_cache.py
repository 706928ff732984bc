"""What an optimizer has decided and allocated, kept until something that it follows from changes.

A step asks three questions over all parameters at once, by object identity: are the groups' parameters, names and rules
those of the step before, is the state, and are the gradients of the same kind. Only where one is answered with no is
anything decided anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

from torch import Tensor

from lightning_fuse.kernels.batch import TensorSignature, UpdateBatch
from lightning_fuse.kernels.kernel import ParamSpec, ParamState
from lightning_fuse.kernels.shards import local_part
from lightning_fuse.optim.group_names import parameter_names
from lightning_fuse.optim.param_states import StateStore, ensure_states
from lightning_fuse.optim.settings import check_gradient, check_parameter
from lightning_fuse.rules.rule import UpdateRule

Groups: TypeAlias = Sequence[dict[str, Any]]
Hypers: TypeAlias = Sequence[Mapping[str, Any]]

ROUNDING_OF_LR = 1e-12  # far above what float64 leaves of any learning rate, far below any that trains

_GRAD, _PARAMS = attrgetter("grad"), itemgetter("params")


class GroupCache:
    """The specs of all groups of one optimizer, and later their states.

    Args:
        groups: The optimizer's groups.
        hypers: Their hyperparameters as plain numbers.
        spec_of: Decides about one parameter, given its group and its name.

    Attributes:
        specs: What is decided about every parameter, in the order of the groups.
        hypers: Hyperparameters that were last looked at.
        states: The state of every parameter, or None before its first gradient; a new list where one was replaced.
    """

    def __init__(
        self, groups: Groups, hypers: Hypers, spec_of: Callable[[dict[str, Any], str, Tensor], ParamSpec]
    ) -> None:
        self.hypers = hypers
        self._groups = list(groups)
        self._sizes = [len(group["params"]) for group in groups]
        self._given_names = [_copied_names(group) for group in groups]
        self.specs = [
            spec_of(group, name, p)
            for index, group in enumerate(groups)
            for name, p in zip(parameter_names(group, index), group["params"], strict=True)
        ]
        self._params = [spec.param for spec in self.specs]
        self._group_of = [index for index, size in enumerate(self._sizes) for _ in range(size)]
        self._sharded = [spec for spec in self.specs if spec.shard is not None]
        # A rule may depend on a group's numbers and on the number of dimensions: one parameter of each kind is asked.
        kinds = {(index, spec.param.dim()): spec for index, spec in zip(self._group_of, self.specs, strict=True)}
        self._witnesses = [(index, spec) for (index, _), spec in kinds.items()]
        self.states: list[ParamState | None] = [None] * len(self.specs)
        self._keys: list[Any] = []
        self._entries: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._tensors: list[Any] = []
        self._batch: UpdateBatch | None = None
        self._had_grad: list[bool] = []
        self._locals: list[Tensor] = []

    def still_decided(
        self, groups: Groups, hypers: Hypers, rule_for: Callable[[dict[str, Any], Tensor], UpdateRule]
    ) -> bool:
        """Whether the specs are what they would be if they were made now.

        Args:
            groups: The optimizer's groups.
            hypers: Their hyperparameters as plain numbers; remembered.
            rule_for: The rule of a parameter in a group.
        """
        lists = list(map(_PARAMS, groups))
        if not (
            len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))  # somebody may have replaced a dict
            and list(map(len, lists)) == self._sizes
            and all(map(is_, chain.from_iterable(lists), self._params))
            and [group.get("param_names") for group in groups] == self._given_names
            and all(spec.local is local_part(spec.param) for spec in self._sharded)
        ):
            return False
        if hypers == self.hypers:
            return True
        self.hypers = hypers
        return all(spec.rule is rule_for(groups[index], spec.param) for index, spec in self._witnesses)

    def gather(self, store: StateStore) -> UpdateBatch | None:
        """Every parameter that has a gradient; state is allocated where there is none, and taken over where replaced.

        Args:
            store: ``optimizer.state``.

        Returns:
            The updates; None where no parameter has a gradient.

        Raises:
            TypeError: A parameter or its gradient is of a kind that no kernel reads.
            RuntimeError: What somebody has put into the state does not fit.
        """
        grads = list(map(_GRAD, self._params))
        if self._sharded:
            grads = [None if grad is None else local_part(grad) for grad in grads]
        has_grad = [True] * len(grads)
        if any(map(is_, grads, repeat(None))):
            has_grad = [grad is not None for grad in grads]
            grads = [grad for grad in grads if grad is not None]
        if not grads:
            return None
        before = self._batch if has_grad == self._had_grad and self._still_held(store) else None
        tensors = [*self._locals, *grads]
        signature = None if before is None or not before.signature.matches(tensors) else before.signature
        if signature is None:
            for spec, having in zip(self.specs, has_grad, strict=True):
                if having:
                    check_gradient(spec.name, spec.param)
        if before is None:
            self._hold(has_grad, store)
            chosen = [place for place, having in enumerate(has_grad) if having]
            states = tuple(state for place in chosen if (state := self.states[place]) is not None)
            groups = tuple(self._group_of[place] for place in chosen)
            self._locals = [state.spec.local for state in states]
        else:
            states, groups = before.states, before.groups
        if signature is None:
            signature = TensorSignature([*self._locals, *grads])
        batch = UpdateBatch(states, grads, self.hypers, groups, signature)
        # Gradients belong to the step: keeping them here would keep their memory.
        self._batch, self._had_grad = UpdateBatch(states, (), (), groups, signature), has_grad
        return batch

    def _still_held(self, store: StateStore) -> bool:
        """Whether nobody has replaced ``state[p]`` or a tensor in it, as Lightning and others do that move state."""
        return (
            len(store) == len(self._keys)
            and all(map(is_, store, self._keys))
            and all(map(is_, store.values(), self._entries))
            and sum(map(len, self._dicts)) == len(self._tensors)
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._tensors))
        )

    def _hold(self, has_grad: Sequence[bool], store: StateStore) -> None:
        """States for all parameters that have a gradient or state; one that is as it was stays the same object."""
        wanted = [
            place
            for place, (spec, having) in enumerate(zip(self.specs, has_grad, strict=True))
            if having or store.get(spec.param)
        ]
        for place in wanted:
            check_parameter(self.specs[place].name, self.specs[place].param, steps=True)
        made = ensure_states([self.specs[place] for place in wanted], store)
        now: list[ParamState | None] = [None] * len(self.specs)
        for place, state in zip(wanted, made, strict=True):
            old = self.states[place]
            now[place] = old if old is not None and _same_memory(old, state) else state
        if not (len(now) == len(self.states) and all(map(is_, now, self.states))):
            self.states = now
        self._keys = list(store)
        self._entries = list(store.values())
        self._dicts = [entry for entry in self._entries if isinstance(entry, dict)]
        self._tensors = list(chain.from_iterable(map(dict.values, self._dicts)))


def _copied_names(group: Mapping[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    return None if names is None else list(names)


def _same_memory(a: ParamState, b: ParamState) -> bool:
    mine, others = [a.step, *a.master, *chain(*a.moments)], [b.step, *b.master, *chain(*b.moments)]
    return len(mine) == len(others) and all(map(is_, mine, others))


def plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters with tensors (a tensor lr, tensor betas) read as Python numbers.

    Schedules that end at 0 end a rounding away from it: a learning rate that is negative by so little is 0.

    Args:
        group: A parameter group.

    Returns:
        Everything but the parameters and their names.

    Raises:
        ValueError: A tensor holds more than one number.
    """
    numbers = {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
    lr = numbers.get("lr")
    if isinstance(lr, float) and -ROUNDING_OF_LR < lr < 0.0:
        numbers["lr"] = 0.0
    return numbers


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{key} is a tensor of {value.numel()} numbers: must be one number")
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(key, entry) for entry in value)
    return value
