"""The reference kernel: plain torch on any device. It defines the bits that every other kernel must give.

It is written to be read, not to be fast: parameter by parameter, with temporary tensors of the parameter's size. On a
GPU it reads the step counters and ``found_inf`` on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.format import Place
from lightning_fuse.formats.master import canonical_nan
from lightning_fuse.kernels.kernel import PARAM_DTYPES, Slot, StepKernel, Support, Work
from lightning_fuse.rules.rule import UpdateRule

SUM_ROW = 1024  # elements that one partial sum covers
SUM_CHUNK = 1024 * SUM_ROW  # elements looked at together; bounds the float64 copy to 8 MiB


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
        partials = [
            _chunk_sum(chunk) for grad in grads if grad.numel() for chunk in grad.detach().reshape(-1).split(SUM_CHUNK)
        ]
        device = grads[0].device if grads else torch.device("cpu")
        if not partials:
            return torch.zeros((), dtype=torch.float64, device=device)
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        return total


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
    moments = tuple(stored.codec.decode(stored.tensors) for stored in slot.moments)
    weight, moments = slot.rule.update(weight, grad, moments, scalars)
    if slot.master_tensors:
        weight = canonical_nan(weight)
    param, master = slot.master.split(weight, slot.param.dtype, place)
    slot.param.copy_(param)
    _overwrite(slot.master_tensors, master)
    for stored, values in zip(slot.moments, moments, strict=True):
        _overwrite(stored.tensors, stored.codec.encode(values, place))
    slot.step.fill_(step)


def _overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


def _chunk_sum(flat: Tensor) -> Tensor:
    """Sums squares in rows of fixed length: torch splits work over rows, never inside one."""
    squares = flat.to(torch.float64).square()
    whole = flat.numel() // SUM_ROW * SUM_ROW
    rows = squares[:whole].view(-1, SUM_ROW).sum(dim=1)
    return rows.sum() + squares[whole:].sum()
