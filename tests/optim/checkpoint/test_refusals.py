"""A checkpoint that does not fit is refused in load_state_dict, with words that help, and nothing moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedSGD
from lightning_fuse.optim import FusedOptimizer
from tests.optim.models import as_version_3, bits, groups_of, parameters, same_bits, train


def stepped(make: Callable[..., FusedOptimizer] = FusedAdamW, dtype: torch.dtype = torch.float32, **settings: Any):
    params = parameters(dtype)
    optimizer = make(params.items(), **settings)
    train(optimizer, params, range(2))
    return optimizer, params


def refuse(optimizer: FusedOptimizer, params: dict[str, Parameter], saved: Any, error: type, words: str) -> None:
    """Loading raises, and neither parameters nor state nor groups have changed; the next step works."""
    before, groups = bits(optimizer, params), groups_of(optimizer)
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(saved)
    assert same_bits(bits(optimizer, params), before)
    assert groups_of(optimizer) == groups
    train(optimizer, params, range(2, 3))


@pytest.mark.parametrize("saved", [None, 3, [], {}, {"state": {}}, {"param_groups": []}, {"model": 1}], ids=repr)
def test_something_else(saved: Any) -> None:
    optimizer, params = stepped()
    refuse(optimizer, params, saved, TypeError, "not an optimizer's state dict")


OTHER_FORMAT = [("fp32", "int8"), ("int8", "fp32"), ("int8", "int8_bf16"), ("bf16", "fp32")]


@pytest.mark.parametrize(("saved", "here"), OTHER_FORMAT)
def test_another_format(saved: str, here: str) -> None:
    optimizer, params = stepped(state=here)
    other, _ = stepped(state=saved)
    refuse(
        optimizer, params, other.state_dict(), ValueError, f"holds state '{saved}' .*asks for '{here}'.*state={saved}"
    )


@pytest.mark.parametrize(("saved", "here"), [("none", "split"), ("split", "split8"), ("fp32", "none")])
def test_another_master(saved: str, here: str) -> None:
    optimizer, params = stepped(dtype=torch.bfloat16, master=here)
    other, _ = stepped(dtype=torch.bfloat16, master=saved)
    refuse(optimizer, params, other.state_dict(), ValueError, f"holds master '{saved}' .*asks for '{here}'")


@pytest.mark.parametrize(
    ("saved", "settings"),
    [(FusedAdam, {}), (FusedSGD, {}), (FusedSGD, {"momentum": 0.9})],
    ids=str,
)
def test_another_rule(saved: type[FusedOptimizer], settings: dict[str, Any]) -> None:
    optimizer, params = stepped()
    other, _ = stepped(saved, **settings)
    refuse(optimizer, params, other.state_dict(), ValueError, "asks for 'adamw'|another optimizer")


def test_other_parameters_are_listed_by_name() -> None:
    optimizer, params = stepped()
    there = parameters()
    there["other"] = there.pop("bias")
    other = FusedAdamW(there.items())
    words = "only in the checkpoint: other; only in this optimizer: bias"
    refuse(optimizer, params, other.state_dict(), ValueError, words)


def test_another_number_of_unnamed_parameters() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.values())
    train(optimizer, params, range(2))
    other = FusedAdamW(list(parameters().values())[:2])
    refuse(optimizer, params, other.state_dict(), ValueError, "groups of .2. parameters, this optimizer has .4.")


Spoil = Callable[[dict[str, Any]], None]


def of(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["state"][1]


CORRUPT: dict[str, Spoil] = {
    "the step is missing": lambda s: of(s).pop("step"),
    "a tensor is missing": lambda s: of(s).pop("exp_avg.scale"),
    "another shape": lambda s: of(s).update({"exp_avg.codes": torch.zeros(4, 3, 6, dtype=torch.int8)}),
    "another dtype": lambda s: of(s).update({"exp_avg.codes": torch.zeros(4, 3, 5)}),
    "no tensor": lambda s: of(s).update({"exp_avg.codes": 3}),
    "a step that counts nothing": lambda s: of(s).update(step=torch.tensor(-3.0)),
    "the state of one is no mapping": lambda s: s["state"].update({1: 7}),
    "an unknown version": lambda s: s["lightning_fuse"].update(format_version=99),
    "no version": lambda s: as_version_3(s).pop("format_version"),
    "no list of rules": lambda s: as_version_3(s).pop("rules"),
    "a short list of formats": lambda s: as_version_3(s)["formats"].pop(),
    "what it holds is no mapping": lambda s: s.update(lightning_fuse=3),
    "no parameters in a group": lambda s: s["param_groups"][0].pop("params"),
    "names and parameters of different length": lambda s: s["param_groups"][0]["param_names"].pop(),
    "an index twice": lambda s: s["param_groups"][0].update(params=[0, 0, 2, 3]),
    "groups are no list": lambda s: s.update(param_groups=None),
    "a group is no mapping": lambda s: s.update(param_groups=[3]),
    "state is no mapping": lambda s: s.update(state=[1, 2]),
    "lr is missing": lambda s: s["param_groups"][0].pop("lr"),
    "lr is NaN": lambda s: s["param_groups"][0].update(lr=float("nan")),
    "betas are text": lambda s: s["param_groups"][0].update(betas="text"),
}


@pytest.mark.parametrize("how", CORRUPT)
def test_a_corrupt_checkpoint(how: str) -> None:
    """One clear error, a ValueError or TypeError with words, never a KeyError from inside."""
    optimizer, params = stepped(state="int8")
    other, _ = stepped(state="int8", lr=0.5)
    saved = copy.deepcopy(other.state_dict())
    CORRUPT[how](saved)
    before, groups = bits(optimizer, params), groups_of(optimizer)
    with pytest.raises((ValueError, TypeError)) as caught:
        optimizer.load_state_dict(saved)
    assert len(str(caught.value)) > 20
    assert same_bits(bits(optimizer, params), before)
    assert groups_of(optimizer) == groups
    train(optimizer, params, range(2, 3))


def test_a_bad_second_group_leaves_the_first_alone() -> None:
    names = list(parameters())

    def make(lr: float) -> tuple[FusedOptimizer, dict[str, Parameter]]:
        params = parameters()
        halves = [[(n, params[n]) for n in part] for part in (names[:2], names[2:])]
        return FusedAdamW([{"params": half} for half in halves], lr=lr), params

    (optimizer, params), (other, _) = make(0.25), make(0.5)
    saved = copy.deepcopy(other.state_dict())
    saved["param_groups"][1]["lr"] = float("nan")
    refuse(optimizer, params, saved, ValueError, "lr")


def test_a_refusal_before_the_first_step_leaves_no_state() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items(), state="int8")
    other, _ = stepped(state="fp32")
    with pytest.raises(ValueError, match="asks for 'int8'"):
        optimizer.load_state_dict(other.state_dict())
    assert len(optimizer.state) == 0


def test_an_amsgrad_checkpoint_brings_its_rule_and_all_its_moments() -> None:
    """amsgrad is a number of the group, so it comes from the checkpoint, and with it the largest second moment."""
    optimizer, params = stepped()
    other, there = stepped(FusedAdamW, amsgrad=True)
    optimizer.load_state_dict(other.state_dict())
    assert all(group["amsgrad"] for group in optimizer.param_groups)
    for name, p in params.items():
        theirs = other.state[there[name]]
        assert set(optimizer.state[p]) == set(theirs)
        for key, tensor in theirs.items():
            assert torch.equal(optimizer.state[p][key], tensor), (name, key)
        assert optimizer.state[p]["max_exp_avg_sq"].any()
