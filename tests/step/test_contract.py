"""The contract in a plain loop: one law per test."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
import torch

from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedSGD
from lightning_fuse.step import LossScale, NonFiniteGradientError, StepContract

OPTIMIZERS = {
    "sgd_fused": lambda ps: FusedSGD(ps, lr=1.0),
    "sgd_torch": lambda ps: torch.optim.SGD(ps, lr=1.0),
}


def weight(grad=None, count=4, dtype=torch.float32):
    w = torch.nn.Parameter(torch.ones(count, dtype=dtype))
    if grad is not None:
        w.grad = torch.full((count,), float(grad), dtype=dtype)
    return w


def step(contract, optimizer, grad=None, **settings):
    """One step on a gradient that already carries the loss scale; returns the outcome."""
    w = optimizer.param_groups[0]["params"][0]
    scale = 1.0 if contract.loss_scale is None else contract.loss_scale.value
    w.grad = None if grad is None else torch.full_like(w, grad * scale)
    contract.accumulate()
    contract.step(optimizer, **settings)
    (outcome,) = contract.update()
    return outcome


def bits(optimizer):
    params = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return params + [t.clone() for s in optimizer.state.values() for t in s.values()]


def assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


def test_a_good_step_in_unscaled_units(make):
    contract, w = StepContract(loss_scale=LossScale(1024.0)), weight()
    outcome = step(contract, make([w]), 0.5, clip_norm=0.5)
    assert w.tolist() == pytest.approx([0.75] * 4, abs=1e-6)
    assert (outcome.grad_norm, outcome.clip_coef) == (1.0, pytest.approx(0.5, rel=1e-5))
    assert (outcome.loss_scale_before, outcome.loss_scale_after) == (1024.0, 1024.0)
    assert (outcome.global_step, outcome.update, outcome.applied, outcome.reason) == (1, 1, True, "ok")


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_a_bad_step_writes_nothing_and_halves_the_scale(make, bad):
    contract, w = StepContract(loss_scale=LossScale(1024.0)), weight()
    outcome = step(contract, make([w]), bad, clip_norm=0.5)
    assert w.tolist() == [1.0] * 4
    assert (outcome.applied, outcome.reason, outcome.update) == (False, "nonfinite", 0)
    assert (outcome.loss_scale_before, outcome.loss_scale_after) == (1024.0, 512.0)
    assert contract.skips["nonfinite"] == 1


def test_without_a_scale_the_skip_is_the_same(make):
    contract, w = StepContract(), weight()
    assert step(contract, make([w]), nan).reason == "nonfinite"
    assert w.tolist() == [1.0] * 4
    assert step(contract, make([w]), 1.0).loss_scale_before is None


def test_step_all_the_same_when_told(make):
    contract, w = StepContract(on_nonfinite="step"), weight()
    outcome = step(contract, make([w]), inf)
    assert outcome.applied
    assert not torch.isfinite(w).any()


def test_raise_names_place_and_parameter_and_writes_nothing():
    contract, w = StepContract(on_nonfinite="raise", loss_scale=LossScale(8.0)), weight(inf)
    optimizer = FusedAdamW([("layer.weight", w)])
    contract.accumulate()
    with pytest.raises(NonFiniteGradientError, match=r"batch 17.*layer\.weight \(4 of 4") as raised:
        contract.step(optimizer, where="batch 17")
    assert "nothing was written" in str(raised.value)
    assert w.tolist() == [1.0] * 4
    assert contract.loss_scale.value == 8.0


def test_after_a_raise_the_contract_is_as_if_the_window_had_not_been(make):
    contract, w = StepContract(on_nonfinite="raise"), weight(inf)
    optimizer = make([w])
    contract.accumulate()
    with pytest.raises(NonFiniteGradientError):
        contract.step(optimizer, window=4)
    outcome = step(contract, optimizer, 0.25, window=4)
    assert (outcome.window_size, outcome.grad_norm) == (1, 2.0)
    assert w.tolist() == [0.0] * 4


def test_no_gradient_moves_nothing(make):
    contract, w = StepContract(loss_scale=LossScale(64.0, growth_interval=2)), weight()
    optimizer = make([w])
    step(contract, optimizer, 1.0)
    outcome = step(contract, optimizer, None)
    assert (outcome.reason, outcome.applied, outcome.grad_norm) == ("no_grad", False, None)
    assert (contract.loss_scale.value, contract.loss_scale.growth_counter) == (64.0, 1)
    assert w.tolist() == [0.0] * 4


def test_a_veto_moves_no_counter_of_state_and_is_for_one_step(make):
    contract, w = StepContract(loss_scale=LossScale(64.0, growth_interval=3)), weight()
    optimizer = make([w])
    step(contract, optimizer, 0.0)
    contract.skip_next()
    outcome = step(contract, optimizer, inf)
    assert (outcome.reason, outcome.global_step, outcome.update) == ("user", 2, 1)
    assert (contract.loss_scale.value, contract.loss_scale.growth_counter) == (64.0, 1)
    assert step(contract, optimizer, 0.25).reason == "ok"
    assert w.tolist() == [0.75] * 4


def test_a_veto_after_unscale_lets_the_next_unscale_pass(make):
    contract, w = StepContract(loss_scale=LossScale(4.0)), weight(4.0)
    optimizer = make([w])
    contract.accumulate()
    contract.unscale_(optimizer)
    contract.skip_next()
    contract.step(optimizer)
    contract.update()
    w.grad = torch.full((4,), 4.0)
    contract.unscale_(optimizer)
    assert w.grad.tolist() == [1.0] * 4


def test_unscale_twice_is_refused_in_words(make):
    contract, w = StepContract(loss_scale=LossScale(4.0)), weight(1.0)
    optimizer = make([w])
    contract.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscaled already"):
        contract.unscale_(optimizer)
    assert w.grad.tolist() == [0.25] * 4


@pytest.mark.parametrize("scale", [None, 1024.0, 3.0])
def test_what_overflowed_before_somebody_repaired_it_is_still_an_overflow(make, scale):
    contract, w = StepContract(loss_scale=None if scale is None else LossScale(scale)), weight(inf)
    optimizer = make([w])
    contract.accumulate()
    contract.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_([w], 0.5)
    assert w.grad.tolist() == [0.5] * 4
    contract.step(optimizer)
    assert contract.update()[0].reason == "nonfinite"
    assert w.tolist() == [1.0] * 4


def test_the_norm_of_the_outcome_is_the_one_before_others_clip(make):
    contract, w = StepContract(loss_scale=LossScale(2.0)), weight(2.0)
    optimizer = make([w])
    contract.accumulate()
    contract.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_([w], 0.5)
    contract.step(optimizer)
    assert contract.update()[0].grad_norm == 2.0
    assert w.tolist() == [0.5] * 4


@pytest.mark.parametrize("given", [0.0, -1.0, inf, nan])
def test_a_clip_norm_that_cannot_be_one(make, given):
    w = weight(1.0)
    with pytest.raises(ValueError, match="clip norm"):
        StepContract().step(make([w]), clip_norm=given)
    assert w.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_nonfinite": "ignore"}, "skip"),
        ({"window": "median"}, "mean"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=0"),
    ],
)
def test_unknown_choices_are_refused_with_the_known(settings, said):
    with pytest.raises(ValueError, match=said):
        StepContract(**settings)


def test_the_limit_counts_steps_in_a_row(make):
    contract, w = StepContract(max_consecutive_skips=2), weight()
    optimizer = make([w])
    for grad in (inf, inf, 0.0, inf, inf):
        step(contract, optimizer, grad)
    with pytest.raises(NonFiniteGradientError, match="3 steps in a row"):
        step(contract, optimizer, inf)
    assert w.tolist() == [1.0] * 4


def test_each_optimizer_has_its_own_streak(make):
    contract = StepContract(max_consecutive_skips=3)
    a, b = weight(), weight()
    first, second = make([a]), make([b])

    def both():
        a.grad, b.grad = torch.full((4,), inf), torch.zeros(4)
        contract.accumulate()
        contract.step(first, index=0)
        contract.step(second, index=1)
        contract.update()

    for _ in range(3):
        both()
    with pytest.raises(NonFiniteGradientError):
        both()


@pytest.mark.parametrize("cls", [FusedAdamW, FusedAdam, FusedSGD])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_looking_first_changes_no_bit(cls, scale):
    def trained(look):
        torch.manual_seed(3)
        w = torch.nn.Parameter(torch.randn(37))
        optimizer, contract = cls([w], lr=0.1), StepContract(loss_scale=LossScale(scale))
        for _ in range(5):
            w.grad = torch.randn(37) * scale
            contract.accumulate()
            look(contract, optimizer)
            contract.step(optimizer)
            contract.update()
        return bits(optimizer)

    plain = trained(lambda contract, optimizer: None)
    assert_equal(plain, trained(lambda contract, optimizer: contract.unscale_(optimizer)))
    assert_equal(plain, trained(lambda contract, optimizer: contract.clip_norm_(optimizer, 1e9)))


def test_grad_holds_what_the_documentation_says(make):
    contract, w = StepContract(loss_scale=LossScale(8.0)), weight()
    optimizer = make([w])
    step(contract, optimizer, 1.0, clip_norm=1.0)
    ours = isinstance(optimizer, FusedSGD)
    assert w.grad.tolist() == pytest.approx([8.0 if ours else 0.5] * 4, rel=1e-5)
    step(contract, optimizer, inf)
    assert w.grad.tolist() == [inf] * 4


def test_outcomes_are_plain_data_under_the_documented_keys(make):
    record = step(StepContract(), make([weight()]), 1.0).record()
    assert list(record) == [
        "global_step", "update", "applied", "reason", "grad_norm", "clip_coef", "loss_scale_before",
        "loss_scale_after", "window_size", "optimizer",
    ]  # fmt: skip
    assert json.loads(json.dumps(record)) == record


def test_state_goes_on_where_it_was_taken(make):
    contract, w = StepContract(loss_scale=LossScale(1024.0, growth_interval=5)), weight()
    optimizer = make([w])
    for grad in (inf, 0.0, 0.0, None):
        step(contract, optimizer, grad)
    again = StepContract(loss_scale=LossScale())
    again.load_state_dict(json.loads(json.dumps(contract.state_dict())))
    assert (again.global_step, again.updates, again.skips) == (4, 2, contract.skips)
    assert again.loss_scale.state_dict() == contract.loss_scale.state_dict()
    assert step(again, optimizer, 0.0).update == 3
