"""Traffic is derived from reads and writes; launches are held to what torch really calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fuse.ledger.traffic import (
    BLOCKS_PER_LAUNCH,
    CHUNK,
    Pass,
    Path,
    launches,
    multi_tensor_launches,
    step_paths,
    update_paths,
)
from lightning_fuse.optim import FusedAdamW

ADAMW = {"p": 4.0, "exp_avg": 4.0, "exp_avg_sq": 4.0}
INT8 = 1 + 4 / 128


def moved(widths: dict[str, float]) -> dict[str, float]:
    return {path.name: path.bytes_per_element for path in update_paths(widths)}


def test_the_three_paths_of_adamw() -> None:
    found = moved({**ADAMW, "exp_avg": INT8, "exp_avg_sq": INT8})
    assert found["separate loops, fp32 state"] == 40  # m: 12, v: 12, p: 16
    assert found["one fused pass, fp32 state"] == 28  # 4 read, 3 written
    assert found["one fused pass, this state"] == 16 + 4 * 4 / 128  # and scales, read and written


def test_other_choices_move_what_they_must() -> None:
    assert moved({"p": 4, "exp_avg": 2, "exp_avg_sq": 2})["one fused pass, this state"] == 3 * 4 + 4 * 2
    found = moved({"p": 2, "exp_avg": 2, "exp_avg_sq": 2, "remainder": 2})
    assert found["one fused pass, this state"] == 3 * 2 + 4 * 2 + 2 * 2
    assert moved({"p": 4, "exp_avg": 4}) == {"separate loops, fp32 state": 24, "one fused pass, fp32 state": 20}
    assert moved({"p": 4})["one fused pass, fp32 state"] == 12
    assert moved({**ADAMW, "max_exp_avg_sq": 4})["one fused pass, fp32 state"] == 36
    separate, contract = step_paths(ADAMW)
    assert (separate.bytes_per_element, contract.bytes_per_element) == (28 + 8 + 4 + 8, 28 + 4)


def test_a_pass_counts_every_operand() -> None:
    widths = {"a": 4, "b": 2}
    assert Path("x", (Pass("", ("a", "b"), ("b",)), Pass("", ("a",), ())), widths).bytes_per_element == 8 + 4


class Calls(TorchDispatchMode):
    """Counts operator calls, and the elements that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "record_function" not in name and name not in ("_local_scalar_dense", "lift_fresh", "detach"):
            self.calls[name] += 1
            if name != "add_" or args[0].dim():  # not the counter
                tensors = {id(a): a for a in args if isinstance(a, torch.Tensor)}.values()  # addcmul_ takes g twice
                self.elements += sum(t.numel() for t in tensors) + result.numel()
        return result


def test_torch_s_operations_are_those_that_torch_calls() -> None:
    """Elements that torch's loop reads and writes, seen by dispatch, against the passes of the ledger."""
    params = [Parameter(torch.randn(40, 25)), Parameter(torch.randn(1000))]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, foreach=False)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with Calls() as seen:
        optimizer.step()
    rows = {row.path: row for row in launches([1000, 1000], gpu_kernel=False)}
    assert sum(seen.calls.values()) == rows["torch, loop"].cpu
    assert seen.elements * 4 == moved(ADAMW)["torch's operations one by one"] * 2000


@pytest.mark.parametrize(("path", "how"), [("torch, foreach", {"foreach": True}), ("torch, fused", {"fused": True})])
def test_operator_calls_of_foreach_and_fused(path: str, how: dict[str, bool]) -> None:
    """Inside foreach, torch's CPU loops over tensors: the profiler sees those calls."""
    params = [Parameter(torch.randn(4, 3)) for _ in range(5)]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, **how)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with torch.profiler.profile(acc_events=True) as profiler:
        optimizer.step()
    working = {"add_", "mul_", "lerp_", "addcmul_", "sqrt", "div_", "addcdiv_", "_fused_adamw_"}
    calls = [e.name for e in profiler.events() if e.name.removeprefix("aten::") in working]
    expected = {row.path: row.cpu for row in launches([12] * 5, gpu_kernel=False)}[path]
    assert len(calls) == expected


def test_ours_calls_no_operator_per_parameter() -> None:
    counts = []
    for tensors in (3, 30):
        params = [Parameter(torch.randn(4, 3)) for _ in range(tensors)]
        optimizer = FusedAdamW(params, lr=1e-3)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        with Calls() as seen:
            optimizer.step()
        counts.append(sum(seen.calls.values()))
        with torch.profiler.profile(acc_events=True) as profiler:  # what callbacks=profile counts says the same
            optimizer.step()
        assert [e.name for e in profiler.events() if e.name.startswith("aten::")] == []
    assert counts[0] == counts[1] == 0  # one native call, which torch's dispatcher does not see
    assert {row.path: row.cpu for row in launches([12] * 30, gpu_kernel=False)}["ours"] == 1


def test_multi_tensor_launches_end_where_tensors_or_blocks_are_used_up() -> None:
    assert multi_tensor_launches([10] * 36, 36) == 1
    assert multi_tensor_launches([10] * 37, 36) == 2
    assert multi_tensor_launches([10, 0, 10], 2) == 1  # empty tensors are left out
    assert multi_tensor_launches([CHUNK * BLOCKS_PER_LAUNCH], 36) == 1
    assert multi_tensor_launches([CHUNK * BLOCKS_PER_LAUNCH + 1], 36) == 2
    assert multi_tensor_launches([], 36) == 0
