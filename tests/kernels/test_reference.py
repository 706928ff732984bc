"""The reference kernel: layouts, dtypes, factor, skip, shards, and the look at all gradients; choosing a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.kernels import (
    AUTO,
    KERNELS,
    ParamState,
    ParamUpdate,
    check_kernel_name,
    choose_kernel,
    chunks,
    reference,
)
from lightning_fuse.rules import RULES
from tests.kernels import native_harness
from tests.rules.rule_table import CASES

KERNEL = KERNELS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY_RULE = pytest.mark.parametrize("rule", CASES)
EVERY_STATE = pytest.mark.parametrize("state", STATE_FORMATS)


def slot_of(rule: str, param: Tensor, state: str = "fp32", master: str = "none", first_index: int = 0) -> ParamState:
    return native_harness.fresh_state(rule, param, state, master, first_index)


def group_of(rule: str, **changes: Any) -> dict[str, Any]:
    return {**CASES[rule].settings, **CASES[rule].switches, "maximize": False, **changes}


def tensors_of(slot: ParamState) -> list[Tensor]:
    found = native_harness.tensors_of(slot)
    return [*(tensor for name, tensor in found.items() if name != "step"), found["step"]]


def snapshot(slot: ParamState) -> list[Tensor]:
    return [t.clone() for t in tensors_of(slot)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def step(
    slot: ParamState, grad: Tensor, factor: float | None = None, found_inf: float | None = None, **group: Any
) -> None:
    work = ParamUpdate(slot, grad, group_of(slot.spec.rule.name, **group))
    scalar = lambda x: None if x is None else torch.tensor(x)  # noqa: E731
    KERNEL.step([work], scalar(factor), scalar(found_inf))


@EVERY_RULE
@EVERY_STATE
def test_layout_does_not_matter(rule: str, state: str) -> None:
    """Case 34: parameters and gradients transposed or sliced are stepped by logical index, in place."""
    start = gradient((6, 140), 99)
    plain = slot_of(rule, start.clone(), state)
    turned = slot_of(rule, start.t().contiguous().t(), state)
    wide = torch.zeros(6, 280)
    sliced = slot_of(rule, wide[:, ::2].copy_(start), state)
    assert not turned.spec.param.is_contiguous()
    address, strides = turned.spec.param.data_ptr(), turned.spec.param.stride()
    for number in range(3):
        g = gradient((6, 140), number)
        step(plain, g)
        step(turned, g)
        step(sliced, g.t().contiguous().t())
    assert equal(tensors_of(plain), tensors_of(turned))
    assert equal(tensors_of(plain), tensors_of(sliced))
    assert (turned.spec.param.data_ptr(), turned.spec.param.stride()) == (address, strides)
    assert torch.equal(wide[:, ::2], plain.spec.param)
    assert (wide[:, 1::2] == 0).all()


@EVERY_RULE
def test_channels_last(rule: str) -> None:
    start = gradient((4, 3, 5, 5), 99)
    plain, last = slot_of(rule, start.clone()), slot_of(rule, start.clone(memory_format=torch.channels_last))
    for number in range(3):
        g = gradient((4, 3, 5, 5), number)
        step(plain, g)
        step(last, g.contiguous(memory_format=torch.channels_last))
    assert equal(tensors_of(plain), tensors_of(last))


@EVERY_RULE
@pytest.mark.parametrize("of_param", DTYPES, ids=str)
@pytest.mark.parametrize("of_grad", DTYPES, ids=str)
def test_any_two_dtypes_are_float32_maths_and_one_rounding(rule: str, of_param: Any, of_grad: Any) -> None:
    """Case 35."""
    start, g = gradient((3, 50), 98).to(of_param), gradient((3, 50), 1).to(of_grad)
    mixed, exact = slot_of(rule, start.clone()), slot_of(rule, start.float())
    step(mixed, g)
    step(exact, g.float())
    assert mixed.spec.param.dtype == of_param
    assert torch.equal(mixed.spec.param, exact.spec.param.to(of_param))
    for a, b in zip(mixed.moments, exact.moments, strict=True):
        assert equal(list(a), list(b))


@EVERY_RULE
@EVERY_STATE
def test_found_inf_leaves_every_bit(rule: str, state: str) -> None:
    slot = slot_of(rule, gradient((3, 140), 99).bfloat16(), state, "split")
    step(slot, gradient((3, 140), 0))
    before = snapshot(slot)
    for flag in (1.0, 2.0, float("inf"), float("nan")):
        step(slot, torch.full((3, 140), torch.nan), found_inf=flag)
        assert equal(tensors_of(slot), before)
    step(slot, gradient((3, 140), 1), found_inf=0.0)
    assert slot.step.item() == 2
    assert not equal(tensors_of(slot), before)


@EVERY_RULE
def test_the_factor_multiplies_every_gradient(rule: str) -> None:
    by_factor, by_hand = (slot_of(rule, gradient((3, 50), 99)) for _ in range(2))
    for number in range(3):
        g = gradient((3, 50), number)
        kept = g.clone()
        step(by_factor, g, factor=0.3)
        assert torch.equal(g, kept)
        step(by_hand, g * torch.tensor(0.3))
    assert equal(tensors_of(by_factor), tensors_of(by_hand))


@EVERY_RULE
def test_maximize_negates(rule: str) -> None:
    up, down = (slot_of(rule, gradient((3, 50), 99)) for _ in range(2))
    step(up, gradient((3, 50), 1), maximize=True)
    step(down, -gradient((3, 50), 1))
    assert equal(tensors_of(up), tensors_of(down))


@EVERY_RULE
@EVERY_STATE
@pytest.mark.parametrize("master", ["none", "split8"])
def test_shards_give_the_bits_of_the_whole(rule: str, state: str, master: str) -> None:
    """Case 45: cut along dimension 0, unevenly, each shard told where it begins."""
    start = gradient((7, 3, 50), 99).bfloat16()
    whole = slot_of(rule, start.clone(), state, master)
    shards = [
        slot_of(rule, start[a:b].clone(), state, master, first_index=a * 150) for a, b in ((0, 2), (2, 3), (3, 7))
    ]
    for number in range(4):
        g = gradient((7, 3, 50), number)
        step(whole, g)
        for shard, (a, b) in zip(shards, ((0, 2), (2, 3), (3, 7)), strict=True):
            step(shard, g[a:b])
    for position, tensor in enumerate(tensors_of(whole)[:-1]):
        assert torch.equal(tensor, torch.cat([tensors_of(shard)[position] for shard in shards]))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0)], ids=str)
@EVERY_STATE
def test_the_smallest_shapes(shape: tuple[int, ...], state: str) -> None:
    slot = slot_of("adamw", torch.ones(shape), state)
    step(slot, torch.ones(shape))
    assert slot.step.item() == 1
    # lr 0.01, decay 0.2, eps 0.02 as in the table of rules: 1 - 0.002 - 0.01 / 1.02
    torch.testing.assert_close(slot.spec.param, torch.full(shape, 1 - 0.002 - 0.01 / 1.02))


@pytest.mark.parametrize("shape", [(1000,), (9, 300), (3, 700), (700, 3), (5, 4, 130)])
@pytest.mark.parametrize(
    ("rule", "state", "master"), [("adamw", "int8", "split8"), ("lamb", "int8_bf16", "fp32"), ("lars", "int8", "none")]
)
def test_slices_give_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, rule: str, state: str, master: str, shape: tuple[int, ...]
) -> None:
    """Slices of rows, or of blocks of a vector; norms of layer-wise rules are those of the whole, chunk by chunk."""
    monkeypatch.setattr(chunks, "CHUNK", 500)
    found = []
    for size in (1 << 40, 600, 128):
        monkeypatch.setattr(reference, "SLICE", size)
        whole = gradient(shape, 9).to(torch.bfloat16 if master != "none" else torch.float32)
        param = whole.movedim(0, -1).contiguous().movedim(-1, 0)  # rows do not lie one after the other
        slot = slot_of(rule, param, state, master)
        for n in range(4):
            KERNEL.step([ParamUpdate(slot, gradient(shape, n), native_harness.GROUP)], torch.tensor(0.5), None)
        found.append(snapshot(slot))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_one_call_steps_several_with_their_own_settings_and_steps() -> None:
    def make() -> list[ParamState]:
        return [slot_of("adamw", gradient((2, 70), n)) for n in range(3)]

    together, apart = make(), make()
    step(together[2], gradient((2, 70), 50))
    step(apart[2], gradient((2, 70), 50))
    groups = [group_of("adamw", lr=0.1 * (n + 1)) for n in range(3)]
    KERNEL.step([ParamUpdate(s, gradient((2, 70), n), groups[n]) for n, s in enumerate(together)], None, None)
    for n, slot in reversed(list(enumerate(apart))):
        KERNEL.step([ParamUpdate(slot, gradient((2, 70), n), groups[n])], None, None)
    assert all(equal(tensors_of(a), tensors_of(b)) for a, b in zip(together, apart, strict=True))
    assert [slot.step.item() for slot in together] == [1, 1, 2]


# The look at all gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_squares_is_float64(dtype: torch.dtype) -> None:
    grads = [gradient(shape, n).to(dtype) for n, shape in enumerate([(3000,), (), (7, 11), (0,), (5, 4, 3)])]
    expected = sum((g.double().numpy() ** 2).sum() for g in grads)
    total = KERNEL.sum_of_squares(grads)
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert total.item() == pytest.approx(expected, rel=1e-12)  # 4,000 float64 sums err by 4,000 * 2^-53 = 4e-13


def test_it_is_finite_exactly_when_every_gradient_is() -> None:
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    finite = [torch.full((50_000,), largest), torch.full((10,), smallest)]
    total = KERNEL.sum_of_squares(finite)
    assert total.isfinite()
    assert total.item() == pytest.approx(50_000 * largest**2, rel=1e-10)
    assert KERNEL.sum_of_squares([finite[1]]).item() == pytest.approx(10 * smallest**2, rel=1e-12)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 1023, 1024, 49_999):
            spoilt = torch.ones(50_000)
            spoilt[place] = bad
            assert not KERNEL.sum_of_squares([torch.ones(3), spoilt]).isfinite()


def test_no_gradients_sum_to_zero() -> None:
    assert KERNEL.sum_of_squares([]).item() == 0.0
    assert KERNEL.sum_of_squares([torch.zeros(0)]).item() == 0.0


def test_the_sum_has_the_same_bits_at_any_number_of_threads() -> None:
    grads, threads = [gradient((1031, 1777), 5), gradient((999,), 6)], torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(KERNEL.sum_of_squares(grads).item())
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1
    expected = sum(float(np.square(g.numpy().astype(np.longdouble)).sum()) for g in grads)
    assert found[0] == pytest.approx(expected, rel=1e-12)


@EVERY_RULE
def test_a_step_has_the_same_bits_at_any_number_of_threads(rule: str) -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            slot = slot_of(rule, gradient((300, 257), 9), "int8" if RULES[rule].moments else "fp32")
            for s in range(2):
                step(slot, gradient((300, 257), s))
            found.append(snapshot(slot))
    finally:
        torch.set_num_threads(threads)
    assert equal(*found)


# Choosing


def test_the_reference_supports_what_the_optimizers_let_in() -> None:
    for dtype in DTYPES:
        assert KERNEL.supports(slot_of("adamw", torch.ones(2, dtype=dtype)).spec)
    refusal = KERNEL.supports(slot_of("adamw", torch.ones(2, dtype=torch.float64)).spec)
    assert not refusal
    assert "float64" in refusal.why


def test_a_kernel_is_chosen_by_name_and_refused_by_name() -> None:
    good, bad = (slot_of("adamw", torch.ones(2, dtype=dtype)).spec for dtype in (torch.float32, torch.float64))
    assert choose_kernel("reference", [good]).name == "reference"
    assert choose_kernel(AUTO, [good]).name in KERNELS
    for word in (AUTO, "reference"):
        with pytest.raises(
            NotImplementedError, match=r"no kernel for these parameters: .*reference \(p\(2,\): .*float64"
        ):
            choose_kernel(word, [good, bad])
    check_kernel_name(AUTO)
    with pytest.raises(ValueError, match=r"unknown kernel 'refrence'; known: auto.*did you mean 'reference'"):
        check_kernel_name("refrence")
