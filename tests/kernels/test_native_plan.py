"""The native kernel's tables: built again when something changed, never used when stale, kept when nothing did."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedLARS
from lightning_fuse.kernels import KERNELS
from lightning_fuse.kernels.cpu import native, plan
from lightning_fuse.kernels.cpu.tables import MEASURE, STEP, TASK_COLUMNS, WAVE, WAVE_COLUMNS, cut, tasks_of
from lightning_fuse.optim import FusedOptimizer

pytestmark = pytest.mark.skipif(
    bool(KERNELS["native"].unavailable_reason()), reason=KERNELS["native"].unavailable_reason()
)


def pair(make: type[FusedOptimizer] = FusedAdamW, **settings: Any) -> list[tuple[list[Parameter], FusedOptimizer]]:
    """The same parameters under the native kernel and under the reference."""
    found = []
    for kernel in ("native", "reference"):
        params = [Parameter(torch.arange(260.0).view(2, 130) / 100 + n) for n in range(3)]
        found.append((params, make(params, lr=0.01, kernel=kernel, **settings)))
    return found


def step(both: list[tuple[list[Parameter], FusedOptimizer]], seed: int, missing: int | None = None) -> None:
    for params, optimizer in both:
        generator = torch.Generator().manual_seed(seed)
        for n, p in enumerate(params):
            p.grad = None if n == missing else torch.randn(p.shape, generator=generator)
        optimizer.step()
    (mine, a), (its, b) = both
    for p, q in zip(mine, its, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(t, b.state[q][key]) for key, t in a.state[p].items())


@pytest.mark.parametrize("make", [FusedAdamW, FusedLARS])
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_nothing_stale_is_ever_used(built: list[plan.Plan], make: type[FusedOptimizer], state: str) -> None:
    """Memory that is freed and given to another tensor has the same address; the bits tell."""
    both = pair(make, state=state)
    for n in range(3):
        step(both, n)
    assert len(built) == 1  # new gradients at every step, one plan
    held = [p.data_ptr() for p in both[0][0]]
    for n, (params, _) in enumerate(both):
        # Swapped memory: every address is one that the plan knows, but of another parameter.
        params[0].data, params[1].data = params[1].data, params[0].data
        assert n or [p.data_ptr() for p in params] == [held[1], held[0], held[2]]
    step(both, 10)
    assert len(built) == 2
    for params, _ in both:
        for p in params:
            p.data = p.data.clone()  # the old memory is free, and the next clone may lie there
    step(both, 11)
    assert len(built) == 3
    step(both, 12)
    step(both, 13)
    assert len(built) == 3


def test_what_changes_the_work_changes_the_plan(built: list[plan.Plan]) -> None:
    both = pair(state="int8")
    step(both, 0)
    step(both, 1, missing=1)
    assert len(built) == 2
    step(both, 2, missing=1)
    assert len(built) == 2
    for params, _ in both:
        params[0].requires_grad_(False)
    step(both, 3, missing=0)
    for params, _ in both:
        params[0].requires_grad_(True)
    count = len(built)
    step(both, 4)
    assert len(built) == count + 1
    for params, optimizer in both:
        params.append(Parameter(torch.ones(7, 3)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})
    step(both, 5)
    count = len(built)
    for _, optimizer in both:
        optimizer.param_groups[1]["lr"] = 0.25  # a number is no reason for a new plan
    step(both, 6)
    assert len(built) == count
    for _, optimizer in both:
        optimizer.load_state_dict(optimizer.state_dict())
    step(both, 7)
    for params, optimizer in both:
        held = optimizer.state[params[0]]
        held["exp_avg.codes"] = held["exp_avg.codes"].clone()
    count = len(built)
    step(both, 8)
    assert len(built) == count + 1


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_a_gradient_of_another_shape_is_refused_before_anything_is_written(kernel: str) -> None:
    """torch checks the shape where .grad is set, not where p.data is replaced: a kernel would read beside it."""
    first, p = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    first.grad, p.grad = torch.ones(4), torch.ones(4)
    p.data = torch.ones(5000)
    with pytest.raises(RuntimeError, match=r"gradient of 0\.1 is \(4,\) on cpu, the parameter \(5000,\)"):
        FusedAdamW([first, p], kernel=kernel).step()
    assert torch.equal(first, torch.ones(4))
    assert torch.equal(p, torch.ones(5000))


def test_data_whose_elements_share_memory_is_refused() -> None:
    p = Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer = FusedAdamW([p], lr=0.5, kernel="native")
    optimizer.step()
    p.data = torch.ones(1).expand(4)
    with pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))
    with pytest.raises(TypeError, match=r"parameter 0\.0 is a view whose elements share memory"):
        FusedAdamW([Parameter(torch.ones(1).expand(4))])


def test_two_threads_may_look_at_gradients_at_once() -> None:
    """The library runs without Python's lock, so another thread may be between its tables and its call."""
    mine, others, sums = [torch.ones(5)], [torch.ones(70_000), torch.ones(7)], plan.SumPlan()
    rows, _ = sums.rows(mine)
    kept, chunks = list(rows), list(sums.chunks)
    thread = threading.Thread(target=sums.rows, args=(others,))
    thread.start()
    thread.join()
    assert (list(rows), list(sums.chunks)) == (kept, chunks)
    assert sums.cost == 5


