"""The stats against a float64 oracle and against torch's own clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_fuse.step.grad_stats import compute_grad_stats, first_nonfinite, gradients

ONE = torch.ones(())
SHAPES = [(1,), (7,), (128, 3), (5, 0), (1025,), (3, 5, 7), ()]


def some(dtype=torch.float32, size=1.0, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=made) * size).to(dtype) for shape in SHAPES]


def oracle_norm(grads, factor=1.0):
    total = sum(float(np.sum(np.square(g.double().numpy()))) for g in grads)
    return math.sqrt(total) * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 2.0**-16, 4 / 3])
def test_norm_against_float64(dtype, factor):
    grads = some(dtype)
    stats = compute_grad_stats(grads, torch.tensor(factor))
    # Sums of float64 squares: the order of the terms changes at most count * 2^-53 of the sum.
    assert float(stats.grad_norm) == pytest.approx(oracle_norm(grads, float(torch.tensor(factor))), rel=1e-12)
    assert float(stats.found_inf) == 0.0


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e37])
def test_norms_whose_squares_leave_float32(size):
    grads = some(size=size)
    stats = compute_grad_stats(grads, ONE)
    assert float(stats.grad_norm) == pytest.approx(oracle_norm(grads), rel=1e-12)
    assert float(stats.found_inf) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 2, 4, 6])
def test_one_bad_element_anywhere_is_found(bad, place):
    grads = some()
    grads[place].view(-1)[-1] = bad
    stats = compute_grad_stats(grads, ONE)
    assert float(stats.found_inf) == 1.0
    assert not math.isfinite(float(stats.grad_norm))


def test_infinities_of_both_signs_do_not_cancel():
    assert float(compute_grad_stats([torch.tensor([math.inf, -math.inf])], ONE).found_inf) == 1.0


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1.0, 1e9])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_clip_coef_is_torchs(max_norm, size):
    grads = some(size=size)
    parameters = [torch.nn.Parameter(g.clone()) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    coef = compute_grad_stats(grads, ONE, None, max_norm).clip_coef
    for p, g in zip(parameters, grads, strict=True):
        # torch's norm is a float32 sum over 1,600 elements: a few float32 ulps.
        torch.testing.assert_close(g * coef, p.grad, rtol=2e-6, atol=0.0)


def test_clip_coef_is_one_at_the_limit_and_never_more():
    assert float(compute_grad_stats([torch.full((4,), 0.5)], ONE, None, 2.0).clip_coef) == 1.0
    assert float(compute_grad_stats([torch.zeros(4)], ONE, None, 1e-3).clip_coef) == 1.0


def test_layout_does_not_matter():
    g = torch.randn(33, 65)
    wide = torch.randn(33, 130)
    wide[:, ::2] = g
    for same in (g.t(), g.t().contiguous().t(), wide[:, ::2]):
        assert float(compute_grad_stats([same], ONE).grad_norm) == pytest.approx(oracle_norm([g]), rel=1e-12)


def test_the_same_bits_at_any_number_of_threads():
    before = torch.get_num_threads()
    grads = [torch.randn(1_500_000), torch.randn(700, 1025), torch.randn(3)]
    try:
        bits = set()
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            bits.add(float(compute_grad_stats(grads, ONE).grad_norm).hex())
    finally:
        torch.set_num_threads(before)
    assert len(bits) == 1


def test_gradients_skips_parameters_without():
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    b.grad = torch.ones(3)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0)
    assert [tuple(g.shape) for g in gradients(optimizer)] == [(3,)]


def test_the_first_bad_parameter_is_named_in_group_order():
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    a.grad, b.grad = torch.ones(2), torch.tensor([1.0, math.nan, math.inf])
    assert first_nonfinite(torch.optim.SGD([("first", a), ("second", b)], lr=1.0)) == "second (2 of 3 elements)"
    assert "0.1" in first_nonfinite(torch.optim.SGD([a, b], lr=1.0))
    assert "mine" in first_nonfinite(torch.optim.SGD([a, b], lr=1.0), {b: "mine"})
