"""The native kernel gives the reference's bits: rules, formats, masters, dtypes, layouts, levels, thread counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_fuse.formats import MASTERS
from lightning_fuse.kernels import KERNELS, ParamUpdate
from tests.kernels import native_harness
from tests.kernels.native_harness import BF16, F16, F32, Case

pytestmark = pytest.mark.skipif(
    bool(KERNELS["native"].unavailable_reason()), reason=KERNELS["native"].unavailable_reason()
)

CASES = [] if KERNELS["native"].unavailable_reason() else list(native_harness.all_pairs())
PLAIN = Case("adamw", "fp32", F32, "none", F32, "contiguous", "contiguous", "baseline", 1)


def test_the_cases_hold_every_pair() -> None:
    axes = native_harness.axes()
    rows = [{**case._asdict(), "weight": (case.dtype, case.master)} for case in CASES]
    columns = [[row[axis] for row in rows] for axis in axes]
    for (left, one), (right, two) in itertools.combinations(zip(axes, columns, strict=True), 2):
        met = set(zip(one, two, strict=True))
        assert met == set(itertools.product(axes[left], axes[right])), (left, right)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case))
def test_every_pair_of_choices(case: Case) -> None:
    native_harness.assert_twins(case, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", native_harness.RULE_IDS)
@pytest.mark.parametrize("seed", range(3))
def test_twenty_steps(rule: str, seed: int) -> None:
    for case in native_harness.all_pairs(seed + 1):
        if case.rule == rule:
            native_harness.assert_twins(case, steps=20)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8", "int8_bf16"])
def test_tensors_that_are_cut_into_chunks(state: str, threads: int) -> None:
    case = PLAIN._replace(state=state, threads=threads, level=native_harness.shared_library().runnable[-1])
    native_harness.assert_twins(case, steps=2, shapes=[(70, 1999), (140_001,), (3, 50_000)])


@pytest.mark.parametrize("level", native_harness.shared_library().runnable if CASES else [])
@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_loops_over_what_is_kept(state: str, level: str) -> None:
    """Rules have loops of their own for bf16 and int8 moments, by kind of weight: several tiles and kinds of blocks."""
    kinds = [(F32, "none"), (BF16, "none"), (BF16, "split"), (BF16, "split8")]
    for rule, (dtype, master) in itertools.product(native_harness.RULE_IDS, kinds):
        case = PLAIN._replace(rule=rule, state=state, dtype=dtype, master=master, grad_dtype=dtype, level=level)
        native_harness.assert_twins(case, steps=4, shapes=[(9, 640), (5, 1000), (700, 3), (1280,)])


@pytest.mark.parametrize("values", ["zero", "tiny", "huge"])
@pytest.mark.parametrize("level", native_harness.shared_library().runnable if CASES else [])
def test_the_ends_of_the_range(values: str, level: str) -> None:
    scale = {"zero": 0.0, "tiny": 1e-30, "huge": 1e18}[values]
    native_harness.shared_library().set_level(level)
    try:
        for state, rule in itertools.product(("int8", "bf16"), ("adamw", "sgd_momentum")):
            slots = [
                native_harness.make_state(torch.randn(5, 130), PLAIN._replace(state=state, rule=rule)) for _ in range(2)
            ]
            slots[1].spec.param.copy_(slots[0].spec.param)
            for _ in range(3):
                grad = torch.randn(5, 130) * scale
                for kernel, slot in zip(("native", "reference"), slots, strict=True):
                    KERNELS[kernel].step([ParamUpdate(slot, grad, native_harness.GROUP)], None, None)
            other = native_harness.tensors_of(slots[1])
            assert all(
                native_harness.same_bits(t, other[name]) for name, t in native_harness.tensors_of(slots[0]).items()
            )
    finally:
        native_harness.shared_library().set_level(native_harness.shared_library().runnable[-1])


@pytest.mark.parametrize("level", native_harness.shared_library().runnable if CASES else [])
@pytest.mark.parametrize("state", ["int8", "int8_bf16"])
def test_blocks_of_all_kinds(level: str, state: str) -> None:
    """Sizes from one order of magnitude to many, gradients that fall and stop: blocks take finer and coarser levels."""
    shapes, kinds = [(5, 300), (3, 7), (2, 128), (40, 1)], set()
    native_harness.shared_library().set_level(level)
    try:
        for rule in ("adamw", "adam", "adamw_amsgrad", "lion"):
            case = PLAIN._replace(rule=rule, state=state)
            values = [torch.randn(shape) for shape in shapes]
            pair = [
                [native_harness.make_state(value, case, 1000 * i) for i, value in enumerate(values)] for _ in range(2)
            ]
            sizes = [torch.exp(2 * i * torch.randn(shape)) for i, shape in enumerate(shapes)]
            for step in range(12):
                grads = [torch.randn(s) * size * 10.0**-step for s, size in zip(shapes, sizes, strict=True)]
                grads[0][2, 3:5] = torch.tensor([float("nan"), 1e20]) if step == 7 else grads[0][2, 3:5]
                grads = [grad * (step != 9) for grad in grads]
                for kernel, slots in zip(("native", "reference"), pair, strict=True):
                    KERNELS[kernel].step(work_of(slots, grads), None, None)
                for mine, theirs in zip(*pair, strict=True):
                    other = native_harness.tensors_of(theirs)
                    assert all(
                        native_harness.same_bits(t, other[name]) for name, t in native_harness.tensors_of(mine).items()
                    )
                    scale = other.get("exp_avg_sq.1", torch.zeros(1))
                    kinds |= set((scale[scale > 0].view(torch.int32) & 3).tolist())
    finally:
        native_harness.shared_library().set_level(native_harness.shared_library().runnable[-1])
    assert kinds == ({0, 1, 2} if state == "int8" else set())


@pytest.mark.parametrize("level", native_harness.shared_library().runnable if CASES else [])
def test_every_bf16_pattern_in_loops_over_what_is_kept(level: str) -> None:
    """All 65,536 patterns as weights and, in another order, as gradients."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    native_harness.shared_library().set_level(level)
    try:
        for state, master in itertools.product(("bf16", "int8"), ("none", "split", "split8")):
            case = PLAIN._replace(state=state, master=master, dtype=BF16)
            slots = [native_harness.make_state(values, case) for _ in range(2)]
            for _ in range(2):
                for kernel, slot in zip(("native", "reference"), slots, strict=True):
                    KERNELS[kernel].step([ParamUpdate(slot, values.roll(12_345), native_harness.GROUP)], None, None)
            other = native_harness.tensors_of(slots[1])
            assert all(
                native_harness.same_bits(t, other[name]) for name, t in native_harness.tensors_of(slots[0]).items()
            ), case
    finally:
        native_harness.shared_library().set_level(native_harness.shared_library().runnable[-1])


