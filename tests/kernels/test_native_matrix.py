"""The whole matrix, bit for bit over 20 steps: rule, format, weight, gradient, both layouts, size, level, threads.

``make matrix`` walks the whole product, some 1.2 million tensors, in a quarter of an hour of CPU time. The slow tests
take a quarter of the weights and sizes, another one for each rule and format, at every level with two thread counts.

The native kernel steps all combinations of dtypes, masters, layouts and sizes in one call, for every CPU level and
number of threads. The reference steps one contiguous tensor of each: that it gives the same for any layout is tested in
``test_reference.py``. 16-bit gradients and float32 gradients of the same values share a reference, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import KERNELS, ParamSpec, ParamState, ParamUpdate
from lightning_fuse.rules import RULES
from tests.kernels import native_harness
from tests.kernels.native_harness import BF16, F16, F32, LAYOUTS, MASTERS_OF, SHAPES

pytestmark = pytest.mark.skipif(
    bool(KERNELS["native"].unavailable_reason()), reason=KERNELS["native"].unavailable_reason()
)

WHOLE = "LIGHTNING_FUSE_WHOLE_MATRIX"  # set in the environment to walk everything

STEPS = 20
LOOKS = {1, 2, 6, 13, 20}  # after these steps all that was written is compared
SKIPPED = 5  # this step finds something that is not finite
UNIFORM = 11  # from this step on narrow gradients are the same in all elements, and may be expanded
FULL, NARROW = 0, 1  # gradients of 24 bits; gradients that every dtype holds
WEIGHTS = [(dtype, master) for dtype, masters in MASTERS_OF.items() for master in masters]
LEVELS = [] if KERNELS["native"].unavailable_reason() else list(native_harness.shared_library().runnable)


class Kind(NamedTuple):
    """What the reference steps one of."""

    dtype: torch.dtype
    master: str
    shape: tuple[int, ...]
    stream: int


class Variant(NamedTuple):
    """What the native kernel steps one of."""

    kind: Kind
    layout: str
    grad_dtype: torch.dtype
    grad_layout: str


KINDS = [Kind(*weight, shape, stream) for weight in WEIGHTS for shape in SHAPES for stream in (FULL, NARROW)]


def layouts_of(shape: tuple[int, ...]) -> list[str]:
    """Those in which a tensor of this shape does not lie as in another one."""
    names = {0: ["contiguous"], 1: ["contiguous", "sliced"], 4: list(LAYOUTS)}
    return names.get(len(shape), ["contiguous", "transposed", "sliced"])


def variants() -> Iterator[Variant]:
    for kind in KINDS:
        mine = layouts_of(kind.shape)
        its = mine if kind.stream == FULL else [*mine, "expanded"]
        for grad_dtype in (F32,) if kind.stream == FULL else (F32, BF16, F16):
            for layout, grad_layout in product(mine, its):
                yield Variant(kind, layout, grad_dtype, grad_layout)


@cache
def values(shape: tuple[int, ...], stream: int, step: int) -> Tensor:
    """The gradient of one step, by what it is, not how it lies; step 0 is the parameter to start from."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * SHAPES.index(shape) + stream)
    found = torch.randn(shape, generator=generator)
    if step == 0:
        return found
    found = found * torch.exp(1.5 * torch.randn(shape, generator=generator))
    if step in (8, 15) and found.numel() > 100:
        found.view(-1)[torch.tensor([3, 50, 90])] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    if stream == FULL:
        return found
    if step >= UNIFORM:
        found = torch.full(shape, 0.1 * step)
    return found.clamp(-200.0, 200.0).to(BF16).to(F16).to(BF16).float()  # fp16 cannot hold the smallest


@cache
def gradient(shape: tuple[int, ...], stream: int, dtype: torch.dtype, layout: str, step: int) -> Tensor:
    found = values(shape, stream, step).to(dtype)
    if layout == "expanded" and step >= UNIFORM and found.numel():
        return found.reshape(-1)[0].expand(shape)
    return LAYOUTS[layout if layout != "expanded" else "contiguous"](found)