def test_every_piece_is_measured_once_before_it_is_stepped_once() -> None:
    sizes = [(numel, row) for numel, row in ((5, 5), (300_000, 1000), (0, 1), (90_001, 90_001), (700_000, 7), (12, 3))]
    chunks = cut(sizes * 3)
    for measured in (False, True):
        tasks, waves, _ = tasks_of(chunks, measured)
        rows = [tuple(tasks[at : at + TASK_COLUMNS]) for at in range(0, len(tasks), TASK_COLUMNS)]
        groups = [tuple(waves[at : at + WAVE_COLUMNS]) for at in range(0, len(waves), WAVE_COLUMNS)]
        stepped = [k for phase, begin, end, _ in rows if phase == STEP for k in range(begin, end)]
        assert sorted(stepped) == list(range(len(chunks) // 3))
        if not measured:
            assert groups == []
            assert {wave for *_, wave in rows} == {-1}
            continue
        assert [k for phase, begin, end, _ in rows if phase == MEASURE for k in range(begin, end)] == stepped
        assert len(groups) > 2
        for number, (begin, end, count, *_) in enumerate(groups):
            places = {phase: [n for n, row in enumerate(rows) if row[::3] == (phase, number)] for phase in (0, 1)}
            assert len(places[MEASURE]) == count
            assert max(places[MEASURE]) < min(places[STEP])
            assert all(begin <= rows[n][1] < rows[n][2] <= end for n in places[MEASURE] + places[STEP])
            assert chunks[3 * begin + 1] == 0  # a tensor is in one wave
            elements = sum(chunks[3 * k + 2] - chunks[3 * k + 1] for k in range(begin, end))
            assert elements < WAVE + 700_000


@pytest.mark.parametrize("change", ["moved", "sliced", "transposed", "dtype", "size", "fewer", "sliced in place"])
def test_a_look_at_gradients_follows_whatever_they_become(change: str) -> None:
    """The rows of the last look are used again where only addresses changed; a fresh kernel is the oracle."""
    generator = torch.Generator().manual_seed(3)
    kernel = native.NativeKernel()
    first = [torch.randn(shape, generator=generator) for shape in ((6, 200), (7,), (40, 30))]
    base = torch.randn(12, 400, generator=generator)
    then = {
        "moved": lambda: [grad.clone() * 3 for grad in first],
        "sliced": lambda: [base[::2, ::2], *first[1:]],
        "transposed": lambda: [first[0], first[1], torch.randn(30, 40, generator=generator).t()],
        "dtype": lambda: [first[0], first[1].bfloat16(), first[2]],
        "size": lambda: [first[0], torch.randn(9, generator=generator), first[2]],
        "fewer": lambda: first[1:],
        "sliced in place": lambda: [base.view(-1)[: 2 * 1200].view(6, 400)[:, ::2], *first[1:]],
    }[change]()
    for grads in (first, then, first, then, then):
        expected = native.NativeKernel().sum_of_squares(grads)
        assert torch.equal(kernel.sum_of_squares(grads), expected)
        assert float(expected) == pytest.approx(sum(float(g.double().square().sum()) for g in grads), rel=1e-12)
