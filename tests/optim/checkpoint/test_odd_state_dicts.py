"""State dicts that one meets and does not think of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedLion, FusedSGD, LoadOptions
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.optim import FusedOptimizer, to_torch_state
from tests.optim.checkpoint.test_refusals import refuse
from tests.optim.models import as_version_3, bits, give_gradients, parameters, same_bits, train

CONVERT = LoadOptions(formats="convert")


def stepped(make: Any = FusedAdamW, **settings: Any) -> tuple[FusedOptimizer, dict[str, Parameter]]:
    params = parameters()
    optimizer = make(params.items(), **settings)
    train(optimizer, params, range(3))
    return optimizer, params


def test_ones_own_live_state_under_swapped_names() -> None:
    """Its tensors are those that the load writes to."""
    params = {name: Parameter(torch.randn(2, 150)) for name in ("a", "b", "c")}
    optimizer = FusedAdamW(params.items(), state="int8")
    for step in range(3):
        for number, p in enumerate(params.values()):
            p.grad = torch.full_like(p, 10.0**number) * (step + 1)
        optimizer.step()
    before = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in params.items()}
    optimizer.load_state_dict(optimizer.state_dict(), LoadOptions(rename={"a": "b", "b": "c", "c": "a"}))
    for old, new in (("a", "b"), ("b", "c"), ("c", "a")):
        assert same_bits(dict(optimizer.state[params[new]]), before[old])


def test_indices_need_not_count_from_zero() -> None:
    """What the entry of ours lists goes by the groups' order, whatever the numbers are called."""
    optimizer, params = stepped(state=[("wide", "bf16"), "int8"])
    saved = copy.deepcopy(optimizer.state_dict())
    new = {index: 100 - 7 * index for index in saved["state"]}
    saved["state"] = {new[index]: held for index, held in saved["state"].items()}
    saved["param_groups"][0]["params"] = [new[index] for index in saved["param_groups"][0]["params"]]
    weights = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    resumed = FusedAdamW(weights.items(), state=[("wide", "bf16"), "int8"])
    resumed.load_state_dict(saved)
    assert same_bits(bits(resumed, weights), bits(optimizer, params))


def text(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()), dtype=torch.uint8)


DAMAGED = {
    "state of nobody": (lambda s: s["state"].update({9: s["state"][0]}), "state 9, which no group lists"),
    "indices as text": (
        lambda s: s.update(state={str(index): held for index, held in s["state"].items()}),
        "state '0', '1', '2', '3', which no group lists",
    ),
    "nothing in place of a state": (lambda s: s["state"].update({1: None}), "no mapping as state 1"),
    "a name twice": (lambda s: s["param_groups"][0].update(param_names=["wide"] * 4), "two parameters by one name"),
    "an index twice": (lambda s: s["param_groups"][0].update(params=[0, 0, 2, 3]), "lists a parameter twice"),
    "rules for fewer": (lambda s: as_version_3(s)["rules"].pop(), "lists 3 rules for 4 parameters"),
    "an unknown format": (lambda s: as_version_3(s)["formats"].__setitem__(0, "int9"), "format 'int9'; known"),
    "an unknown word": (lambda s: s["state"][0].update(format=text("4 adamw int9 none")), "format 'int9'; known"),
    "three words": (lambda s: s["state"][0].update(format=text("4 adamw fp32")), "expected four words"),
    "another rule's": (lambda s: s["state"][0].update(format=text("4 lion fp32 none")), "holds optimizer 'lion'"),
    "of a later version": (lambda s: s["state"][0].update(format=text("5 adamw fp32 none")), "known: 1 to 4"),
    "meta tensors": (lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].to("meta")), "damaged"),
    "sparse tensors": (lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].to_sparse()), "damaged"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_in_a_way_of_its_own(how: str) -> None:
    spoil, words = DAMAGED[how]
    optimizer, params = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    refuse(optimizer, params, saved, ValueError, words)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda p: torch.optim.RAdam(p), FusedAdam),
        (lambda p: torch.optim.NAdam(p), FusedAdam),
        (lambda p: torch.optim.Adamax(p), FusedAdam),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), FusedSGD),
        (lambda p: torch.optim.Adagrad(p), FusedSGD),
    ],
    ids=["RAdam", "NAdam", "Adamax", "RMSprop", "Adagrad"],
)
def test_relatives_with_like_moments_are_refused(theirs: Any, ours: Any) -> None:
    there = parameters()
    torchs = theirs(list(there.values()))
    train(torchs, there, range(2))
    optimizer, params = stepped(ours)
    refuse(optimizer, params, torchs.state_dict(), ValueError, "another optimizer")


def test_moments_that_go_along_to_another_rule_are_told() -> None:
    there, params = parameters(), parameters()
    torchs = torch.optim.AdamW(list(there.values()))
    train(torchs, there, range(2))
    optimizer = FusedLion(params.values())
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.last_load.converted[0] == "0.0: moments of another rule go on under lion"