@pytest.mark.parametrize("level", native_harness.shared_library().runnable if CASES else [])
def test_every_16_bit_pattern_is_read_and_written(level: str) -> None:
    """A small step from all 65,536 patterns of either dtype, and roundings at and beside every tie."""
    native_harness.shared_library().set_level(level)
    group = {**native_harness.GROUP, "lr": 1e-3}
    try:
        for dtype in (BF16, F16):
            values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
            slots = [native_harness.make_state(values, PLAIN._replace(rule="sgd", dtype=dtype)) for _ in range(2)]
            for kernel, slot in zip(("native", "reference"), slots, strict=True):
                KERNELS[kernel].step([ParamUpdate(slot, torch.ones(values.shape), group)], None, None)
            assert native_harness.same_bits(slots[0].spec.param, slots[1].spec.param)
            # A float32 master between two neighbours; a step of lr 0 and no decay only rounds it.
            finite = values.float()[values.isfinite()]
            near = torch.cat([finite + (finite.roll(1) - finite) * share for share in (0.5, 0.4999, 0.5001)])
            slot = native_harness.make_state(near, PLAIN._replace(rule="sgd", dtype=dtype, master="fp32"))
            slot.master[0].copy_(near)
            still = {**native_harness.GROUP, "lr": 0.0, "weight_decay": 0.0}
            KERNELS["native"].step([ParamUpdate(slot, torch.zeros(near.shape), still)], None, None)
            assert native_harness.same_bits(slot.spec.param, MASTERS["fp32"].split(near, dtype, None)[0])
    finally:
        native_harness.shared_library().set_level(native_harness.shared_library().runnable[-1])


@pytest.mark.parametrize("master", ["split", "split8"])
def test_splitting_keeps_every_bit(master: str) -> None:
    """Case 44: exponents, ties, signed zeros, subnormals, infinities and NaN through one step that changes nothing."""
    group = {**native_harness.GROUP, "lr": 0.0, "weight_decay": 0.0}
    bits = torch.randint(-(2**31), 2**31, (20_000,)).to(torch.int32)
    bits[:6] = torch.tensor([0, -(2**31), 0x7F800000, 0x7FC00000, 1, 0x3F808000])
    if master == "split8":
        bits &= ~0xFF
    slot = native_harness.make_state(torch.zeros(bits.shape), PLAIN._replace(rule="sgd", dtype=BF16, master=master))
    split, kept = MASTERS["split"].split(bits.view(F32), BF16, None)
    slot.spec.param.copy_(split)
    slot.master[0].copy_(kept[0] >> 8 if master == "split8" else kept[0])
    weight = slot.spec.master.join(slot.spec.param, slot.master).clone()
    KERNELS["native"].step([ParamUpdate(slot, torch.zeros(bits.shape), group)], None, None)
    after = slot.spec.master.join(slot.spec.param, slot.master)
    if master == "split":
        # -0.0 * decay - 0 * lr is what the rule itself does to a zero; the reference is asked for the same.
        twin = slot.spec.rule.update(weight, torch.zeros_like(weight), (), slot.spec.rule.scalars(group, 1))[0]
        assert native_harness.same_bits(after, twin)
    else:
        finite = weight.isfinite() & (weight.abs() < 3e38)
        assert bool(((after - weight).abs()[finite] <= weight.abs()[finite] * 2.0**-15 + 2.0**-126).all())


def work_of(slots: list[Any], grads: list[torch.Tensor]) -> list[ParamUpdate]:
    return [ParamUpdate(slot, grad, native_harness.GROUP) for slot, grad in zip(slots, grads, strict=True)]


def test_splitting_one_list_over_several_calls_changes_no_bit() -> None:
    """Case 36: one call for all, or one call each."""
    case = PLAIN._replace(state="int8")
    values = [torch.randn(3, 200) for _ in range(4)]
    together, apart = ([native_harness.make_state(value, case) for value in values] for _ in range(2))
    for _ in range(3):
        grads = [torch.randn(3, 200) for _ in values]
        KERNELS["native"].step(work_of(together, grads), None, None)
        for slot, grad in zip(apart, grads, strict=True):
            KERNELS["native"].step(work_of([slot], [grad]), None, None)
    for one, other in zip(together, apart, strict=True):
        kept = native_harness.tensors_of(other)
        assert all(
            native_harness.same_bits(tensor, kept[name]) for name, tensor in native_harness.tensors_of(one).items()
        )
