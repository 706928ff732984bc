"""Cases 33 to 39, 43 and 45: what a kernel may not get wrong, for the reference and the native one alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLAMB, FusedLARS, FusedLion, FusedSGD
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.kernels import KERNELS, ParamUpdate
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.rules import RULES
from tests.kernels import native_harness
from tests.kernels.native_harness import BF16, F16, F32, Case
from tests.tolerances import UNIT_STEP

MISSING = KERNELS["native"].unavailable_reason()
KERNEL = pytest.mark.parametrize(
    "kernel", ["reference", pytest.param("native", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]
)
PLAIN = Case("adamw", "fp32", F32, "none", F32, "contiguous", "contiguous", "baseline", 1)

MAKERS: dict[str, Callable[..., FusedOptimizer]] = {
    "adamw": lambda ps, **s: FusedAdamW(ps, lr=0.1, **s),
    "adamw_amsgrad": lambda ps, **s: FusedAdamW(ps, lr=0.1, amsgrad=True, **s),
    "adam": lambda ps, **s: FusedAdam(ps, lr=0.1, weight_decay=0.1, **s),
    "sgd": lambda ps, **s: FusedSGD(ps, lr=0.1, **{k: v for k, v in s.items() if k != "state"}),
    "sgd_momentum": lambda ps, **s: FusedSGD(ps, lr=0.1, momentum=0.9, dampening=0.1, **s),
    "sgd_nesterov": lambda ps, **s: FusedSGD(ps, lr=0.1, momentum=0.9, nesterov=True, **s),
    "lion": lambda ps, **s: FusedLion(ps, lr=0.1, weight_decay=0.1, **s),
    "lars": lambda ps, **s: FusedLARS(ps, lr=0.1, trust_coefficient=0.5, **s),
    "lars_nesterov": lambda ps, **s: FusedLARS(ps, lr=0.1, nesterov=True, trust_coefficient=0.5, **s),
    "lamb": lambda ps, **s: FusedLAMB(ps, lr=0.1, **s),
    "ademamix": lambda ps, **s: FusedAdEMAMix(ps, lr=0.1, **s),
}
EVERY_RULE = pytest.mark.parametrize("rule", MAKERS)
BLOCKY = ["fp32", "bf16", "int8", "int8_bf16"]


def stepped(optimizer: FusedOptimizer, grads: list[list[Tensor]]) -> list[Tensor]:
    """All that the optimizer holds after one step for each list of gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for each in grads:
        for p, grad in zip(params, each, strict=True):
            p.grad = grad
        optimizer.step()
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]


def all_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(native_harness.same_bits, a, b))


@KERNEL
@EVERY_RULE
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_case_33_all_lanes_are_equal(kernel: str, rule: str, dtype: torch.dtype) -> None:
    """Every length from 1 to four of the widest vectors and 3, as rows of a matrix, in one optimizer."""
    params = [Parameter(torch.ones(2, n, dtype=dtype)) for n in range(1, 4 * 32 + 4)]
    optimizer = MAKERS[rule](params, kernel=kernel)
    stepped(optimizer, [[torch.full_like(p, 0.5) for p in params]] * 2)
    for p in params:
        assert p.unique().numel() == 1, p.shape
        assert p[0, 0] != 1.0


def turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def sliced(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), 7.0)
    return wide[..., 1 : 2 * t.shape[-1] : 2].copy_(t)


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


@KERNEL
@EVERY_RULE
@pytest.mark.parametrize("state", BLOCKY)
def test_case_34_layouts(kernel: str, rule: str, state: str) -> None:
    """Every layout of parameter and gradient is stepped by logical index, where it lies."""
    shape = (4, 3, 9, 15)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(2)]
    plain = Parameter(start.clone())
    optimizer = MAKERS[rule]([("w", plain)], kernel=kernel, state=state)
    wanted = stepped(optimizer, [[grad] for grad in grads])
    for of_param in (turned, sliced, channels_last):
        for of_grad in (torch.clone, turned, sliced, channels_last):
            p = Parameter(of_param(start))
            alias, where = p.detach(), (p.data_ptr(), p.stride())
            other = MAKERS[rule]([("w", p)], kernel=kernel, state=state)
            # autograd would keep a dense gradient as it is; a strided slice it takes when it is set by hand
            assert all_same(stepped(other, [[of_grad(grad)] for grad in grads]), wanted), (of_param, of_grad)
            assert (p.data_ptr(), p.stride()) == where
            assert torch.equal(alias, plain.detach())