class World:
    """States whose tensors lies in one region per kind, so that it is reset and compared as one."""

    def __init__(self, rule: str, state: str, members: Sequence[tuple[Kind, str]]) -> None:
        fmt, moments = STATE_FORMATS[state], RULES[rule].moments
        self.members = members
        self.start = [values(kind.shape, FULL, 0).to(kind.dtype) for kind, _ in members]
        self.params = [LAYOUTS[layout](p.clone()) for (_, layout), p in zip(members, self.start, strict=True)]
        self.regions: dict[tuple[str, torch.dtype], Tensor] = {}
        wanted = [
            [(m.name, part) for m in moments for part in fmt.codec(m).parts(kind.shape)]
            + [("master", part) for part in MASTERS[kind.master].parts(kind.shape)]
            for kind, _ in members
        ]
        views: dict[tuple[str, torch.dtype], Iterator[Tensor]] = {}
        for key in {(name + part.suffix, part.dtype) for row in wanted for name, part in row}:
            parts = [part for row in wanted for name, part in row if (name + part.suffix, part.dtype) == key]
            sizes = [torch.Size(part.shape).numel() for part in parts]
            self.regions[key] = torch.zeros(sum(sizes), dtype=key[1])
            chunks = self.regions[key].split(sizes)
            views[key] = iter([chunk.view(part.shape) for chunk, part in zip(chunks, parts, strict=True)])
        self.regions["step", torch.float64] = torch.zeros(len(members), dtype=torch.float64)
        self.states = []
        for number, ((kind, _), param, row) in enumerate(zip(members, self.params, wanted, strict=True)):
            tensors = {name + part.suffix: next(views[name + part.suffix, part.dtype]) for name, part in row}
            spec = ParamSpec(
                str(kind), param, {}, RULES[rule], fmt, MASTERS[kind.master], tuple(param.shape), first_index=1000
            )
            kept = tuple(tuple(tensors[part.suffix] for part in parts) for parts in spec.moment_tensors)
            master = tuple(tensors["master" + part.suffix] for part in spec.master.parts(kind.shape))
            self.states.append(ParamState(spec, self.regions["step", torch.float64][number], kept, master))

    def reset(self) -> None:
        for param, start in zip(self.params, self.start, strict=True):
            param.copy_(start)
        for region in self.regions.values():
            region.zero_()
        for state, (kind, _) in zip(self.states, self.members, strict=True):
            for target, source in zip(state.master, state.spec.master.start(state.spec.param), strict=True):
                target.copy_(source)
            state.step.fill_(SHAPES.index(kind.shape) % 3)

    def written(self, order: Sequence[int] | None = None) -> dict[str, Tensor]:
        """All that a step may write, by kind; ``order`` repeats and reorders the members."""
        order = range(len(self.members)) if order is None else order
        states = [self.states[index] for index in order]
        found: dict[str, list[Tensor]] = {}
        for state in states:
            found.setdefault(f"param {state.spec.param.dtype}", []).append(state.spec.param.reshape(-1))
        if len(states) == len(self.members):
            return {key: torch.cat(parts) for key, parts in found.items()} | {
                f"{name} {dtype}": region for (name, dtype), region in self.regions.items()
            }
        for state in states:
            found.setdefault("step torch.float64", []).append(state.step.reshape(-1))
            for parts, tensors in zip(state.spec.moment_tensors, state.moments, strict=True):
                for part, tensor in zip(parts, tensors, strict=True):
                    found.setdefault(f"{part.suffix} {part.dtype}", []).append(tensor.reshape(-1))
            for part, tensor in zip(state.spec.master.parts(state.spec.local_shape), state.master, strict=True):
                found.setdefault(f"master{part.suffix} {part.dtype}", []).append(tensor.reshape(-1))
        return {key: torch.cat(parts) for key, parts in found.items()}


def settings(step: int) -> tuple[dict[str, object], Tensor | None, Tensor | None]:
    group = {**native_harness.GROUP, "lr": native_harness.GROUP["lr"] / (1 + step), "maximize": step % 5 == 3}
    factor = torch.tensor(0.37) if step % 3 == 1 else None
    return group, factor, torch.tensor(float(step == SKIPPED)) if step % 2 else None


