"""Checks of what a user hands to an optimizer, each with one clear error before anything is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.kernels.kernel import PARAM_DTYPES, ParamSpec, is_wrapped, overlaps
from lightning_fuse.kernels.shards import unsupported_reason
from lightning_fuse.rules.rule import LayerwiseRule

# Torch arguments that choose between torch's own loops.
EXECUTION_KEYS = ("foreach", "fused", "capturable", "differentiable")


def refuse_unsupported(owner: str, arguments: Mapping[str, Any]) -> None:
    """Refuses keyword arguments that an optimizer does not have.

    Args:
        owner: The optimizer's class name.
        arguments: What was left over.

    Raises:
        TypeError: There is one.
    """
    for key in arguments:
        advice = (
            'how the step runs is chosen by kernel="auto"; leave it out' if key in EXECUTION_KEYS else "leave it out"
        )
        raise TypeError(f"{owner} has no argument {key!r}: {advice}")


def number(group: Mapping[str, Any], key: str, *, below: float = math.inf) -> float:
    """One hyperparameter, checked to lie in [0, below).

    Args:
        group: A parameter group as plain numbers.
        key: The hyperparameter.
        below: The first value that is too large.

    Returns:
        The value.

    Raises:
        ValueError: It is not a finite number in that range.
    """
    return in_range(key, group[key], below)


def in_range(label: str, value: Any, below: float = math.inf) -> float:
    """A number checked to lie in [0, below); see ``number``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) < below:
        limit = "a finite number >= 0" if below == math.inf else f"a number in [0, {below:g})"
        raise ValueError(f"{label}={value!r}: must be {limit}")
    return float(value)


def check_adam(group: Mapping[str, Any]) -> None:
    """Refuses Adam hyperparameters out of range.

    Args:
        group: A parameter group as plain numbers.

    Raises:
        ValueError: lr, eps or weight_decay is negative or not finite, or a beta is outside [0, 1).
    """
    for key in ("lr", "eps", "weight_decay"):
        number(group, key)
    check_betas(group)


def check_betas(group: Mapping[str, Any], count: int = 2) -> None:
    """Refuses ``betas`` that are not so many numbers in [0, 1).

    Args:
        group: A parameter group as plain numbers.
        count: How many.

    Raises:
        ValueError: They are not.
    """
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        raise ValueError(f"betas={betas!r}: must be {'a pair of' if count == 2 else count} numbers in [0, 1)")
    for index, beta in enumerate(betas):
        in_range(f"betas[{index}]", beta, 1.0)


def check_nesterov(group: Mapping[str, Any]) -> None:
    """Refuses a momentum out of range, and Nesterov's form without momentum or with dampening.

    Args:
        group: A parameter group as plain numbers.

    Raises:
        ValueError: It is so.
    """
    momentum, dampening = number(group, "momentum"), number(group, "dampening", below=1.0)
    if group["nesterov"] and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov=True with momentum={momentum:g} and dampening={dampening:g}: needs momentum > 0 and dampening 0"
        )


def part_shared_tensors(groups: Sequence[dict[str, Any]], seen: Sequence[Tensor]) -> list[Tensor]:
    """Gives each group a copy of a hyperparameter that several share as one tensor: schedulers write into it.

    Args:
        groups: All groups; changed in place.
        seen: Tensors that were found to be shared before.

    Returns:
        All that were found to be shared; they keep their values.
    """
    held = [(group, key, value) for group in groups for key, value in group.items() if isinstance(value, Tensor)]
    counts = Counter(id(value) for _, _, value in held)
    shared = list(seen)
    for group, key, value in held:
        if counts[id(value)] > 1 or any(value is other for other in seen):
            shared.append(value)
            group[key] = value.clone()
    return shared


def check_parameter(name: str, p: Tensor, *, steps: bool = False) -> None:
    """Refuses parameters that no kernel can update; a frozen one may be of any kind until it gets a gradient.

    Args:
        name: The parameter's name.
        p: The parameter.
        steps: Whether it is about to be stepped, frozen or not.

    Raises:
        TypeError: It is sharded, or not a dense float32, bfloat16 or float16 tensor whose elements have memory of their
            own.
    """
    why = unsupported_reason(p)
    if why:
        raise TypeError(f"parameter {name} is a DTensor that cannot be stepped: {why}")
    if not (p.requires_grad or steps):
        return
    if p.dtype not in PARAM_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in PARAM_DTYPES)
        raise TypeError(f"parameter {name} is {p.dtype}: must be one of {known}; leave it out of the optimizer")
    if p.layout != torch.strided:
        raise TypeError(f"parameter {name} is {p.layout}: must be dense; leave it out of the optimizer")
    if overlaps(p):
        raise TypeError(
            f"parameter {name} is a view whose elements share memory (shape {tuple(p.shape)}, strides {p.stride()}): "
            "each must have its own; build it from .clone() or .contiguous()"
        )


def check_shard(spec: ParamSpec) -> None:
    """Refuses what cannot be computed from the part of a parameter that lies on one rank.

    Args:
        spec: Any parameter.

    Raises:
        NotImplementedError: The rule needs norms of the whole, or blocks of a vector would be cut.
    """
    if spec.shard is None:
        return
    if isinstance(spec.rule, LayerwiseRule):
        raise NotImplementedError(
            f"parameter {spec.name} is sharded, and the rule {spec.rule.name} needs the norm of the whole: "
            "possible with shards: adamw, adam, sgd, lion, ademamix"
        )
    if len(spec.shape) == 1 and spec.state_format.scaled and spec.rule.moments and spec.local_shape != spec.shape:
        raise NotImplementedError(
            f"state={spec.state_format.name!r} of the sharded vector {spec.name}: a shard may begin inside a block; "
            "possible: fp32 or bf16 for vectors, which is the default"
        )


def check_apart(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses two parameters over the same memory, which threads would write to at once.

    Only tensors without gaps are looked at: of others an interval does not say which elements are meant.

    Args:
        named: Names and parameters, of all groups.

    Raises:
        ValueError: Two of them share elements.
    """
    dense = [(p.device, p.data_ptr(), p.nbytes, name) for name, p in named if _fills_its_memory(p)]
    dense.sort(key=lambda entry: (str(entry[0]), *entry[1:]))
    for (device, begin, size, name), (other_device, other, _, other_name) in pairwise(dense):
        if device == other_device and other < begin + size:
            raise ValueError(
                f"parameters {name} and {other_name} share memory, and would be updated twice: "
                "tie weights by using one Parameter in both places, or give each its own with .clone()"
            )


def _fills_its_memory(p: Tensor) -> bool:
    """Whether a parameter is an interval of memory: no gaps, and memory to show."""
    if is_wrapped(p) or p.is_meta or not p.numel():
        return False
    return p.numel() == 1 + sum(stride * (size - 1) for stride, size in zip(p.stride(), p.shape, strict=True))


def check_gradient(name: str, p: Tensor) -> None:
    """Refuses gradients that no kernel can read.

    Args:
        name: The parameter's name.
        p: The parameter, with a gradient.

    Raises:
        TypeError: The gradient is sparse or not float32, bfloat16 or float16.
    """
    grad = p.grad
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise TypeError(f"the gradient of {name} is sparse: must be dense; build the embedding with sparse=False")
    if grad.dtype not in PARAM_DTYPES:
        raise TypeError(f"the gradient of {name} is {grad.dtype}: must be float32, bfloat16 or float16")