def test_moments_without_a_step_are_refused() -> None:
    """Some keep one step for a whole group: bias corrections would start anew."""
    there = parameters()
    torchs = torch.optim.AdamW(list(there.values()))
    train(torchs, there, range(2))
    saved = copy.deepcopy(torchs.state_dict())
    for held in saved["state"].values():
        del held["step"]
    optimizer, params = stepped()
    refuse(optimizer, params, saved, ValueError, "holds no step for wide")


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3), (), (1, 1), (1, 129)], ids=str)
def test_shapes_at_the_edge_convert_between_all_formats(shape: tuple[int, ...]) -> None:
    for saved in STATE_FORMATS:
        p = Parameter(torch.full(shape, 0.5))
        source = FusedAdamW([("p", p)], state=[("p", saved)])
        p.grad = torch.full(shape, 0.25)
        source.step()
        for here in STATE_FORMATS:
            q = Parameter(p.detach().clone())
            target = FusedAdamW([("p", q)], state=[("p", here)])
            target.load_state_dict(source.state_dict(), CONVERT)
            assert target.state[q]["step"].item() == 1
            q.grad = torch.full(shape, 0.25)
            target.step()
            assert q.isfinite().all()
        assert set(to_torch_state(source)["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_in_another_number() -> None:
    params, there = parameters(), parameters()
    names = list(params)
    saved = FusedAdamW([{"params": [(n, there[n]) for n in part]} for part in (names[:2], names[2:])])
    train(saved, there, range(2))
    optimizer = FusedAdamW([{"params": [(n, params[n])]} for n in reversed(names)], lr=0.5)
    optimizer.load_state_dict(saved.state_dict())
    for name, p in params.items():
        assert same_bits(dict(optimizer.state[p]), dict(saved.state[there[name]]))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3] * 4
    unnamed = FusedAdamW([{"params": list(parameters().values())}, {"params": []}])
    with pytest.raises(ValueError, match=r"groups of \[2, 2\] parameters, this optimizer has \[4, 0\]"):
        unnamed.load_state_dict(saved.state_dict())


def test_fp16_parameters_with_and_without_a_copy() -> None:
    for saved, here in (("none", "fp32"), ("fp32", "none")):
        params = parameters(torch.float16)
        source = FusedAdamW(params.items(), lr=0.01, state="int8", master=saved)
        train(source, params, range(3))
        weights = {name: Parameter(p.detach().clone()) for name, p in params.items()}
        target = FusedAdamW(weights.items(), state="bf16", master=here)
        target.load_state_dict(source.state_dict(), CONVERT)
        train(target, weights, range(3, 5))
        assert all(p.isfinite().all() for p in weights.values())
        assert all("master" in note for note in target.last_load.converted)


def test_an_amsgrad_state_converts_with_its_largest_moment() -> None:
    source, params = stepped(amsgrad=True, state="int8")
    weights = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    target = FusedAdamW(weights.items(), state="fp32")
    target.load_state_dict(source.state_dict(), CONVERT)
    train(source, params, range(3, 4))
    train(target, weights, range(3, 4))
    assert all(torch.equal(p, weights[name]) for name, p in params.items())
    assert "max_exp_avg_sq" in target.state[weights["wide"]]
    plain, _ = stepped()
    target.load_state_dict(plain.state_dict())  # and is gone with a checkpoint that has none
    assert "max_exp_avg_sq" not in target.state[weights["wide"]]
    target.load_state_dict(target.state_dict())


def test_a_tied_parameter_has_one_state() -> None:
    def make() -> tuple[FusedOptimizer, dict[str, Parameter]]:
        module = torch.nn.Module()
        module.embed, module.head = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        module.head.weight = module.embed.weight
        params = dict(module.named_parameters())
        return FusedAdamW(params.items()), params

    (saved, there), (optimizer, params) = make(), make()
    train(saved, there, range(2))
    optimizer.load_state_dict(saved.state_dict())
    assert list(params) == ["embed.weight", "embed.bias", "head.bias"]
    assert all(same_bits(dict(optimizer.state[p]), dict(saved.state[there[name]])) for name, p in params.items())


def test_options_survive_copies_and_are_no_dict() -> None:
    optimizer, params = stepped()
    optimizer.load_options = CONVERT
    assert pickle.loads(pickle.dumps(optimizer)).load_options == CONVERT
    assert copy.deepcopy(optimizer).load_options == CONVERT
    optimizer.load_options = {"formats": "convert"}
    refuse(optimizer, params, optimizer.state_dict(), TypeError, "must be a LoadOptions")


def test_a_group_keeps_the_format_that_it_asks_for() -> None:
    """The format is the configuration's: a saved group's own word does not replace it."""
    there, params = parameters(), parameters()
    saved = FusedAdamW([{"params": list(there.items()), "state": "int8"}])
    train(saved, there, range(2))
    optimizer = FusedAdamW([{"params": list(params.items()), "state": "bf16"}])
    refuse(optimizer, params, saved.state_dict(), ValueError, "holds state 'int8' for wide, this run asks for 'bf16'")
    optimizer.load_state_dict(saved.state_dict(), CONVERT)
    assert set(optimizer.formats().values()) == {"bf16"}
    assert optimizer.state[params["wide"]]["exp_avg"].dtype == torch.bfloat16


def test_plain_sgd_has_nothing_to_lose() -> None:
    there, params = parameters(), parameters()
    torchs = torch.optim.SGD(list(there.values()), lr=0.25)
    train(torchs, there, range(2))
    optimizer = FusedSGD(params.values(), lr=0.5)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer.state
    give_gradients(params, 0)
    optimizer.step()
