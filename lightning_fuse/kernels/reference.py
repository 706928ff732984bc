"""The reference kernel: plain torch on any device. It defines the bits that every other kernel must give.

It is written to be read, not to be fast: parameter by parameter, and each in slices along dimension 0 of about 16,384
elements, at least one row, so that temporary tensors do not grow with the parameter. Blocks lie inside rows, so a slice
is stepped like a parameter of its own. On a GPU it reads the step counters and ``found_inf`` on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.blocks import BLOCK, row_length
from lightning_fuse.formats.format import DitherKey, TensorSpec, decode_moments, encode_moments
from lightning_fuse.formats.master import canonical_nan
from lightning_fuse.kernels.chunks import chunk_ends
from lightning_fuse.kernels.kernel import (
    PARAM_DTYPES,
    ParamSpec,
    ParamState,
    ParamUpdate,
    StepKernel,
    Support,
    check_fits,
    is_wrapped,
)
from lightning_fuse.rules.rule import LayerwiseRule, UpdateRule

SLICE = 1 << 14  # elements stepped at a time, where rows are not longer
SUM_LANES = 32  # running sums of a chunk of at most 65,536 elements, whose float64 copy takes 512 KiB


class ReferenceKernel(StepKernel):
    """The word ``reference``."""

    name = "reference"

    def supports(self, spec: ParamSpec) -> Support:
        """See ``StepKernel.supports``: everything that the optimizer lets in."""
        if spec.local.dtype not in PARAM_DTYPES:
            return Support(False, f"parameters must be float32, bfloat16 or float16, not {spec.local.dtype}")
        return Support(True)

    @torch.no_grad()
    def step(self, updates: Sequence[ParamUpdate], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """See ``StepKernel.step``."""
        if found_inf is not None and bool(found_inf):
            return
        for update in updates:
            check_fits(update.state.spec, update.grad)
        known: dict[tuple[int, int, UpdateRule], dict[str, float]] = {}
        for update in updates:
            step, rule = int(update.state.step) + 1, update.state.spec.rule
            key = (id(update.hyper), step, rule)
            if key not in known:
                known[key] = float32_scalars(rule, update.hyper, step)
            _step_parameter(update, step, known[key], factor)

    def supports_reduction(self, device: torch.device) -> bool:
        """See ``StepKernel.supports_reduction``: any device."""
        return True

    @torch.no_grad()
    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """See ``StepKernel.sum_of_squares``."""
        device = grads[0].device if grads else torch.device("cpu")
        flat = map(_as_it_lies, grads)
        return add_up([partial for grad in flat for partial in ordered_sums(grad, grad.numel())], device)


def float32_scalars(rule: UpdateRule, group: Mapping[str, Any], step: int) -> dict[str, float]:
    """The scalars of one update, each rounded from float64 to float32 once.

    Args:
        rule: The update rule.
        group: Hyperparameters as plain numbers.
        step: The number of this update for the parameter, from 1.

    Returns:
        Scalars by name; every value is a float32 number.
    """
    scalars = rule.scalars(group, step)
    rounded = torch.tensor(list(scalars.values()), dtype=torch.float64).to(torch.float32).tolist()
    return dict(zip(scalars, rounded, strict=True))


def _step_parameter(update: ParamUpdate, step: int, scalars: Mapping[str, float], factor: Tensor | None) -> None:
    rule = update.state.spec.rule
    if isinstance(rule, LayerwiseRule):
        scalars = {**scalars, "trust": _trust(rule, update, scalars, factor)}
    for part in _slices(update):
        state, spec = part.state, part.state.spec
        key = DitherKey(step, spec.first_index)
        weight, moments = rule.update(*_opened(part, factor), scalars)
        if state.master:
            weight = canonical_nan(weight)
        param, master = spec.master.split(weight, spec.local.dtype, key)
        spec.local.copy_(param)
        _overwrite(state.master, master)
        for stored, parts in zip(state.moments, encode_moments(rule.moments, spec.codecs, moments, key), strict=True):
            _overwrite(stored, parts)
    update.state.step.fill_(step)


def _slices(update: ParamUpdate) -> Iterator[ParamUpdate]:
    """One parameter's update cut along dimension 0; views of the same memory. A vector is cut between blocks."""
    state, spec = update.state, update.state.spec
    shape = spec.local_shape
    if spec.local.numel() <= SLICE or is_wrapped(spec.local):
        yield update
        return
    row = math.prod(shape[1:])
    length = max(1, SLICE // row) if len(shape) > 1 else SLICE // BLOCK * BLOCK
    for begin in range(0, shape[0], length):
        count = min(length, shape[0] - begin)
        before, inside = (begin, *shape[1:]), (count, *shape[1:])
        moments = tuple(
            _cut(tensors, codec.parts(before), codec.parts(inside))
            for tensors, codec in zip(state.moments, spec.codecs, strict=True)
        )
        master = _cut(state.master, spec.master.parts(before), spec.master.parts(inside))
        local, first = spec.local.narrow(0, begin, count), spec.first_index + begin * row
        part = replace(spec, param=local, shard=None, first_index=first)
        yield ParamUpdate(
            ParamState(part, state.step, moments, master), update.grad.narrow(0, begin, count), update.hyper
        )


def _cut(tensors: Sequence[Tensor], before: Sequence[TensorSpec], inside: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """The state of a slice, given that of all that lies before it."""
    return tuple(
        tensor.narrow(0, part.shape[0], own.shape[0]) for tensor, part, own in zip(tensors, before, inside, strict=True)
    )


def _opened(update: ParamUpdate, factor: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Weight, gradient and moments of one slice as the rule takes them, float32."""
    state, spec = update.state, update.state.spec
    grad = update.grad.to(torch.float32)
    if factor is not None:
        grad = grad * factor
    if update.hyper["maximize"]:
        grad = -grad
    moments = decode_moments(spec.rule.moments, spec.codecs, state.moments)
    return spec.master.join(spec.local, state.master), grad, moments


def _trust(rule: LayerwiseRule, update: ParamUpdate, scalars: Mapping[str, float], factor: Tensor | None) -> float:
    """The trust ratio as a float32 number; the norms of one parameter, in row-major order, are read on the host."""
    param = update.state.spec.local
    ends = chunk_ends(param.numel(), row_length(param.shape))
    measured = (rule.measured(*_opened(part, factor), scalars) for part in _slices(update))
    chunks = _chunks((torch.stack([tensor.reshape(-1) for tensor in both]) for both in measured), ends)
    sums = add_up((torch.stack(list(map(_chunk_sum, chunk))) for chunk in chunks), param.device)
    norms = sums.sqrt().expand(2).tolist()  # of an empty parameter there is one sum, 0
    return torch.tensor(rule.trust(norms[0], norms[1], scalars), dtype=torch.float64).to(torch.float32).item()


def _overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


def ordered_sums(flat: Tensor, row: int) -> list[Tensor]:
    """Sums squares in an order that does not depend on threads or vectors, so that other kernels can repeat it.

    The elements are cut into chunks of 65,536, or fewer where a block would be cut. A chunk keeps 32 running sums
    (element k goes to sum k mod 32; what is left over after the last 32 goes to one more), which are added pairwise:
    the lower and the upper half, until one is left, and then the one more.

    Args:
        flat: float32, bfloat16 or float16, 1-dimensional.
        row: Elements in which blocks lie without a cut.

    Returns:
        One float64 sum for each chunk, 0-dimensional; to be added up one after the other.
    """
    return list(map(_chunk_sum, _chunks([flat], chunk_ends(flat.numel(), row))))


def _chunks(parts: Iterable[Tensor], ends: Sequence[int]) -> Iterator[Tensor]:
    """Vectors, or rows of several side by side, that come in parts, cut into chunks with the given ends."""
    parts, held, begin = iter(parts), torch.empty(0), 0
    for end in ends:
        while held.shape[-1] < end - begin:
            more = next(parts)
            held = torch.cat((held, more), dim=-1) if held.shape[-1] else more
        yield held[..., : end - begin]
        held, begin = held[..., end - begin :], end


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory: a dense tensor is not copied."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def _chunk_sum(chunk: Tensor) -> Tensor:
    squares = chunk.to(torch.float64).square()
    whole = squares.numel() // SUM_LANES * SUM_LANES
    # A cumulative sum is the sequential one; torch's own sum would choose its order.
    lanes = squares[:whole].view(-1, SUM_LANES).cumsum(dim=0)[-1] if whole else squares.new_zeros(SUM_LANES)
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    rest = squares[whole:].cumsum(dim=0)[-1] if whole < squares.numel() else squares.new_zeros(())
    return lanes[0] + rest


def add_up(partials: Iterable[Tensor], device: torch.device) -> Tensor:
    """Adds float64 numbers one after the other, from 0."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for partial in partials:
        total = total + partial
    return total
