"""The updates of one step as columns, and whether tensors are still as they were.

What has not changed since the step before is the same object as then: nobody compares it parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from lightning_fuse.kernels.kernel import ParamState, ParamUpdate

# What torch.compile checks before it runs a graph, in C++: Python does the same five times slower.
_GUARDS: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


class TensorSignature:
    """What kind of tensors these were: class, dtype, device, layout, shape and strides of each, whether it negates.

    Args:
        tensors: Any dense tensors; none is kept.

    Attributes:
        negated: Whether one of them is a lazy negation of its memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.negated = any(map(torch.Tensor.is_neg, tensors))
        self._count = len(tensors)
        # The guards refuse to see one object twice, as two parameters may share one gradient.
        apart = _GUARDS is not None and len(set(map(id, tensors))) == len(tensors)
        self._guards = (
            _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if apart and tensors else None
        )
        self._facts = None if self._guards is not None else list(map(_facts, tensors))

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are as those were, one by one; addresses and values may differ."""
        if len(tensors) != self._count:
            return False
        if self._guards is None:
            return list(map(_facts, tensors)) == self._facts
        return bool(self._guards.check(*tensors))


@dataclass(frozen=True, eq=False)
class UpdateBatch(Sequence[ParamUpdate]):
    """All updates of one step.

    Attributes:
        states: The parameters and their state; the same object in the next step where none has changed.
        grads: Their gradients.
        hypers: Hyperparameters of each group as plain numbers.
        groups: The index of each update's group in ``hypers``; the same object in the next step where none has changed.
        signature: Of all parameters and then all gradients; the same object in the next step where they still match.
    """

    states: tuple[ParamState, ...]
    grads: Sequence[Tensor]
    hypers: Sequence[Mapping[str, Any]]
    groups: tuple[int, ...]
    signature: TensorSignature

    @classmethod
    def of(cls, updates: Sequence[ParamUpdate]) -> UpdateBatch:
        """The columns of any updates."""
        if isinstance(updates, UpdateBatch):
            return updates
        states, grads, hypers = zip(*updates, strict=True) if updates else ((), (), ())
        known: dict[int, int] = {}
        groups = tuple(known.setdefault(id(hyper), len(known)) for hyper in hypers)
        apart = {id(hyper): hyper for hyper in hypers}
        params = [state.spec.local for state in states]
        return cls(states, grads, list(apart.values()), groups, TensorSignature([*params, *grads]))

    def __len__(self) -> int:
        return len(self.states)

    @overload
    def __getitem__(self, index: int) -> ParamUpdate: ...

    @overload
    def __getitem__(self, index: slice) -> list[ParamUpdate]: ...

    def __getitem__(self, index: int | slice) -> ParamUpdate | list[ParamUpdate]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return ParamUpdate(self.states[index], self.grads[index], self.hypers[self.groups[index]])


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, strides, tensor.is_neg()
