"""The contract of a rule, for every registered one, and the exact arithmetic that they share."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lightning_fuse.kernels.reference import float32_scalars
from lightning_fuse.rules import RULES, UpdateRule
from lightning_fuse.rules.rule import divide, power, sqrt
from tests.rules.rule_table import CASES

EVERY_RULE = pytest.mark.parametrize("rule", [RULES[name] for name in CASES], ids=lambda rule: rule.name)


def group_of(rule: UpdateRule) -> dict:
    case = CASES[rule.name]
    return {**case.settings, **case.switches, "maximize": False}


def arguments(rule: UpdateRule, shape: tuple[int, ...]) -> tuple:
    torch.manual_seed(3)
    moments = tuple(torch.randn(shape) if m.signed else torch.rand(shape) for m in rule.moments)
    return torch.randn(shape), torch.randn(shape), moments


@EVERY_RULE
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3), (2, 3, 4)], ids=str)
def test_update_is_pure_and_keeps_shape_and_dtype(rule: UpdateRule, shape: tuple[int, ...]) -> None:
    param, grad, moments = arguments(rule, shape)
    before = [t.clone() for t in (param, grad, *moments)]
    scalars = float32_scalars(rule, group_of(rule), 3)
    copy = dict(scalars)
    first = rule.update(param, grad, moments, scalars)
    second = rule.update(param, grad, moments, scalars)
    assert all(torch.equal(a, b) for a, b in zip((param, grad, *moments), before, strict=True))
    assert scalars == copy
    assert len(first[1]) == len(rule.moments)
    for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert a.shape == shape
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@EVERY_RULE
def test_an_element_depends_on_no_other(rule: UpdateRule) -> None:
    param, grad, moments = arguments(rule, (64,))
    scalars = float32_scalars(rule, group_of(rule), 2)
    whole = rule.update(param, grad, moments, scalars)
    part = rule.update(param[10:20], grad[10:20], [m[10:20] for m in moments], scalars)
    assert torch.equal(whole[0][10:20], part[0])
    assert all(torch.equal(a[10:20], b) for a, b in zip(whole[1], part[1], strict=True))


@EVERY_RULE
def test_scalars_are_pure_functions_of_group_and_step(rule: UpdateRule) -> None:
    group = group_of(rule)
    for step in (1, 2, 1000, 2**31):
        scalars = rule.scalars(group, step)
        assert scalars == rule.scalars(dict(group), step)
        assert all(type(value) is float and np.isfinite(value) for value in scalars.values())
        rounded = float32_scalars(rule, group, step)
        assert rounded == {key: float(np.float32(value)) for key, value in scalars.items()}


@EVERY_RULE
def test_moments_have_torchs_names(rule: UpdateRule) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    theirs = CASES[rule.name].make_torch([p])
    theirs.step()
    assert {m.name for m in rule.moments} == set(theirs.state[p]) - {"step"}
    assert {m.name for m in rule.moments if m.signed} <= {"exp_avg", "momentum_buffer"}


@pytest.mark.parametrize("base", [0.9, 0.999, 0.99999, 0.0, 1.0])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 17, 1000, 123_457])
def test_power_is_a_product_of_rounded_squares(base: float, exponent: int) -> None:
    """Each of the at most 2 log2(n) products rounds once, and a square doubles the error of its factor: n 2^-52."""
    exact = Fraction(base) ** exponent if exponent < 2000 else None
    found = power(base, exponent)
    if exact is None:
        assert found == pytest.approx(base**exponent, rel=exponent * 2.0**-52, abs=0.0)
    else:
        assert abs(Fraction(found) - exact) <= exact * Fraction(max(exponent, 1), 2**52)


def test_sqrt_is_correctly_rounded() -> None:
    torch.manual_seed(0)
    patterns = torch.randint(0, 0x7F800000, (200_000,), dtype=torch.int32)
    x = torch.cat([patterns.view(torch.float32), torch.tensor([0.0, 2.0**-149, 2.0**-126, 1.0, 2.0, 3.4e38])])
    expected = np.sqrt(x.numpy().astype(np.longdouble)).astype(np.float32)  # 64 bits of root, so no double rounding
    assert np.array_equal(sqrt(x).numpy(), expected)
    assert sqrt(torch.tensor([torch.inf])).isinf().all()
    assert sqrt(torch.tensor([torch.nan])).isnan().all()


def test_divide_is_correctly_rounded() -> None:
    torch.manual_seed(0)
    x = torch.rand(200_000) * 10 + 1e-3
    for numerator in (127.0, 255.0, 1.0):
        expected = (numerator / x.double().numpy().astype(np.longdouble)).astype(np.float32)
        assert np.array_equal(divide(numerator, x).numpy(), expected)
    # What it is for: the reciprocal and a product, two roundings, is another number for some inputs.
    assert not torch.equal(divide(127.0, x), x.reciprocal() * 127.0)


def test_first_moment_of_sgd_is_the_gradient_whatever_the_dampening() -> None:
    rule = RULES["sgd_momentum"]
    group = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.5}
    g = torch.tensor([2.0])
    _, (buffer,) = rule.update(torch.zeros(1), g, (torch.zeros(1),), float32_scalars(rule, group, 1))
    assert buffer.item() == 2.0
    _, (buffer,) = rule.update(torch.zeros(1), g, (buffer,), float32_scalars(rule, group, 2))
    assert buffer.item() == pytest.approx(0.9 * 2 + 0.5 * 2, rel=1e-6)


def test_amsgrad_never_forgets_the_largest() -> None:
    rule = RULES["adamw_amsgrad"]
    group, moments, p = group_of(rule), tuple(torch.zeros(1) for _ in range(3)), torch.zeros(1)
    seen = []
    for step in range(1, 50):
        g = torch.tensor([5.0 if step == 3 else 0.01])
        p, moments = rule.update(p, g, moments, float32_scalars(rule, group, step))
        seen.append((moments[1].item(), moments[2].item()))
    largest = [b for _, b in seen]
    assert largest == sorted(largest)
    assert largest[-1] == max(a for a, _ in seen) > 1.5 * seen[-1][0]


def test_a_unit_is_a_moment_of_the_same_rule_that_is_never_negative() -> None:
    for rule in RULES.values():
        by_name = {moment.name: moment for moment in rule.moments}
        for moment in rule.moments:
            assert not moment.normalizer or not (
                by_name[moment.normalizer].signed or by_name[moment.normalizer].normalizer
            )
    assert [m.normalizer for m in RULES["adamw_amsgrad"].moments] == ["exp_avg_sq", "", ""]
    assert not any(m.normalizer for name in ("lion", "lars", "sgd_momentum") for m in RULES[name].moments)
