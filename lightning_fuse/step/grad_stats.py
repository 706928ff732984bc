"""The numbers of one step of one optimizer: norm and finiteness of its gradients, and what they are multiplied by.

One reduction over the gradients gives all of them. ``GradStats`` carries them from there to the outcome: nothing copies
or recomputes them. Gradients may still carry the loss scale; norms are in unscaled units.

The numbers are computed in float64 and each multiplier is rounded once, to float32. On a GPU they stay there and
nothing asks for a value; on the host they are Python floats, because a dozen operators on single numbers would cost
more than the reduction. Both give the same bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.distributed.reduction import global_sum_of_squares
from lightning_fuse.kernels.shards import local_part
from lightning_fuse.optim.group_names import parameter_names

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm
KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
# Frameworks whose wrappers of an optimizer only hand its step on to the framework.
WRAPPERS = ("LightningOptimizer", "_FabricOptimizer")
FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric")

Number: TypeAlias = Tensor | float  # a 0-dimensional tensor while only its device knows it

_GRAD, _DTYPE, _PARAMS = attrgetter("grad"), attrgetter("dtype"), itemgetter("params")
_IS_SPARSE = attrgetter("is_sparse")


@dataclass(frozen=True)
class GradStats:
    """The numbers of one step of one optimizer.

    Attributes:
        found_inf: float32, 0-dimensional: other than 0 where a gradient is or was not finite.
        grad_norm: Global L2 norm, unscaled, before any clipping.
        clip_coef: What clipping multiplies, or has multiplied, the gradients by; 1 where nothing was clipped.
        factor: 0-dimensional: what the step multiplies gradients by; None for 1. float32, or float64 where a gradient
            is of a dtype that kernels do not read.
        finite: Whether all gradients are finite; None where only the device knows.
    """

    found_inf: Tensor
    grad_norm: Number
    clip_coef: Number
    factor: Tensor | None
    finite: bool | None


class _Arithmetic(NamedTuple):
    """How single numbers are computed with: on the host, or on a device without asking it for a value."""

    number: Callable[[Tensor], Any]
    sqrt: Callable[[Any], Any]
    at_most_one: Callable[[Any], Any]
    float32: Callable[[Any], Any]


def _float32(number: float) -> float:
    return array("f", (number,))[0]


def _at_most_one(number: float) -> float:
    return min(number, 1.0)  # in this order NaN stays NaN


HOST = _Arithmetic(float, math.sqrt, _at_most_one, _float32)
DEVICE = _Arithmetic(
    lambda tensor: tensor.to(torch.float64),
    torch.sqrt,
    lambda tensor: tensor.clamp(max=1.0),
    lambda tensor: tensor.to(torch.float32),
)


def compute_grad_stats(
    grads: Sequence[Tensor],
    unscale: Tensor | None = None,
    earlier: GradStats | None = None,
    clip_norm: float | None = None,
    *,
    on_host: bool = False,
) -> GradStats:
    """Computes the numbers of one step.

    Args:
        grads: At least one, real and dense; as they are in memory.
        unscale: float32, 0-dimensional: what unscales them; None for 1.
        earlier: Their numbers from before they were unscaled or clipped in memory; None where nobody has.
        clip_norm: The largest norm wanted, in unscaled units; None does not clip.
        on_host: Whether to read the reduction and go on with Python floats.

    Returns:
        The numbers; with ``earlier``, norm and finiteness from then.
    """
    wide = not KERNEL_DTYPES.issuperset(map(_DTYPE, grads))
    total, finite = _reduce_wide(grads) if wide else (global_sum_of_squares(grads), None)
    # A float64 sum of squares of narrower gradients cannot overflow: finite means that all of them are.
    finite = torch.isfinite(total) if finite is None else finite
    numbers = HOST if on_host else DEVICE
    norm, coef, multiplier = numbers.sqrt(numbers.number(total)), None, None
    if unscale is not None:
        multiplier = numbers.number(unscale)
        norm = norm * multiplier
    if clip_norm is not None:
        coef = numbers.at_most_one(clip_norm / (norm + CLIP_EPS))
        coef = coef if wide else numbers.float32(coef)
        multiplier = coef if multiplier is None else multiplier * coef
        multiplier = multiplier if wide else numbers.float32(multiplier)
    factor = unscale if clip_norm is None else _as_factor(multiplier, wide)
    known = bool(finite) if on_host else None
    found_inf = (~finite).to(torch.float32) if known is None else _flag(not known)
    if earlier is not None:
        norm, before = earlier.grad_norm, earlier.clip_coef
        coef = before if coef is None else numbers.float32(before * coef)
        known = None if known is None else known and earlier.finite is not False
        found_inf = torch.maximum(found_inf, earlier.found_inf) if known is None else _flag(not known)
    return GradStats(found_inf, norm, 1.0 if coef is None else coef, factor, known)


class UnscaledGrads:
    """Optimizers whose gradients have been unscaled, and perhaps clipped, in memory since their last step.

    Their numbers from before are kept until the step: a gradient that was not finite then skips it even if it has been
    repaired since, and the outcome reports the norm from before clipping.
    """

    def __init__(self) -> None:
        self._stats: WeakKeyDictionary[Optimizer, GradStats] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return UnscaledGrads, ()  # a copy has no gradients

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._stats

    def pop(self, optimizer: Optimizer) -> GradStats | None:
        """The numbers of an optimizer's gradients from before; forgotten here, because the step comes now."""
        return self._stats.pop(optimizer, None) if self._stats else None

    def unscale(self, optimizer: Optimizer, grads: list[Tensor], factor: Tensor | None, *, on_host: bool) -> None:
        """Unscales in memory.

        Args:
            optimizer: Whose gradients.
            grads: At least one.
            factor: What unscales them, float32, 0-dimensional; None for 1.
            on_host: See ``compute_grad_stats``.

        Raises:
            RuntimeError: They have been unscaled since the last step.
        """
        if optimizer in self._stats:
            raise RuntimeError(
                "the gradients of this optimizer are unscaled already: unscale once per step, "
                "before the first look at them"
            )
        self._stats[optimizer] = compute_grad_stats(grads, factor, on_host=on_host)
        if factor is not None:
            torch._foreach_mul_(list(map(local_part, grads)), factor)

    def clip(self, optimizer: Optimizer, grads: list[Tensor], max_norm: float, *, on_host: bool) -> None:
        """Clips unscaled gradients in memory.

        Args:
            optimizer: Whose gradients.
            grads: At least one.
            max_norm: The largest global L2 norm wanted.
            on_host: See ``compute_grad_stats``.
        """
        earlier = self._stats[optimizer]
        now = compute_grad_stats(grads, None, earlier, max_norm, on_host=on_host)
        if now.factor is not None:
            torch._foreach_mul_(list(map(local_part, grads)), now.factor)
        self._stats[optimizer] = replace(earlier, clip_coef=now.clip_coef)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a wrapper of Lightning or Fabric, or the optimizer itself.

    A wrapper of another kind (Lookahead, SWA) has a step of its own and is left closed, though it keeps its base under
    the same name.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and _is_frameworks(type(optimizer).__mro__):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


