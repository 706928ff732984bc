"""What the native kernel takes, what it refuses and why, when it plans anew, and its sum of squares."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import KERNELS, ParamUpdate, choose_kernel, dispatch
from lightning_fuse.kernels.cpu import native, plan, tables
from lightning_fuse.rules import RULES
from lightning_fuse.rules.lamb import LAMB
from tests.kernels import native_harness
from tests.kernels.native_harness import BF16, F16, F32, Case

pytestmark = pytest.mark.skipif(
    bool(KERNELS["native"].unavailable_reason()), reason=KERNELS["native"].unavailable_reason()
)

PLAIN = Case("adamw", "fp32", F32, "none", F32, "contiguous", "contiguous", "baseline", 1)
NATIVE = KERNELS["native"]


class Unwritten(LAMB):
    """A rule that nobody wrote in C++."""

    name = "unwritten"


def test_every_rule_format_and_master_is_supported() -> None:
    """All that is registered; what is refused is in the table REFUSED, with its words."""
    count = 0
    for rule, state, dtype, master in product(RULES, STATE_FORMATS, (F32, BF16, F16), MASTERS):
        if dtype in MASTERS[master].dtypes:
            case = PLAIN._replace(rule=rule, state=state, dtype=dtype, master=master)
            assert NATIVE.supports(native_harness.make_state(torch.ones(3, 4), case).spec), case
            count += 1
    assert count == len(RULES) * len(STATE_FORMATS) * 7  # fp32: none; bf16: all four; fp16: none and fp32
    assert set(RULES) == set(tables.RULE_IDS)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "another device": (lambda: torch.ones(2, 2, device="meta"), "it runs on the CPU, the parameter is on meta"),
    "another dtype": (lambda: torch.ones(2, 2, dtype=torch.float64), "not torch.float64"),
    "overlapping elements": (lambda: torch.ones(2, 1).expand(2, 3), "may share memory"),
    "too many dimensions": (lambda: torch.ones([1] * 17), "17 dimensions, 16 are the most"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_says_why_not(what: str) -> None:
    make, words = REFUSED[what]
    why = NATIVE.supports(replace(native_harness.make_state(torch.ones(2, 2), PLAIN).spec, param=make()))
    assert not why
    assert words in why.why


def test_auto_takes_native_and_falls_back_for_one_optimizer() -> None:
    fast = native_harness.make_state(torch.ones(2, 2), PLAIN).spec
    slow = replace(fast, rule=Unwritten())
    assert choose_kernel("auto", [fast]).name == "native"
    assert choose_kernel("auto", [fast, slow]).name == "reference"
    with pytest.raises(NotImplementedError, match=r"the rule unwritten has no C\+\+ twin"):
        choose_kernel("native", [slow])


def test_a_machine_without_the_library_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: "its library was not built")
    dispatch._say_once.cache_clear()
    spec = native_harness.make_state(torch.ones(2, 2), PLAIN).spec
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [choose_kernel("auto", [spec]).name for _ in range(3)] == ["reference"] * 3
    assert len(said) == 1
    assert "its library was not built; the reference kernel runs instead" in str(said[0].message)
    assert dispatch.sum_of_squares([torch.ones(3)]).item() == 3.0


def test_levels_are_an_explicit_table(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_harness.shared_library()
    assert library.levels[0] == library.runnable[0] == "baseline"
    with pytest.raises(ValueError, match="unknown CPU level 'avx9'; known: baseline"):
        library.set_level("avx9")
    monkeypatch.setenv("LIGHTNING_FUSE_CPU_LEVEL", "baseline")
    assert type(library)(library.path).level == "baseline"


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_sum_is_the_same_at_any_number_of_threads_and_level(dtype: torch.dtype) -> None:
    shapes = ((0,), (1,), (1000, 333), (70_001,), (4, 3, 5, 7))
    grads = [torch.randn(s).to(dtype) for s in shapes] + [torch.randn(300, 200).to(dtype).t(), torch.ones(()).expand(9)]
    sums, before = set(), torch.get_num_threads()
    try:
        for level in native_harness.shared_library().runnable:
            native_harness.shared_library().set_level(level)
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                sums.add(NATIVE.sum_of_squares(grads).item())
    finally:
        torch.set_num_threads(before)
    assert sums == {KERNELS["reference"].sum_of_squares(grads).item()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_sum_is_finite_exactly_when_all_gradients_are(bad: float) -> None:
    big = torch.full((100_000,), torch.finfo(F32).max)
    assert NATIVE.sum_of_squares([big]).isfinite()
    for place in (0, 31, 1023, 99_999):
        spoilt = big.clone()
        spoilt[place] = bad
        assert not NATIVE.sum_of_squares([torch.ones(3), spoilt]).isfinite()
    assert NATIVE.sum_of_squares([]).item() == 0.0


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_all_lanes_are_equal(dtype: torch.dtype) -> None:
    """Case 33: a constant gradient moves every element of every length alike."""
    for level in native_harness.shared_library().runnable:
        native_harness.shared_library().set_level(level)
        for rule in ("sgd", "sgd_momentum", "adamw"):
            for n in range(1, 4 * 32 + 4):
                slot = native_harness.make_state(torch.ones(n), PLAIN._replace(rule=rule, dtype=dtype))
                NATIVE.step(
                    [ParamUpdate(slot, torch.ones(n, dtype=dtype), {**native_harness.GROUP, "lr": 0.1})], None, None
                )
                assert slot.spec.param.unique().numel() == 1
                assert slot.spec.param[0] != 1.0


def test_a_nan_spoils_one_element() -> None:
    """Case 43."""
    for state in STATE_FORMATS:
        slot = native_harness.make_state(torch.ones(4, 256), PLAIN._replace(state=state))
        grad = torch.ones(4, 256)
        grad[1, 5] = float("nan")
        for _ in range(2):
            NATIVE.step([ParamUpdate(slot, grad, native_harness.GROUP)], None, None)
            grad = torch.ones(4, 256)
        assert slot.spec.param.isnan().sum() == 1


def test_a_step_takes_no_memory_of_the_parameters_size() -> None:
    """Case 46: the peak of the process grows by less than 1 % of the parameters."""
    resource = pytest.importorskip("resource")
    p = torch.nn.Parameter(torch.ones(4096, 4096))  # 64 MiB
    p.grad = torch.ones(4096, 4096)
    optimizer = FusedAdamW([p], state="int8", kernel="native")
    optimizer.step()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        optimizer.step()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < p.nbytes / 100


def test_a_plan_is_built_when_and_only_when_something_changed(built: list[plan.Plan]) -> None:
    p, q = torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(5))
    optimizer = FusedAdamW([p, q], kernel="native", state=["bf16"])

    def step() -> int:
        p.grad, q.grad = torch.randn(6, 6), torch.randn(5)
        optimizer.step()
        return len(built)

    assert [step(), step(), step()] == [1, 1, 1]  # new gradients, the same plan
    optimizer.param_groups[0]["lr"] = 0.5
    assert step() == 1
    p.data = p.data.clone()
    assert step() == 2  # moved
    p.data = p.data.t()
    assert step() == 3  # the same address, other strides
    optimizer.state[q]["exp_avg"] = optimizer.state[q]["exp_avg"].clone()
    assert step() == 4  # a tensor of the state was replaced
    optimizer.load_state_dict(optimizer.state_dict())
    assert step() >= 5
    p.grad, q.grad = torch.randn(6, 6).t(), torch.randn(5)
    optimizer.step()
    assert len(built) >= 6  # a gradient of another layout


def test_foreign_state_is_refused_before_anything_is_written() -> None:
    p = torch.nn.Parameter(torch.ones(6, 6))
    p.grad = torch.ones(6, 6)
    optimizer = FusedAdamW([p], kernel="native")
    optimizer.step()
    kept = p.detach().clone()
    optimizer.state[p]["exp_avg"] = torch.zeros(6, 3)
    with pytest.raises(RuntimeError, match=r"state exp_avg of 0\.0 is torch\.float32 \(6, 3\)"):
        optimizer.step()
    assert torch.equal(p, kept)


def test_autograd_sees_that_a_parameter_was_written() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    FusedSGD([p], lr=0.1, kernel="native").step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_have_the_widths_that_c_reads() -> None:
    slot = native_harness.make_state(torch.ones(3, 4), PLAIN._replace(rule="adamw_amsgrad", state="int8"))
    assert len(tables.slot_row(slot, 0, 0)) == tables.SLOT_COLUMNS
    assert len(tables.group_row(native_harness.GROUP)) == tables.GROUP_COLUMNS


def test_pieces_cover_every_element_once_and_cut_no_block() -> None:
    for row in (1, 3, 128, 131, 1999, 300_001):
        numel = 300_001 // row * row
        chunks = tables.cut([(numel, row)])
        begins, ends = chunks[1::3], chunks[2::3]
        assert begins[0] == 0
        assert ends[-1] == numel
        assert list(begins[1:]) == list(ends[:-1])
        assert all(begin % row % 128 == 0 for begin in begins)
