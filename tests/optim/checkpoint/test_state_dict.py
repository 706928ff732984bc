"""Saving and loading our own state: every bit, by name, for every rule, format, dtype and master (case 25)."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.rules import RULES
from tests.optim.models import bits, give_gradients, groups_of, parameters, same_bits, train
from tests.rules.rule_table import CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def combinations() -> Iterator[tuple[str, str, torch.dtype, str]]:
    for rule in CASES:
        for state in STATE_FORMATS if RULES[rule].moments else ("fp32",):
            for dtype in DTYPES:
                for name, master in MASTERS.items():
                    if dtype in master.dtypes:
                        yield rule, state, dtype, name


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def copied(params: dict[str, Parameter]) -> dict[str, Parameter]:
    return {name: Parameter(p.detach().clone()) for name, p in params.items()}


@pytest.mark.parametrize(
    ("rule", "state", "dtype", "master"),
    combinations(),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_train_8_is_train_4_save_load_train_4(rule: str, state: str, dtype: torch.dtype, master: str) -> None:
    case, settings = CASES[rule], {"state": state, "master": master}
    params = parameters(dtype)
    optimizer = case.make(params.items(), **settings)
    train(optimizer, params, range(4))
    saved, weights = through_a_file(optimizer.state_dict()), copied(params)
    resumed = case.make(weights.items(), **settings)
    resumed.load_state_dict(saved)
    assert same_bits(bits(resumed, weights), bits(optimizer, params))
    train(optimizer, params, range(4, 8))
    train(resumed, weights, range(4, 8))
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


@pytest.mark.parametrize("state", STATE_FORMATS)
def test_forgetting_the_state_is_seen(state: str) -> None:
    """The control of the test above: a resume that loads nothing ends elsewhere."""
    params = parameters()
    optimizer = FusedAdamW(params.items(), state=state)
    train(optimizer, params, range(4))
    weights = copied(params)
    fresh = FusedAdamW(weights.items(), state=state)
    train(optimizer, params, range(4, 8))
    train(fresh, weights, range(4, 8))
    assert not same_bits(bits(fresh, weights), bits(optimizer, params))


@pytest.mark.slow
def test_a_fresh_process_continues_with_the_same_bits(run_python: Any, tmp_path: Any) -> None:
    code = """
import sys, torch
from lightning_fuse import FusedAdamW
torch.manual_seed(int(sys.argv[1]))           # global random state must not matter
first, read = int(sys.argv[2]), sys.argv[3]
p = torch.nn.Parameter(torch.linspace(-1, 1, 600).view(3, 200).bfloat16())
optimizer = FusedAdamW([("w", p)], state="int8", master="split8")
if read != "-":
    held = torch.load(read, weights_only=True)
    p.data.copy_(held["w"])
    optimizer.load_state_dict(held["optimizer"])
for step in range(first, 8):
    p.grad = torch.sin(torch.arange(600.0) * (step + 1)).view(3, 200).bfloat16()
    optimizer.step()
    if first == 0 or step == 7:
        torch.save({"w": p.data, "optimizer": optimizer.state_dict()}, f"{first}-{step}.pt")
