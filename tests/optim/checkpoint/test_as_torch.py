"""What a load leaves to torch: entries of others, names, one moment in time, no state where there was none, hooks."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.optim import FusedOptimizer
from tests.optim.models import bits, give_gradients, parameters, same_bits, train


def stepped(named: bool = True, **settings: Any) -> tuple[FusedOptimizer, dict[str, Parameter]]:
    params = parameters()
    optimizer = FusedAdamW(params.items() if named else params.values(), **settings)
    train(optimizer, params, range(3))
    return optimizer, params


def pair(make: Any, **settings: Any) -> tuple[Any, dict[str, Parameter]]:
    params = parameters()
    return make(list(params.values()), **settings), params


# Entries of others.

BESIDE: dict[str, Any] = {"calls": 1, "slow": {"decay": 0.5, "since": [1, 2]}, "average": torch.ones(3)}
INSIDE: dict[str, Any] = {"slow": torch.full((3, 200), 0.25), "seen": 7, "about": {"when": (1, 2)}, "whole": [0, 1]}


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdamW, lambda p: FusedAdamW(p, state="int8")])
def test_what_others_keep_in_a_state_comes_back(make: Any) -> None:
    """The first is the control: torch's own."""
    optimizer, params = pair(make)
    train(optimizer, params, range(2))
    optimizer.state[params["wide"]].update(copy.deepcopy(INSIDE))
    optimizer.state.update(copy.deepcopy(BESIDE))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, weights = pair(make)
    train(resumed, weights, range(1))
    resumed.state["gone"] = 1
    resumed.state[weights["bias"]]["gone"] = torch.ones(2)
    resumed.load_state_dict(saved)
    held = resumed.state[weights["wide"]]
    assert torch.equal(held["slow"], INSIDE["slow"])
    assert held["seen"] == 7
    assert held["about"] == INSIDE["about"]
    assert held["whole"] == [0, 1]
    assert resumed.state["calls"] == 1
    assert resumed.state["slow"] == BESIDE["slow"]
    assert torch.equal(resumed.state["average"], BESIDE["average"])
    assert "gone" not in resumed.state
    assert "gone" not in resumed.state[weights["bias"]]
    train(resumed, weights, range(2, 4))
    assert torch.equal(resumed.state[weights["wide"]]["slow"], INSIDE["slow"])


def test_they_keep_their_dtype_and_are_copies() -> None:
    optimizer, params = stepped(state="int8")
    counts = torch.arange(5)
    optimizer.state[params["bias"]]["counts"] = counts
    saved = optimizer.state_dict()
    weights = parameters()
    resumed = FusedAdamW(weights.items(), state="int8")
    resumed.load_state_dict(saved)
    counts.zero_()
    assert torch.equal(resumed.state[weights["bias"]]["counts"], torch.arange(5))


def test_an_entry_from_before_the_first_step_is_no_state() -> None:
    """A wrapper that is built over fresh parameters: its slow weights are there before any moment."""
    params = parameters()
    optimizer = FusedAdamW(params.items(), state="int8")
    optimizer.state[params["wide"]]["slow"] = torch.ones(3)
    weights = parameters()
    resumed = FusedAdamW(weights.items(), state="int8")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert set(resumed.state[weights["wide"]]) == {"slow"}
    train(resumed, weights, range(2))
    assert int(resumed.state[weights["wide"]]["step"]) == 2


# One moment in time.


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_kept_state_dict_is_of_one_moment(state: str) -> None:
    """All of it is live, as torch's is: its step belongs to its moments."""
    optimizer, params = stepped(state=state)
    kept = optimizer.state_dict()
    train(optimizer, params, range(3, 8))
    for index, p in enumerate(params.values()):
        assert int(kept["state"][index]["step"]) == 8
        for key, value in optimizer.state[p].items():
            assert kept["state"][index][key] is value
    fresh = parameters()
    other = FusedAdamW(fresh.items(), state=state)
    other.load_state_dict(kept)
    assert all(int(other.state[p]["step"]) == 8 for p in fresh.values())


def test_a_step_beyond_float32_is_kept() -> None:
    optimizer, params = stepped()
    optimizer.state[params["wide"]]["step"].fill_(2**24 + 1)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = parameters()
    resumed = FusedAdamW(weights.items())
    resumed.load_state_dict(saved)
    train(resumed, weights, range(1))
    assert int(resumed.state[weights["wide"]]["step"]) == 2**24 + 2


# No state where there was none.


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_state_without_entries_allocates_nothing(state: str) -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items(), state=state)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    optimizer.load_state_dict(copy.deepcopy(FusedAdamW(parameters().items(), lr=0.5, state=state).state_dict()))
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_it_takes_the_state_away_that_was_there() -> None:
    optimizer, params = stepped(state="int8")
    optimizer.load_state_dict(FusedAdamW(parameters().items(), state="int8").state_dict())
    assert not optimizer.state
    before = params["wide"].detach().clone()
    give_gradients(params, 0)
    optimizer.step()
    assert int(optimizer.state[params["wide"]]["step"]) == 1
    assert not torch.equal(before, params["wide"])


def test_a_parameter_that_never_got_a_gradient_has_none_after_a_load() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items(), state="int8", lr=1e-2)
    params["wide"].requires_grad_(False)
    for step in range(2):
        give_gradients(params, step)
        params["wide"].grad = None
        optimizer.step()
    saved = optimizer.state_dict()
    assert 0 not in saved["state"]
    weights = parameters()
    resumed = FusedAdamW(weights.items(), state="int8")
    resumed.load_state_dict(copy.deepcopy(saved))
    assert resumed.last_load is not None
    assert resumed.last_load.fresh == ()
    assert weights["wide"] not in resumed.state
    assert int(resumed.state[weights["bias"]]["step"]) == 2


