"""The contract makes the same decisions whatever optimizer it steps, and the same updates within rounding."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedSGD
from lightning_fuse.step import LossScale, StepContract

ADAMW = {
    "ours": lambda ps: FusedAdamW(ps, lr=0.01),
    "ours_int8": lambda ps: FusedAdamW(ps, lr=0.01, state="int8"),
    "torch_loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "torch_foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "torch_fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}
RULES = {
    "adamw": lambda ps, fmt: FusedAdamW(ps, lr=0.1, state=fmt),
    "adamw_amsgrad": lambda ps, fmt: FusedAdamW(ps, lr=0.1, amsgrad=True, state=fmt),
    "adam": lambda ps, fmt: FusedAdam(ps, lr=0.1, weight_decay=0.1, state=fmt),
    "adam_amsgrad": lambda ps, fmt: FusedAdam(ps, lr=0.1, amsgrad=True, state=fmt),
    "sgd": lambda ps, fmt: FusedSGD(ps, lr=0.1, weight_decay=0.1),
    "sgd_momentum": lambda ps, fmt: FusedSGD(ps, lr=0.1, momentum=0.9, dampening=0.5, state=fmt),
    "sgd_nesterov": lambda ps, fmt: FusedSGD(ps, lr=0.1, momentum=0.9, nesterov=True, state=fmt),
}
SHAPES = [(3, 140), (5,), (2, 3)]


def gradients(count, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=made) for shape in SHAPES] for _ in range(count)]


def parameters():
    made = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=made)) for shape in SHAPES]


def run(make, steps, clip=None, scale=1024.0, **settings):
    """Steps through gradients, None for a window without; returns parameters, optimizer and outcomes."""
    params = parameters()
    optimizer = make(params)
    contract = StepContract(loss_scale=None if scale is None else LossScale(scale, growth_interval=5), **settings)
    outcomes = []
    for grads in steps:
        size = 1.0 if scale is None else contract.loss_scale.value
        for p, g in zip(params, grads or [None] * len(params), strict=True):
            p.grad = None if g is None else g * size
        contract.accumulate()
        contract.step(optimizer, clip_norm=clip)
        outcomes += contract.update()
    return params, optimizer, outcomes


def with_events():
    steps = gradients(24)
    steps[0][0][0, 0] = inf
    steps[7][1][2] = nan
    steps[8][2][0, 0] = -inf
    steps[12] = None
    return steps


@pytest.mark.parametrize("clip", [None, 1.0])
def test_decisions_do_not_depend_on_the_optimizer(clip):
    expected = None
    for make in ADAMW.values():
        params, _, outcomes = run(make, with_events(), clip)
        decisions = [(o.global_step, o.update, o.reason, o.loss_scale_before, o.loss_scale_after) for o in outcomes]
        norms = [o.grad_norm for o in outcomes if o.applied]
        if expected is None:
            expected = (decisions, norms, params)
        assert decisions == expected[0]
        assert norms == pytest.approx(expected[1], rel=1e-6)
        for p, q in zip(params, expected[2], strict=True):
            # Int8 moments: 20 updates of 0.01, each within a tenth of the float32 ones.
            torch.testing.assert_close(p, q, rtol=0, atol=0.02)
    assert [one[2] for one in expected[0]].count("nonfinite") == 3


@pytest.mark.parametrize("name", ["torch_loop", "torch_foreach", "torch_fused"])
def test_updates_are_torchs_within_rounding(name):
    ours, theirs = run(ADAMW["ours"], with_events(), 1.0)[0], run(ADAMW[name], with_events(), 1.0)[0]
    for p, q in zip(ours, theirs, strict=True):
        # 20 updates of at most 0.01: each rounds the weight (size up to 4) to half an ulp, 2.4e-7, and the update.
        torch.testing.assert_close(p, q, rtol=0, atol=20 * 2.4e-7 + 20 * 0.01 * 1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", list(STATE_FORMATS))
def test_case_11_an_overflow_on_the_first_step_leaves_no_trace(rule, fmt):
    """Case 11: [inf, g, g] is [g, g], in parameters and all state, bit for bit."""
    steps = gradients(2, seed=5)
    first = [g.clone() for g in steps[0]]
    first[0][0, 0] = inf
    for clip in (None, 1.0):
        with_bad, a, outcomes = run(lambda ps: RULES[rule](ps, fmt), [first, *steps], clip, scale=None)
        without, b, _ = run(lambda ps: RULES[rule](ps, fmt), steps, clip, scale=None)
        assert [o.reason for o in outcomes] == ["nonfinite", "ok", "ok"]
        for p, q in zip(with_bad, without, strict=True):
            assert torch.equal(p, q)
            assert a.state[p].keys() == b.state[q].keys()
            for key in a.state[p]:
                assert torch.equal(a.state[p][key], b.state[q][key])


def test_case_11_stock_fused_sgd_uses_an_uninitialised_buffer_after_an_overflow():
    """The stock side of case 11; if this fails, torch has mended it."""
    w = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    w.grad = torch.full((64,), inf)
    optimizer.step()
    buffer = optimizer.state[w]["momentum_buffer"]
    assert buffer is not None  # allocated, taken for initialised, never written
    buffer.fill_(100.0)
    optimizer.found_inf = torch.tensor(0.0)
    w.grad = torch.ones(64)
    optimizer.step()
    assert not torch.allclose(w, torch.full((64,), 0.9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [2.0**16, 2.0**10])
def test_gradients_of_16_bits_are_unscaled_without_losing_the_factor(dtype, scale):
    """1/scale is below float16's normal range: as a float16 factor it would lose bits or vanish."""
    moved = []
    for make in (FusedSGD, torch.optim.SGD):
        w = torch.nn.Parameter(torch.zeros(40, dtype=dtype))
        optimizer, contract = make([w], lr=1.0), StepContract(loss_scale=LossScale(scale))
        w.grad = torch.full((40,), 0.75 * min(scale, 2.0**14), dtype=dtype)
        contract.accumulate()
        contract.step(optimizer, clip_norm=1e9, window=3)  # a factor of 3 / scale
        contract.update()
        moved.append(-w[0].item())
    exact = 3 * 0.75 * min(scale, 2.0**14) / scale
    # Ours rounds once, torch's optimizer once for the gradient in memory and once for the weight.
    assert moved == pytest.approx([exact, exact], rel=2 * 2.0 ** (-11 if dtype == torch.float16 else -8))