@KERNEL
@EVERY_RULE
def test_case_34_expanded_gradients_and_what_lies_between(kernel: str, rule: str) -> None:
    """The gradient of a sum is one number seen many times; a sliced parameter's neighbours keep their bits."""
    for view in (torch.tensor(0.3).expand(6, 130), torch.randn(130).expand(6, 130), torch.randn(6, 1).expand(6, 130)):
        wide = torch.randn(6, 400)
        kept = wide.clone()
        one, other = Parameter(wide[:, 5:265:2]), Parameter(wide[:, 5:265:2].clone())
        a, b = (MAKERS[rule]([p], kernel=kernel) for p in (one, other))
        assert all_same(stepped(a, [[view]]), stepped(b, [[view.clone(memory_format=torch.contiguous_format)]]))
        kept[:, 5:265:2] = other.detach()
        assert torch.equal(wide, kept)


@KERNEL
@pytest.mark.parametrize("of_param", [F32, BF16, F16])
@pytest.mark.parametrize("of_grad", [F32, BF16, F16])
def test_case_35_dtypes(kernel: str, of_param: torch.dtype, of_grad: torch.dtype) -> None:
    """float32 maths and one rounding."""
    for rule in MAKERS:
        start, grad = torch.randn(3, 140).to(of_param), torch.randn(3, 140).to(of_grad)
        mixed = native_harness.make_state(start, PLAIN._replace(rule=rule, dtype=of_param))
        exact = native_harness.make_state(start.float(), PLAIN._replace(rule=rule))
        KERNELS[kernel].step([ParamUpdate(mixed, grad, native_harness.GROUP)], None, None)
        KERNELS[kernel].step([ParamUpdate(exact, grad.float(), native_harness.GROUP)], None, None)
        assert torch.equal(mixed.spec.param, exact.spec.param.to(of_param))


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_case_35_other_dtypes_are_refused(kernel: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must be one of float32, bfloat16, float16"):
        FusedAdamW([Parameter(torch.ones(3, dtype=dtype))], kernel=kernel)
    good, late = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = FusedAdamW([good, late], kernel=kernel)
    good.grad = torch.ones(3)
    late.data = torch.ones(3, dtype=dtype)
    late.grad = torch.ones(3, dtype=dtype)
    with pytest.raises((TypeError, NotImplementedError), match=str(dtype)):
        optimizer.step()
    assert torch.equal(good, torch.ones(3))  # before anything was written


@KERNEL
def test_case_36_every_parameter_has_its_own_step(kernel: str) -> None:
    lr = 1e-3
    p, q = Parameter(torch.ones(3, 5)), Parameter(torch.ones(3, 5))
    optimizer = FusedAdamW([p], lr=lr, weight_decay=0.0, kernel=kernel)
    for step in range(1, 11):
        if step == 5:
            optimizer.add_param_group({"params": [q]})
        p.grad = torch.ones_like(p) if step % 2 == 0 else None
        q.grad = torch.ones_like(q) if step >= 5 else None
        before = p.detach().clone()
        optimizer.step()
        if step == 5:
            assert ((1 - q) / lr - 1).abs().max() < UNIT_STEP
        assert torch.equal(p, before) == (step % 2 == 1)
    assert (optimizer.state[p]["step"], optimizer.state[q]["step"]) == (5, 6)


@KERNEL
def test_case_37_coupled_and_decoupled(kernel: str) -> None:
    """p = 1, g = 0, lr 0.1, decay 0.5: Adam takes a step of lr along the decay, AdamW loses lr * decay."""
    found = {}
    for make in (FusedAdam, FusedAdamW, FusedLion, FusedSGD):
        p = Parameter(torch.ones(2, 130))
        p.grad = torch.zeros_like(p)
        make([p], lr=0.1, weight_decay=0.5, kernel=kernel).step()
        found[make] = p.detach().unique().tolist()
    assert found[FusedAdam] == [pytest.approx(0.9, rel=1e-6)]
    assert found[FusedAdamW] == found[FusedLion] == found[FusedSGD] == [pytest.approx(0.95, rel=1e-6)]
    for arguments in ({"fused": True}, {"foreach": True}, {"optim_bits": 8}, {"percentile_clipping": 5}):
        with pytest.raises(TypeError, match=next(iter(arguments))):
            FusedAdam([Parameter(torch.ones(1))], kernel=kernel, **arguments)


@KERNEL
@pytest.mark.parametrize("make", [FusedLARS, FusedLAMB])
@pytest.mark.parametrize("state", BLOCKY)
def test_case_38_norms_of_zero(kernel: str, make: type[FusedOptimizer], state: str) -> None:
    for start, gradient, moves in ((0.0, 0.5, True), (1.0, 0.0, False), (0.0, 0.0, False)):
        p = Parameter(torch.full((3, 140), start))
        optimizer = make([("w", p)], lr=0.1, weight_decay=0.0, kernel=kernel, state=state)
        for _ in range(3):
            p.grad = torch.full_like(p, gradient)
            optimizer.step()
            assert p.isfinite().all()
        assert bool((p != start).all()) == moves
        assert moves or torch.equal(p, torch.full_like(p, start))


@KERNEL
@pytest.mark.parametrize("transposed", [False, True])
def test_case_38_norms_of_the_whole_parameter(kernel: str, transposed: bool) -> None:
    """3 rows of 70,000 are several pieces; one ratio holds for all: 0.5 * |p| / |g| = 0.5 * 2 / 0.1."""
    p = torch.full((70_000, 3), 2.0).t() if transposed else torch.full((3, 70_000), 2.0)
    p = Parameter(p)
    optimizer = FusedLARS([p], lr=0.01, momentum=0.0, trust_coefficient=0.5, eps=0.0, kernel=kernel)
    p.grad = torch.full((3, 70_000), 0.1)
    optimizer.step()
    assert p.unique().tolist() == [pytest.approx(2.0 - 0.01 * 10 * 0.1, rel=1e-6)]


@KERNEL
@pytest.mark.parametrize("state", BLOCKY)
def test_case_39_lion(kernel: str, state: str) -> None:
    p = Parameter(torch.ones(2, 140))
    p.grad = torch.full_like(p, -1e-3)
    FusedLion([("w", p)], lr=0.1, weight_decay=0.5, kernel=kernel, state=state).step()
    assert p.unique().tolist() == [pytest.approx(1.05, rel=1e-6)]


@KERNEL
@EVERY_RULE
@pytest.mark.parametrize("state", BLOCKY)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_43_one_element(kernel: str, rule: str, state: str, bad: float) -> None:
    """Its block goes on, in this step and in later ones, as beside a zero. (A norm takes all of a tensor, so the
    layer-wise rules' ratio is 1 then, and their other elements only stay finite.)"""

    def run(value: float) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        p = Parameter(torch.randn(2, 200, generator=generator))
        grads = [torch.randn(2, 200, generator=generator) for _ in range(4)]
        for g in grads:
            g[1, 7] = 0.0
        grads[1][1, 7] = value
        stepped(MAKERS[rule]([("w", p)], kernel=kernel, state=state), [[g] for g in grads])
        return p.detach()

    others = torch.ones(2, 200, dtype=torch.bool)
    others[1, 7] = False
    spoilt = run(bad)
    assert spoilt[others].isfinite().all()
    if rule not in ("lars", "lars_nesterov", "lamb"):
        assert torch.equal(spoilt[others], run(0.0)[others])


@KERNEL
@pytest.mark.parametrize("rule", ["adamw", "sgd_momentum", "lion"])
@pytest.mark.parametrize("state", BLOCKY)
@pytest.mark.parametrize("master", ["none", "split8"])
def test_case_45_dither_is_no_random_number(kernel: str, rule: str, state: str, master: str) -> None:
    """Other seeds, other threads, row shards of any size, a resume in between: the same codes."""
    shape, steps = (7, 300), 4
    case = PLAIN._replace(rule=rule, state=state, dtype=BF16, master=master)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(steps)]

    def run(cuts: list[int], seed: int, threads: int) -> list[Tensor]:
        ends = [*cuts, shape[0]]
        begins = [0, *cuts]
        slots = [native_harness.make_state(start[a:b], case, a * shape[1]) for a, b in zip(begins, ends, strict=True)]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for grad in grads:
                torch.manual_seed(seed)
                work = [
                    ParamUpdate(s, grad[a:b], native_harness.GROUP) for s, a, b in zip(slots, begins, ends, strict=True)
                ]
                KERNELS[kernel].step(work, None, None)
        finally:
            torch.set_num_threads(before)
        held = [[t for name, t in native_harness.tensors_of(slot).items() if name != "step"] for slot in slots]
        return [torch.cat(parts) for parts in zip(*held, strict=True)]

    with torch.random.fork_rng():
        whole = run([], 0, 1)
        for cuts, seed, threads in (([], 1, 1), ([], 0, 3), ([4], 2, 2), ([1, 2, 6], 3, 1), ([3, 3], 4, 4)):
            assert all_same(run(cuts, seed, threads), whole), (cuts, seed, threads)


@KERNEL
@EVERY_RULE
@pytest.mark.parametrize("state", BLOCKY)
def test_case_45_a_resume_goes_on_with_the_same_codes(kernel: str, rule: str, state: str) -> None:
    shape = (5, 300)
    start, grads = torch.randn(shape), [[torch.randn(shape)] for _ in range(6)]
    whole = stepped(MAKERS[rule]([("w", Parameter(start.clone()))], kernel=kernel, state=state), grads)
    first = MAKERS[rule]([("w", Parameter(start.clone()))], kernel=kernel, state=state)
    half = stepped(first, grads[:3])
    second = MAKERS[rule]([("w", Parameter(half[0].clone()))], kernel=kernel, state=state)
    second.load_state_dict(first.state_dict())
    assert all_same(stepped(second, grads[3:]), whole)


def test_every_rule_and_format_is_in_these_tables() -> None:
    assert set(MAKERS) | {"adam_amsgrad"} == set(RULES)
    assert set(BLOCKY) == set(STATE_FORMATS)