# Names.


def test_an_unnamed_optimizer_takes_the_names_of_the_checkpoint() -> None:
    saved, _ = stepped(named=True)
    optimizer, params = stepped(named=False)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["param_names"] == list(params)
    assert list(optimizer.formats()) == list(params)
    theirs = torch.optim.AdamW(list(parameters().values()))
    theirs.load_state_dict(torch.optim.AdamW(list(parameters().items())).state_dict())
    assert theirs.param_groups[0]["param_names"] == list(params)  # as torch does


def test_two_groups_take_their_own_names() -> None:
    params = parameters()
    names = list(params)
    halves = [names[:1], names[1:]]
    saved = FusedAdamW([{"params": [(n, params[n]) for n in half]} for half in halves])
    train(saved, params, range(2))
    there = parameters()
    optimizer = FusedAdamW([{"params": [there[n] for n in half]} for half in halves])
    optimizer.load_state_dict(saved.state_dict())
    assert [group["param_names"] for group in optimizer.param_groups] == halves
    again = FusedAdamW(list(parameters().items())[::-1])  # which is matched by the names that were taken
    again.load_state_dict(optimizer.state_dict())
    assert again.last_load is not None


def test_names_here_stay_where_the_checkpoint_has_none_or_others() -> None:
    saved, _ = stepped(named=False)
    optimizer, params = stepped(named=True)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["param_names"] == list(params)


# Settings and hooks.


def test_settings_are_as_they_were_saved() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.values(), lr=0.5, betas=(0.5, 0.75))
    optimizer.param_groups[0]["note"] = {"warm": [1, 2]}
    saved = optimizer.state_dict()
    resumed = FusedAdamW(parameters().values())
    resumed.load_state_dict(saved)
    group = resumed.param_groups[0]
    assert group["betas"] == (0.5, 0.75)
    assert isinstance(group["betas"], tuple)
    assert isinstance(group["lr"], float)
    assert group["note"] == {"warm": [1, 2]}
    group["note"]["warm"].append(3)
    assert optimizer.param_groups[0]["note"] == {"warm": [1, 2]}


def test_load_hooks_run_as_torchs() -> None:
    saved, _ = stepped()
    optimizer, params = stepped()
    seen: list[Any] = []

    def replace(own: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict["touched"] = True  # a copy: the caller's stays as it is
        groups = [{**group, "lr": 0.75} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.param_groups[0]["lr"]))
    packed = saved.state_dict()
    optimizer.load_state_dict(packed)
    assert seen == [0.75]
    assert "touched" not in packed
    assert torch.equal(optimizer.state[params["wide"]]["exp_avg"], packed["state"][0]["exp_avg"])


def test_a_hook_may_make_something_else_of_a_state_dict() -> None:
    optimizer, _ = stepped()
    optimizer.register_state_dict_post_hook(lambda own, packed: {"count": len(packed["state"])})
    assert optimizer.state_dict() == {"count": 4}


def test_a_plan_changes_nothing_and_can_be_asked_for_alone() -> None:
    saved, _ = stepped(state="int8")
    optimizer, params = stepped(state="int8", lr=0.5)
    before = bits(optimizer, params)
    plan = optimizer.plan_load(saved.state_dict())
    assert [item.spec.name for item in plan.items] == list(params)
    assert same_bits(bits(optimizer, params), before)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="asks for 'int8'"):
        optimizer.plan_load(stepped(state="bf16")[0].state_dict())


@pytest.mark.parametrize("old", ["extra", "reshaped"])
def test_an_option_under_its_old_name_says_the_new_one(old: str) -> None:
    from lightning_fuse import LoadOptions

    new = {"extra": "unexpected", "reshaped": "shape_mismatch"}[old]
    with pytest.raises(TypeError, match=f"no option '{old}' any more: write {new}='fresh'"):
        LoadOptions(**{old: "fresh"})


def test_a_state_that_says_itself_what_it_is() -> None:
    optimizer, _ = stepped(state="int8")
    saved = optimizer.state_dict()
    assert saved["lightning_fuse"] == {"format_version": 4}
    words = [bytes(held["format"].tolist()).decode() for held in saved["state"].values()]
    assert words == ["4 adamw int8 none", "4 adamw int8 none", "4 adamw fp32 none", "4 adamw fp32 none"]
    assert all(isinstance(value, Tensor) for held in saved["state"].values() for value in held.values())
    plain = FusedSGD(parameters().values(), lr=0.1)
    assert plain.state_dict()["state"] == {}


# The way of a load.


def calls_of(run: Any) -> tuple[int, set[tuple[str, str]]]:
    """How many functions of the package run, and which."""
    count, found = 0, set()

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and "/lightning_fuse/" in frame.f_code.co_filename:
            count += 1
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count, found


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_load_is_a_short_way(state: str) -> None:
    """15,729 calls of 113 functions in 19 files once, for 100 tensors."""

    def make() -> FusedOptimizer:
        generator = torch.Generator().manual_seed(0)
        shapes = [(8, 300) if i % 2 else (300,) for i in range(100)]
        params = [(f"p{i}", Parameter(torch.randn(shape, generator=generator))) for i, shape in enumerate(shapes)]
        optimizer = FusedAdamW(params, state=state)
        for _, p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    saved, optimizer = make().state_dict(), make()
    count, found = calls_of(lambda: optimizer.load_state_dict(saved))
    assert count <= 2_500
    assert len(found) <= 47
    assert len({file for file, _ in found}) <= 9
