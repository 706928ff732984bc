"""The reference kernel: plain torch on any device. It defines the bits that every other kernel must give.

It is written to be read, not to be fast: parameter by parameter, with temporary tensors of the parameter's size. On a
GPU it reads the step counters and ``found_inf`` on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.format import Place, decode_moments, encode_moments
from lightning_fuse.formats.int8 import row_length
from lightning_fuse.formats.master import canonical_nan
from lightning_fuse.kernels.kernel import PARAM_DTYPES, Slot, StepKernel, Support, Work, check_fits
from lightning_fuse.kernels.pieces import piece_ends
from lightning_fuse.rules.rule import LayerwiseRule, UpdateRule

SUM_LANES = 32  # running sums of a piece of at most 65,536 elements, whose float64 copy takes 512 KiB


class ReferenceKernel(StepKernel):
    """The word ``reference``."""

    name = "reference"

    def supports(self, slot: Slot) -> Support:
        """See ``StepKernel.supports``: everything that the optimizer lets in."""
        if slot.param.dtype not in PARAM_DTYPES:
            return Support(False, f"parameters must be float32, bfloat16 or float16, not {slot.param.dtype}")
        return Support(True)

    @torch.no_grad()
    def step(self, work: Sequence[Work], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """See ``StepKernel.step``."""
        if found_inf is not None and bool(found_inf):
            return
        for item in work:
            check_fits(item.slot, item.grad)
        known: dict[tuple[int, int, UpdateRule], dict[str, float]] = {}
        for item in work:
            step = int(item.slot.step) + 1
            key = (id(item.group), step, item.slot.rule)
            if key not in known:
                known[key] = float32_scalars(item.slot.rule, item.group, step)
            _step_parameter(item, step, known[key], factor)

    def reads(self, device: torch.device) -> bool:
        """See ``StepKernel.reads``: any device."""
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


def _step_parameter(work: Work, step: int, scalars: Mapping[str, float], factor: Tensor | None) -> None:
    slot, place = work.slot, Place(step, work.slot.index_start)
    grad = work.grad.to(torch.float32)
    if factor is not None:
        grad = grad * factor
    if work.group["maximize"]:
        grad = -grad
    weight = slot.master.join(slot.param, slot.master_tensors)
    kinds, codecs = [stored.moment for stored in slot.moments], [stored.codec for stored in slot.moments]
    moments = decode_moments(kinds, codecs, [stored.tensors for stored in slot.moments])
    if isinstance(slot.rule, LayerwiseRule):
        scalars = {**scalars, "trust": _trust(slot.rule, weight, grad, moments, scalars)}
    weight, moments = slot.rule.update(weight, grad, moments, scalars)
    if slot.master_tensors:
        weight = canonical_nan(weight)
    param, master = slot.master.split(weight, slot.param.dtype, place)
    slot.param.copy_(param)
    _overwrite(slot.master_tensors, master)
    for stored, parts in zip(slot.moments, encode_moments(kinds, codecs, moments, place), strict=True):
        _overwrite(stored.tensors, parts)
    slot.step.fill_(step)


def _trust(
    rule: LayerwiseRule, weight: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Mapping[str, float]
) -> float:
    """The trust ratio as a float32 number; the norms of one parameter, in row-major order, are read on the host."""
    norms = [
        math.sqrt(add_up(ordered_sums(x.reshape(-1), row_length(x.shape)), x.device).item())
        for x in rule.measured(weight, grad, moments, scalars)
    ]
    return torch.tensor(rule.trust(norms[0], norms[1], scalars), dtype=torch.float64).to(torch.float32).item()


def _overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


def ordered_sums(flat: Tensor, row: int) -> list[Tensor]:
    """Sums squares in an order that does not depend on threads or vectors, so that other kernels can repeat it.

    The elements are cut into pieces of 65,536, or fewer where a block would be cut. A piece keeps 32 running sums
    (element k goes to sum k mod 32; what is left over after the last 32 goes to one more), which are added pairwise:
    the lower and the upper half, until one is left, and then the one more.

    Args:
        flat: float32, bfloat16 or float16, 1-dimensional.
        row: Elements in which blocks lie without a cut.

    Returns:
        One float64 sum for each piece, 0-dimensional; to be added up one after the other.
    """
    ends = piece_ends(flat.numel(), row)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [_piece_sum(piece.to(torch.float64).square()) for piece in flat.split(sizes)] if sizes else []


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory: a dense tensor is not copied."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def _piece_sum(squares: Tensor) -> Tensor:
    whole = squares.numel() // SUM_LANES * SUM_LANES
    # A cumulative sum is the sequential one; torch's own sum would choose its order.
    lanes = squares[:whole].view(-1, SUM_LANES).cumsum(dim=0)[-1] if whole else squares.new_zeros(SUM_LANES)
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    rest = squares[whole:].cumsum(dim=0)[-1] if whole < squares.numel() else squares.new_zeros(())
    return lanes[0] + rest


def add_up(partials: Sequence[Tensor], device: torch.device) -> Tensor:
    """Adds float64 numbers one after the other, from 0."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for partial in partials:
        total = total + partial
    return total
