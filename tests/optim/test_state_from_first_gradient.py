"""A parameter has state from its first gradient on: frozen and unreached ones cost nothing, late ones start anew."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedLAMB, FusedLARS, FusedLion, FusedSGD
from lightning_fuse.optim import FusedOptimizer

MOMENTUM: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
KINDS: dict[str, Callable[[Any], FusedOptimizer]] = {
    "adamw": lambda ps: FusedAdamW(ps, lr=0.01),
    "adamw int8": lambda ps: FusedAdamW(ps, lr=0.01, state="int8"),
    "sgd bf16": lambda ps: FusedSGD(ps, **MOMENTUM, state="bf16"),
    "lion": lambda ps: FusedLion(ps, lr=0.01),
    "lars int8": lambda ps: FusedLARS(ps, **MOMENTUM, state="int8"),
    "lamb": lambda ps: FusedLAMB(ps, lr=0.01),
}
EVERY_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


def weight(*shape: int) -> Any:
    return Parameter(torch.linspace(-1, 1, int(torch.Size(shape).numel())).view(shape))


def give(*params: Tensor, size: float = 1.0) -> None:
    for p in params:
        p.grad = torch.full_like(p, size)


@EVERY_KIND
def test_frozen_and_unreached_parameters_have_no_state_and_no_bytes(make: Callable[[Any], FusedOptimizer]) -> None:
    trained, frozen, unreached = weight(3, 140), weight(50, 50).requires_grad_(False), weight(7)
    optimizer = make([trained, frozen, unreached])
    alone = make([trained])
    give(trained)
    optimizer.step()
    assert set(optimizer.state) == {trained}
    assert set(optimizer.state_dict()["state"]) == {0}
    assert optimizer.state_bytes() == alone.state_bytes()
    kept = [t for t in optimizer.state[trained].values() if isinstance(t, Tensor)]
    assert sum(optimizer.state_bytes().values()) == sum(t.nbytes for t in kept)


@EVERY_KIND
def test_a_parameter_unfrozen_later_starts_as_a_new_one(make: Callable[[Any], FusedOptimizer]) -> None:
    first, late = weight(3, 140), weight(2, 140).requires_grad_(False)
    optimizer = make([first, late])
    for _ in range(5):
        give(first)
        optimizer.step()
    late.requires_grad_(True)
    fresh = Parameter(late.detach().clone())
    give(late, fresh)
    optimizer.step()
    make([fresh]).step()
    assert float(optimizer.state[late]["step"]) == 1.0
    assert torch.equal(late, fresh)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.complex64])
def test_frozen_parameters_of_other_kinds_are_kept_and_left_alone(dtype: torch.dtype) -> None:
    odd = Parameter(torch.ones(4).to(dtype), requires_grad=False)
    optimizer = FusedAdamW([p := weight(2, 3), odd])
    give(p)
    optimizer.step()
    assert odd not in optimizer.state
    assert torch.equal(odd, torch.ones(4).to(dtype))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert set(optimizer.state) == {p}


def test_a_frozen_parameter_of_another_kind_is_refused_at_its_first_gradient() -> None:
    odd = Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
    optimizer = FusedAdamW([p := weight(2, 3), odd])
    odd.requires_grad_(True)
    give(p, odd)
    before = p.detach().clone()
    with pytest.raises(TypeError, match="float64: must be"):
        optimizer.step()
    assert torch.equal(p, before)


@EVERY_KIND
def test_loading_a_state_without_entries_allocates_nothing(make: Callable[[Any], FusedOptimizer]) -> None:
    optimizer = make([p := weight(3, 140)])
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    give(p)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1.0


COLLECTIONS: dict[str, Callable[[Parameter, Parameter], Any]] = {
    "generator": lambda a, b: (p for p in (a, b)),
    "tuple": lambda a, b: (a, b),
    "values of a dict": lambda a, b: {"a": a, "b": b}.values(),
    "one parameter": lambda a, b: a,
}


@pytest.mark.parametrize("what", COLLECTIONS)
def test_a_group_may_be_added_in_training_from_any_collection(what: str) -> None:
    optimizer = FusedAdamW([first := weight(3, 4)], state="int8")
    give(first)
    optimizer.step()
    a, b = weight(2, 140), weight(5)
    optimizer.add_param_group({"params": COLLECTIONS[what](a, b), "lr": 0.5})
    give(first, a, b)
    optimizer.step()
    assert float(optimizer.state[first]["step"]) == 2.0
    assert float(optimizer.state[a]["step"]) == 1.0
    assert (b in optimizer.state) == (what != "one parameter")


def test_a_parameter_replaced_in_its_group_is_stepped_and_takes_state_moved_by_hand() -> None:
    optimizer = FusedAdamW([old := weight(2, 140)], lr=0.01, state="int8")
    plain = FusedAdamW([same := weight(2, 140)], lr=0.01, state="int8")
    give(old, same)
    optimizer.step()
    plain.step()
    new = Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(old)
    give(new, same, size=0.5)
    optimizer.step()
    plain.step()
    assert torch.equal(new, same)
    assert float(optimizer.state[new]["step"]) == 2.0


def test_a_parameter_replaced_without_its_state_starts_anew() -> None:
    optimizer = FusedAdamW([old := weight(4, 4)])
    give(old)
    optimizer.step()
    new = weight(4, 4)
    optimizer.param_groups[0]["params"][0] = new
    give(new)
    optimizer.step()
    assert float(optimizer.state[new]["step"]) == 1.0


@EVERY_KIND
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_go_on_with_equal_bits(make: Callable[[Any], FusedOptimizer], way: str) -> None:
    optimizer = make([p := weight(3, 140), weight(5).requires_grad_(False)])
    give(p)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else copy.deepcopy(optimizer)
    twin = copied.param_groups[0]["params"][0]
    for _ in range(3):
        give(p, twin, size=-0.3)
        optimizer.step()
        copied.step()
    assert torch.equal(p, twin)
    assert twin is not p


def test_torchs_adamw_steps_on_with_our_float64_steps() -> None:
    """What a state dict of ours holds for fp32 state is what torch keeps; foreach on a CPU takes a float64 step."""
    ours, theirs = weight(3, 5), weight(3, 5)
    optimizer = FusedAdamW([ours], lr=0.01)
    give(ours)
    optimizer.step()
    theirs.data.copy_(ours.data)
    other = torch.optim.AdamW([theirs], lr=0.01, foreach=True)
    held = {key: value for key, value in optimizer.state[ours].items() if key != "format"}
    assert held["step"].dtype == torch.float64
    other.state[theirs] = copy.deepcopy(held)
    give(ours, theirs, size=0.5)
    optimizer.step()
    other.step()
    torch.testing.assert_close(ours, theirs)
    assert float(other.state[theirs]["step"]) == 2.0


def test_a_shared_gradient_and_kept_gradients_step_as_separate_ones() -> None:
    a, b, c, d = (weight(2, 140) for _ in range(4))
    shared, apart = FusedAdamW([a, b]), FusedAdamW([c, d])
    for size in (1.0, -0.5, 0.25):
        a.grad = b.grad = torch.full((2, 140), size)
        give(c, d, size=size)
        shared.step()
        apart.step()
        shared.zero_grad(set_to_none=size > 0)
        apart.zero_grad(set_to_none=size < 0)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def test_a_group_without_parameters_may_come_and_go_between_steps() -> None:
    optimizer, plain = FusedAdamW([a := weight(2, 140)], lr=0.1), FusedAdamW([b := weight(2, 140)], lr=0.1)
    for number in range(6):
        if number % 2:
            optimizer.add_param_group({"params": [], "lr": 0.7})
        give(a, b, size=number + 1.0)
        optimizer.step()
        plain.step()
    assert torch.equal(a, b)
