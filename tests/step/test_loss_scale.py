"""The loss scale is torch's GradScaler, step for step, with a floor."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightning_fuse.step import LossScale

FINITE, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


def stepped(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """One whole step of torch's scaler, over a weight whose gradient is or is not finite."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=0.0)
    scaler.scale(w.sum() * 1.0)
    w.grad = torch.full((1,), math.inf if overflow else 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("chance", [0.002, 0.05, 0.5], ids="overflow={}".format)
def test_it_moves_as_torchs_scaler_does_over_two_thousand_steps(chance):
    settings = {"init_scale": 2.0**15, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 17}
    ours = LossScale(**settings, floor=2.0**-40)
    scaler = torch.amp.GradScaler("cpu", **settings)
    choose = random.Random(chance)
    for step in range(2000):
        overflow = choose.random() < chance
        if ours.value < 2.0**-38:  # keep off the floor, which torch does not have
            overflow = False
        stepped(scaler, overflow)
        ours.move(OVERFLOW if overflow else FINITE)
        assert ours.value == scaler.get_scale(), step
        assert ours.growth_counter == scaler._get_growth_tracker(), step


def test_odd_factors_round_as_torchs():
    settings = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
    ours, scaler = LossScale(**settings), torch.amp.GradScaler("cpu", **settings)
    for overflow in (False, False, True, False, False, False, False, True, False):
        stepped(scaler, overflow)
        ours.move(OVERFLOW if overflow else FINITE)
        assert ours.state_dict() == scaler.state_dict()


def test_state_passes_between_it_and_torchs_scaler_both_ways():
    ours, scaler = LossScale(512.0, growth_interval=10), torch.amp.GradScaler("cpu", init_scale=512.0)
    for _ in range(6):
        ours.move(FINITE)
    scaler.load_state_dict(ours.state_dict())
    for _ in range(4):
        stepped(scaler, False)
        ours.move(FINITE)
    assert ours.value == scaler.get_scale() == 1024.0
    again = LossScale()
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict() == ours.state_dict()


def test_it_never_falls_below_the_floor_and_rises_from_it():
    scale = LossScale(8.0, growth_interval=1, floor=2.0)
    for _ in range(2000):
        scale.move(OVERFLOW)
    assert scale.value == 2.0
    scale.move(FINITE)
    assert scale.value == 4.0


def test_torchs_scaler_reaches_zero():
    """What the floor is for; if this fails, torch has mended it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(200):
        stepped(scaler, True)
    assert scaler.get_scale() == 0.0


def test_it_never_grows_to_infinity():
    scale = LossScale(2.0**127, growth_interval=1)
    for _ in range(3):
        scale.move(FINITE)
    assert math.isfinite(scale.value)


def test_from_grad_scaler_takes_settings_and_state():
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=9)
    for _ in range(5):
        stepped(scaler, False)
    made = LossScale.from_grad_scaler(scaler)
    assert made.state_dict() == scaler.state_dict()
    assert made.growth_counter == 5
    assert LossScale.from_grad_scaler(torch.amp.GradScaler("cpu", init_scale=0.5)).value == 0.5


def test_from_an_unused_grad_scaler():
    assert LossScale.from_grad_scaler(torch.amp.GradScaler("cpu", init_scale=64.0)).value == 64.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"init_scale": math.nan}, "init_scale=nan"),
        ({"floor": 0.0}, "0.0"),
        ({"init_scale": 4.0, "floor": 8.0}, "8.0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        LossScale(**settings)


def test_a_foreign_state_is_refused_with_what_is_missing():
    scale = LossScale(64.0)
    with pytest.raises(ValueError, match="_growth_tracker"):
        scale.load_state_dict({"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2})
    assert scale.value == 64.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_scaled_loss_is_differentiable_and_not_rounded_to_half(dtype):
    w = torch.nn.Parameter(torch.ones((), dtype=torch.float32))
    loss = (w * 3.0).to(dtype)
    scaled = LossScale(2.0**16).scale(loss)
    scaled.backward()
    assert float(scaled.detach()) == 3.0 * 2**16  # beyond float16
    assert scaled.dtype in (torch.float32, torch.float64)


def test_inverse_times_scale_is_one():
    for value in (1.0, 3.0, 65536.0, 1e-3, 12345.0):
        assert float(LossScale(value, floor=1e-4).inverse(torch.device("cpu"))) == pytest.approx(1 / value, rel=1e-7)
