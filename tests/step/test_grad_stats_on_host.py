"""Numbers on the host and on the device: the same bits, whatever was looked at, clipped and scaled before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_fuse.step.grad_stats import GradStats, compute_grad_stats

FACTORS = [None, 1.0, 2.0**-16, 4 / 3, 3e-39]  # the last one is subnormal in float32
CLIPS = [None, 1e-30, 0.3, 1e9]
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
FLOATS = {bits: kind for kind, bits in BITS.items()}


def as_bits(number: Tensor | float, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(number, dtype=dtype).view(BITS[dtype])


def numbers(judged: GradStats) -> list[Tensor]:
    """All of them as bits; a factor of None stands for 1."""
    factor = 1.0 if judged.factor is None else judged.factor
    return [
        as_bits(judged.found_inf, torch.float32),
        as_bits(judged.grad_norm, torch.float64),
        as_bits(judged.clip_coef, torch.float32),
        as_bits(factor, torch.float32),
    ]


def look(clip_coef: float | None, found_inf: float, on_host: bool) -> GradStats:
    """Numbers from before somebody looked at the gradients."""
    coef, norm = 1.0 if clip_coef is None else float(torch.tensor(clip_coef)), 12.345678901
    if on_host:
        return GradStats(torch.tensor(found_inf), norm, coef, None, found_inf == 0.0)
    norm_there = torch.tensor(norm, dtype=torch.float64)
    return GradStats(torch.tensor(found_inf), norm_there, torch.tensor(coef), None, None)


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20, math.inf])
def test_both_ways_give_the_same_bits(factor: float | None, clip_norm: float | None, size: float) -> None:
    made = torch.Generator().manual_seed(7)
    for seed in range(20):
        grads = [torch.randn(n, generator=made) * size for n in (1, 5, 130 + seed)]
        unscale = None if factor is None else torch.tensor(factor)
        known = compute_grad_stats(grads, unscale, None, clip_norm, on_host=True)
        launched = compute_grad_stats(grads, unscale, None, clip_norm)
        assert known.finite is (size != math.inf)
        assert launched.finite is None
        # NaN has many bits: what counts is that both are NaN.
        for mine, its in zip(numbers(known), numbers(launched), strict=True):
            assert torch.equal(mine, its) or all(t.view(FLOATS[t.dtype]).isnan() for t in (mine, its))


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("before", [None, 0.37])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_both_ways_respect_what_was_seen_before(
    clip_norm: float | None, before: float | None, found_inf: float
) -> None:
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([0.1])]
    known = compute_grad_stats(grads, None, look(before, found_inf, True), clip_norm, on_host=True)
    launched = compute_grad_stats(grads, None, look(before, found_inf, False), clip_norm)
    assert known.finite is not bool(found_inf)
    assert all(map(torch.equal, numbers(known), numbers(launched)))
    assert known.grad_norm == 12.345678901
    now = 1.0 if clip_norm is None else min(1.0, clip_norm / math.sqrt(25.01))
    assert known.clip_coef == pytest.approx((before or 1.0) * now, rel=1e-6)


def test_a_factor_that_is_there_is_used() -> None:
    """The negative control: what is compared above is not always one and the same number."""
    grads = [torch.tensor([3.0, 4.0])]
    judged = compute_grad_stats(grads, torch.tensor(0.5), None, 1.0, on_host=True)
    assert (judged.grad_norm, judged.finite) == (2.5, True)
    assert judged.clip_coef == pytest.approx(0.4, rel=1e-6)
    assert judged.factor is not None
    assert float(judged.factor) == pytest.approx(0.2, rel=1e-6)