"""
    for arguments in (("1", "0", "-"), ("2", "4", "0-3.pt")):
        done = run_python("-c", code, *arguments)
        assert done.returncode == 0, done.stderr
    whole, rest = (torch.load(tmp_path / name, weights_only=True) for name in ("0-7.pt", "4-7.pt"))
    assert torch.equal(whole["w"].view(torch.int16), rest["w"].view(torch.int16))
    assert same_bits(whole["optimizer"]["state"][0], rest["optimizer"]["state"][0])


def test_names_decide_not_the_order() -> None:
    """Case 27: gradients 1 and 100, registered the other way round on resume."""
    a, b = Parameter(torch.zeros(2, 130)), Parameter(torch.zeros(2, 130))
    optimizer = FusedAdamW([("a", a), ("b", b)], state="int8")
    for _ in range(3):
        a.grad, b.grad = torch.full_like(a, 1.0), torch.full_like(b, 100.0)
        optimizer.step()
    held = bits(optimizer, {"a": a, "b": b})
    saved = through_a_file(optimizer.state_dict())
    a2, b2 = Parameter(a.detach().clone()), Parameter(b.detach().clone())
    resumed = FusedAdamW([("b", b2), ("a", a2)], state="int8")
    resumed.load_state_dict(saved)
    assert same_bits(bits(resumed, {"a": a2, "b": b2}), held)
    assert resumed.state[a2]["exp_avg_sq.scale"].max() < 1 < resumed.state[b2]["exp_avg_sq.scale"].min()


def test_groups_in_another_order_take_their_own_settings() -> None:
    params = parameters()
    names = list(params)
    first, second = [(n, params[n]) for n in names[:2]], [(n, params[n]) for n in names[2:]]
    optimizer = FusedAdamW([{"params": first, "lr": 0.25}, {"params": second, "weight_decay": 0.5}], lr=0.125)
    train(optimizer, params, range(2))
    weights = copied(params)
    first, second = [(n, weights[n]) for n in names[:2]], [(n, weights[n]) for n in names[2:]]
    resumed = FusedAdamW([{"params": second}, {"params": first}])
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [0.125, 0.25]
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.5, 1e-2]
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


def test_without_names_the_order_decides() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.values())
    train(optimizer, params, range(2))
    weights = copied(params)
    resumed = FusedAdamW(weights.values())
    resumed.load_state_dict(optimizer.state_dict())
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


def test_numbers_come_from_the_checkpoint() -> None:
    params, others = parameters(), parameters()
    optimizer = FusedAdamW(params.items(), lr=0.25, betas=(0.5, 0.75), eps=0.125, weight_decay=0.5)
    optimizer.param_groups[0]["initial_lr"] = 0.75
    resumed = FusedAdamW(others.items())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert groups_of(resumed) == groups_of(optimizer)


def test_a_saved_state_is_not_shared_with_the_optimizer_that_loads_it() -> None:
    params, others = parameters(), parameters()
    optimizer = FusedAdamW(params.items(), lr=torch.tensor(0.25))
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    before = bits(optimizer, params)
    resumed = FusedAdamW(others.items(), lr=torch.tensor(0.5))
    resumed.load_state_dict(saved)
    train(resumed, others, range(2, 4))
    resumed.param_groups[0]["lr"].fill_(0.0625)
    assert same_bits(bits(optimizer, params), before)
    assert optimizer.param_groups[0]["lr"].item() == 0.25


def test_loading_replaces_what_was_there() -> None:
    """Also for parameters that the checkpoint has never stepped: they have no state, and start again."""
    params, others = parameters(), parameters()
    optimizer = FusedAdamW(params.items(), state="int8")
    give_gradients(params, 0)
    params["wide"].grad = None
    optimizer.step()
    resumed = FusedAdamW(others.items(), state="int8")
    train(resumed, others, range(5))
    resumed.load_state_dict(optimizer.state_dict())
    assert others["wide"] not in resumed.state
    for name in ("deep.kernel", "bias", "gain"):
        for key, value in optimizer.state[params[name]].items():
            assert torch.equal(resumed.state[others[name]][key], value)
    untouched = FusedAdamW(parameters().items(), state="int8")
    resumed.load_state_dict(untouched.state_dict())
    assert not resumed.state


def test_a_state_dict_is_plain_data() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdamW(params.items(), state="int8", master="split")
    train(optimizer, params, range(1))
    saved = through_a_file(optimizer.state_dict())
    assert saved["lightning_fuse"] == {"format_version": 4}
    words = [bytes(held["format"].tolist()).decode() for held in saved["state"].values()]
    assert words == ["4 adamw int8 split"] * 2 + ["4 adamw fp32 split"] * 2


def test_a_deep_copy_of_a_state_dict_loads_too() -> None:
    params = parameters()
    optimizer = FusedSGD(params.items(), momentum=0.9, state="bf16")
    train(optimizer, params, range(2))
    weights = copied(params)
    resumed = FusedSGD(weights.items(), momentum=0.9, state="bf16")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


def test_a_rule_that_came_later_is_saved_as_it_is() -> None:
    """Momentum switched on in training: the state and the words of the checkpoint follow."""
    params = parameters()
    optimizer = FusedSGD(params.items(), lr=0.1)
    train(optimizer, params, range(2))
    optimizer.param_groups[0]["momentum"] = 0.5
    train(optimizer, params, range(2, 4))
    saved, weights = through_a_file(optimizer.state_dict()), copied(params)
    resumed = FusedSGD(weights.items(), lr=0.1, momentum=0.5)
    resumed.load_state_dict(saved)
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


def test_an_empty_group_is_saved_and_loaded() -> None:
    def make() -> tuple[FusedAdamW, dict[str, Parameter]]:
        params = parameters()
        return FusedAdamW([{"params": list(params.values())}, {"params": [], "lr": 0.5}]), params

    (optimizer, params), (resumed, weights) = make(), make()
    train(optimizer, params, range(2))
    train(resumed, weights, range(1))
    resumed.load_state_dict(optimizer.state_dict())
    for name, p in params.items():
        assert all(torch.equal(resumed.state[weights[name]][key], value) for key, value in optimizer.state[p].items())