def expected(rule: str, state: str, members: Sequence[Variant]) -> dict[int, dict[str, Tensor]]:
    """What the reference leaves after each look, laid out as the native world lays it out."""
    kinds = list(dict.fromkeys(variant.kind for variant in members))
    places = {kind: place for place, kind in enumerate(kinds)}
    order = [places[variant.kind] for variant in members]
    world, found = World(rule, state, [(kind, "contiguous") for kind in kinds]), {}
    world.reset()
    for step in range(1, STEPS + 1):
        group, factor, found_inf = settings(step)
        work = [
            ParamUpdate(state, values(k.shape, k.stream, step), group)
            for state, k in zip(world.states, kinds, strict=True)
        ]
        KERNELS["reference"].step(work, factor, found_inf)
        if step in LOOKS:
            found[step] = world.written(order)
    return found


def walk(rule: str, state: str, members: Sequence[Variant], levels: Sequence[str], threads: Sequence[int]) -> None:
    true = expected(rule, state, members)
    world, kernel = World(rule, state, [(v.kind, v.layout) for v in members]), KERNELS["native"].clone()
    library, before = native_harness.shared_library(), torch.get_num_threads()
    try:
        for level, count in product(levels, threads):
            library.set_level(level)
            torch.set_num_threads(count)
            world.reset()
            for step in range(1, STEPS + 1):
                group, factor, found_inf = settings(step)
                grads = [gradient(v.kind.shape, v.kind.stream, v.grad_dtype, v.grad_layout, step) for v in members]
                kernel.step(
                    [ParamUpdate(*each, group) for each in zip(world.states, grads, strict=True)], factor, found_inf
                )
                if step in LOOKS:
                    for key, tensor in world.written().items():
                        assert native_harness.same_bits(tensor, true[step][key]), (rule, state, level, count, step, key)
    finally:
        torch.set_num_threads(before)
        library.set_level(library.runnable[-1])


def test_the_matrix_is_the_whole_product() -> None:
    all_variants = list(variants())
    assert len(all_variants) == len(set(all_variants))
    by_shape: dict[tuple[int, ...], set[tuple[object, ...]]] = {}
    for kind, layout, grad_dtype, grad_layout in all_variants:
        by_shape.setdefault(kind.shape, set()).add((kind.dtype, kind.master, grad_dtype, layout, grad_layout))
    for shape, met in by_shape.items():
        mine = layouts_of(shape)
        wanted = product(WEIGHTS, (F32, BF16, F16), mine, [*mine, "expanded"])
        assert met == {(*weight, grad_dtype, layout, grad) for weight, grad_dtype, layout, grad in wanted}
    assert set(by_shape) == set(SHAPES)


PAIRS = [(rule, state) for rule in RULES for state in STATE_FORMATS if RULES[rule].moments or state == "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=["-".join(pair) for pair in PAIRS])
def test_a_quarter_of_the_matrix(number: int) -> None:
    taken = {kind for place, kind in enumerate(KINDS) if (place // 2 + number + number // 4) % 4 == 0}
    walk(*PAIRS[number], [v for v in variants() if v.kind in taken], LEVELS, ((1, 4), (2, 3))[number // 4 % 2])


@pytest.mark.skipif(WHOLE not in os.environ, reason="a quarter of an hour: make matrix")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_whole_matrix(pair: tuple[str, str]) -> None:
    walk(*pair, list(variants()), LEVELS, (1, 2, 3, 4))


def test_the_comparison_sees_one_wrong_bit() -> None:
    """The control: a matrix that starts from another parameter is found out."""
    members = list(variants())[::400]
    true = expected("adamw", "int8", members)
    world = World("adamw", "int8", [(v.kind, v.layout) for v in members])
    world.reset()
    assert set(world.written()) == set(true[1])
    assert not all(native_harness.same_bits(tensor, true[1][key]) for key, tensor in world.written().items())
