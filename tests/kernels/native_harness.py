"""Runs the native kernel beside the reference on the same parameters and compares every bit of what they leave."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import KERNELS, ParamSpec, ParamState, ParamUpdate
from lightning_fuse.kernels.cpu.shared_library import Library, load
from lightning_fuse.kernels.cpu.tables import RULE_IDS
from lightning_fuse.rules import RULES

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Away from what would hide a mistake: no 0, no 1, no default.
GROUP: dict[str, Any] = {
    "lr": 0.013,
    "betas": (0.83, 0.957, 0.981),  # the third is AdEMAMix's alone
    "alpha": 2.7,
    "t_alpha": 7,
    "t_beta3": 11,
    "eps": 1e-3,
    "weight_decay": 0.07,
    "momentum": 0.87,
    "dampening": 0.15,
    "trust_coefficient": 0.23,
    "maximize": False,
}

SHAPES = ((0,), (), (1,), (127,), (128,), (129,), (1009,), (3, 131), (2, 3, 43), (5, 256), (2, 3, 5, 7))

MASTERS_OF = {F32: ("none",), BF16: ("none", "fp32", "split", "split8"), F16: ("none", "fp32")}


def _reversed(t: Tensor) -> Tensor:
    return t.permute(tuple(reversed(range(t.dim()))))


# How a parameter (or gradient) of the given values lies in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "transposed": lambda t: _reversed(_reversed(t).contiguous()),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.clone(),
    "sliced": lambda t: torch.stack([t, torch.full_like(t, 7.0)], dim=-1)[..., 0],
}


class Case(NamedTuple):
    """One point of the matrix."""

    rule: str
    state: str
    dtype: torch.dtype
    master: str
    grad_dtype: torch.dtype
    layout: str
    grad_layout: str
    level: str
    threads: int


def shared_library() -> Library:
    """The library, which this test suite needs."""
    found = load()
    assert isinstance(found, Library), found
    return found


def axes() -> dict[str, Sequence[Any]]:
    """Everything that varies; dtype and master vary together."""
    weights = [(dtype, master) for dtype, masters in MASTERS_OF.items() for master in masters]
    return {
        "rule": list(RULE_IDS),
        "state": list(STATE_FORMATS),
        "weight": weights,
        "grad_dtype": [F32, BF16, F16],
        "layout": list(LAYOUTS),
        "grad_layout": [*LAYOUTS, "expanded"],
        "level": list(shared_library().runnable),
        "threads": [1, 2, 3, 4],
    }


def all_pairs(seed: int = 0) -> Iterator[Case]:
    """Cases that together hold every pair of values of any two axes; far fewer than the product."""
    values = list(axes().values())
    rng = random.Random(seed)
    missing = {
        (i, a, j, b)
        for (i, left), (j, right) in itertools.combinations(enumerate(values), 2)
        for a in range(len(left))
        for b in range(len(right))
    }
    while missing:
        i, a, j, b = min(missing)
        tried = []
        for _ in range(30):
            point = [rng.randrange(len(axis)) for axis in values]
            point[i], point[j] = a, b
            tried.append((len(missing & _pairs(point)), point))
        _, point = max(tried)
        missing -= _pairs(point)
        yield make_case(axis[index] for axis, index in zip(values, point, strict=True))


def make_case(values: Any) -> Case:
    """A case of one value per axis."""
    rule, state, (dtype, master), *rest = values
    return Case(rule, state, dtype, master, *rest)


def _pairs(point: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(point), 2)}


def make_state(values: Tensor, case: Case, first_index: int = 0) -> ParamState:
    """A parameter of the given values with fresh state."""
    param = LAYOUTS[case.layout](values.to(case.dtype, copy=True))  # some layouts are the tensor as it is
    return fresh_state(case.rule, param, case.state, case.master, first_index)


def fresh_state(rule: str, param: Tensor, state: str, master: str, first_index: int = 0) -> ParamState:
    """A parameter with state that has seen no step."""
    shape = tuple(param.shape)
    spec = ParamSpec(f"p{shape}", param, {}, RULES[rule], STATE_FORMATS[state], MASTERS[master], shape, first_index)
    held = {key: torch.zeros(part.shape, dtype=part.dtype) for key, part in spec.tensors.items()}
    for part, value in zip(spec.master.parts(shape), spec.master.start(param), strict=True):
        held[part.suffix] = value.contiguous().clone()
    return ParamState.of(spec, held)


def gradient(shape: tuple[int, ...], case: Case, round_: int) -> Tensor:
    """A gradient over many orders of magnitude; now and then with values that are not finite."""
    values = torch.randn(shape) * torch.exp(2.0 * torch.randn(shape))
    if round_ % 7 == 5 and values.numel() > 100:
        values.view(-1)[torch.tensor([3, 50, 90])] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    if case.grad_layout == "expanded":
        return values.mean().to(case.grad_dtype).expand(shape)
    return LAYOUTS[case.grad_layout](values.to(case.grad_dtype))


def tensors_of(state: ParamState) -> dict[str, Tensor]:
    """Everything that a step may write, by name."""
    found = {"param": state.spec.param, "step": state.step}
    found |= {f"master.{i}": tensor for i, tensor in enumerate(state.master)}
    for moment, tensors in zip(state.spec.rule.moments, state.moments, strict=True):
        found |= {f"{moment.name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, but that one NaN is as good as another and, in an integer, -0 does not exist."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
    equal = a.contiguous().view(whole) == b.contiguous().view(whole)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_twins(case: Case, steps: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """Steps both kernels over the same tensors and compares all that they hold, after every step."""
    shared_library().set_level(case.level)
    native, reference = KERNELS["native"].clone(), KERNELS["reference"]
    values = [torch.randn(shape) for shape in shapes]
    pair = [[make_state(value, case, 1000 * i) for i, value in enumerate(values)] for _ in range(2)]
    addresses = [(state.spec.param.data_ptr(), state.spec.param.stride()) for state in pair[0]]
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        for round_ in range(steps):
            group = {**GROUP, "lr": GROUP["lr"] / (1 + round_), "maximize": round_ % 5 == 3}
            grads = [gradient(shape, case, round_) for shape in shapes]
            # A gradient is missing now and then, so that the step counters differ.
            present = [i for i in range(len(shapes)) if (i + round_) % 6]
            factor = torch.tensor(0.37) if round_ % 2 else None
            found_inf = torch.tensor(float(round_ == 4)) if round_ % 4 == 0 else None
            for kernel, states in zip((native, reference), pair, strict=True):
                kernel.step([ParamUpdate(states[i], grads[i], group) for i in present], factor, found_inf)
            for mine, theirs in zip(*pair, strict=True):
                other = tensors_of(theirs)
                for name, tensor in tensors_of(mine).items():
                    assert same_bits(tensor, other[name]), f"{case}: {name} of {mine.spec.name} at step {round_ + 1}"
    finally:
        torch.set_num_threads(before)
        shared_library().set_level(shared_library().runnable[-1])
    assert addresses == [(state.spec.param.data_ptr(), state.spec.param.stride()) for state in pair[0]]