@cache
def _is_frameworks(bases: tuple[type, ...]) -> bool:
    return any(base.__name__ in WRAPPERS and base.__module__.split(".")[0] in FRAMEWORKS for base in bases)


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that the optimizer's parameters have, in the order of its groups, as real dense tensors.

    Of a sparse gradient these are its values, of a complex one its real and imaginary parts, both in place.
    """
    params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    found = [grad for grad in map(_GRAD, params) if grad is not None]
    if any(map(_IS_SPARSE, found)) or any(map(torch.is_complex, found)):
        return [_real_and_dense(p) for p in params if p.grad is not None]
    return found


def first_nonfinite(optimizer: Optimizer, names: Mapping[Tensor, str] | None = None) -> str:
    """Says which parameter has the first gradient that is not finite. Reads the device: for error messages only.

    Args:
        optimizer: Whose gradients to look at.
        names: Names of parameters where the optimizer was given none.

    Returns:
        For instance "layer.0.weight (3 of 40 elements)", or "no single parameter" where only their sum overflowed.
    """
    for p, name in _named(optimizer, names or {}):
        if p.grad is not None:
            grad = p.grad.coalesce()._values() if p.grad.is_sparse else local_part(p.grad)
            bad = int((~torch.isfinite(grad)).sum())
            if bad:
                return f"{name} ({bad} of {grad.numel()} elements)"
    return "no single parameter"


def check_max_norm(max_norm: float) -> float:
    """Refuses a clipping norm that cannot be one.

    Args:
        max_norm: The largest norm wanted.

    Returns:
        The same number.

    Raises:
        ValueError: It is not a finite number > 0.
    """
    if not (math.isfinite(max_norm) and max_norm > 0):
        raise ValueError(f"clip norm {max_norm!r}: must be a finite number > 0, or None for no clipping")
    return float(max_norm)


def _reduce_wide(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of squares, and finiteness, of gradients of which some are of a dtype that no kernel reads."""
    device = grads[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for grad in grads:
        total = total + grad.to(torch.float64).square().sum().to(device)
        finite = finite & torch.isfinite(grad).all().to(device)  # squares of float64 may overflow
    return total, finite


def _as_factor(multiplier: Number | None, wide: bool) -> Tensor | None:
    if isinstance(multiplier, Tensor):
        return multiplier
    return (
        None if multiplier in (None, 1.0) else torch.tensor(multiplier, dtype=torch.float64 if wide else torch.float32)
    )


@cache
def _flag(bad: bool) -> Tensor:
    return torch.tensor(float(bad), dtype=torch.float32)


def _real_and_dense(p: Tensor) -> Tensor:
    """A gradient's memory as a real tensor; an index that a sparse one has twice counts once, with the sum."""
    grad = p.grad
    assert grad is not None  # the caller has looked
    if grad.is_sparse:
        if not grad.is_coalesced():
            p.grad = grad = grad.coalesce()
        grad = grad._values()
    if grad.is_complex():
        if grad.is_conj():
            p.grad = grad = grad.resolve_conj()
        grad = torch.view_as_real(grad)
    return grad


def _named(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterable[tuple[Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        for p, name in zip(group["params"], parameter_names(group, index), strict=True):
            yield p, names.get(p, name)
