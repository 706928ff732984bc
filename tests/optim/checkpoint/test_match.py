"""Loading where a checkpoint and an optimizer differ: by name, with a report and a choice (cases 27 and 28)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, LoadOptions
from lightning_fuse.optim import FusedOptimizer
from tests.optim.checkpoint.test_refusals import refuse
from tests.optim.models import bits, parameters, same_bits, train


def trained(names: dict[str, str] | None = None, **settings: Any) -> tuple[FusedOptimizer, dict[str, Parameter]]:
    """An optimizer after three steps, its parameters under other names where those are given."""
    params = {(names or {}).get(name, name): p for name, p in parameters().items()}
    optimizer = FusedAdamW(params.items(), **{"state": "int8", **settings})
    train(optimizer, params, range(3))
    return optimizer, params


def built(params: dict[str, Parameter], **settings: Any) -> FusedOptimizer:
    """An optimizer with an earlier life of two steps, which a load must replace."""
    optimizer = FusedAdamW(params.items(), **{"state": "int8", **settings})
    train(optimizer, params, range(10, 12))
    return optimizer


def state_of(optimizer: FusedOptimizer, p: Parameter) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in optimizer.state[p].items()}


def test_everything_in_its_place_is_an_exact_load() -> None:
    saved, there = trained()
    params = parameters(seed=1)
    optimizer = built(params)
    optimizer.load_state_dict(saved.state_dict())
    report = optimizer.last_load
    assert report is not None
    assert report.exact
    assert report.matched == tuple(params)
    assert str(report) == "optimizer state: 4 matched"
    for name, p in params.items():
        assert same_bits(state_of(optimizer, p), state_of(saved, there[name]))


@pytest.mark.parametrize("rename", [{"old.kernel": "deep.kernel", "old.bias": "bias"}, {"old.*": "*"}, None], ids=str)
def test_renamed_parameters(rename: dict[str, str] | None) -> None:
    saved, there = trained({"deep.kernel": "old.kernel", "bias": "old.bias"})
    if rename == {"old.*": "*"}:
        there = {"kernel" if name == "old.kernel" else name.removeprefix("old."): p for name, p in there.items()}
        params = {"kernel" if name == "deep.kernel" else name: p for name, p in parameters(seed=1).items()}
    else:
        there = {{"old.kernel": "deep.kernel", "old.bias": "bias"}.get(name, name): p for name, p in there.items()}
        params = parameters(seed=1)
    optimizer = built(params)
    if rename is None:  # the control: without the map the names do not fit
        refuse(optimizer, params, saved.state_dict(), ValueError, "only in the checkpoint: old.bias, old.kernel")
        return
    optimizer.load_options = LoadOptions(rename=rename)
    optimizer.load_state_dict(saved.state_dict())
    for name, p in params.items():
        assert same_bits(state_of(optimizer, p), state_of(saved, there[name]))


def test_a_new_parameter_starts_fresh_beside_the_others() -> None:
    """Unfrozen on resume: in the model before, in the optimizer only now."""
    there = parameters()
    frozen = there.pop("bias")
    saved = FusedAdamW(there.items(), state="int8")
    train(saved, there, range(3))
    assert frozen.grad is None
    params = parameters(seed=1)
    optimizer = built(params)
    refuse(optimizer, params, saved.state_dict(), ValueError, 'only in this optimizer: bias.*missing="fresh"')
    optimizer.load_options = LoadOptions(missing="fresh")
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.last_load is not None
    assert optimizer.last_load.fresh == ("bias: the checkpoint does not hold it",)
    assert "fresh: bias" in str(optimizer.last_load)
    assert all(not value.any() for value in optimizer.state[params["bias"]].values())
    assert same_bits(state_of(optimizer, params["wide"]), state_of(saved, there["wide"]))


def test_a_parameter_that_is_gone_is_left_out_by_name() -> None:
    """Frozen on resume: the checkpoint's state of it has nowhere to go."""
    saved, there = trained()
    params = parameters(seed=1)
    del params["wide"]
    optimizer = built(params)
    refuse(optimizer, params, saved.state_dict(), ValueError, 'only in the checkpoint: wide.*unexpected="leave_out"')
    optimizer.load_options = LoadOptions(unexpected="leave_out")
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.last_load is not None
    assert optimizer.last_load.left_out == ("wide",)
    assert same_bits(state_of(optimizer, params["bias"]), state_of(saved, there["bias"]))


def test_a_frozen_parameter_in_the_optimizer_keeps_its_state() -> None:
    saved, there = trained()
    params = parameters(seed=1)
    params["wide"].requires_grad_(False)
    optimizer = built(params)
    optimizer.load_state_dict(saved.state_dict())
    assert same_bits(state_of(optimizer, params["wide"]), state_of(saved, there["wide"]))


def test_a_reshaped_parameter_starts_fresh_where_that_is_chosen() -> None:
    saved, there = trained()
    params = parameters(seed=1)
    params["wide"] = Parameter(torch.randn(5, 200))
    optimizer = FusedAdamW(params.items(), state="int8")
    with pytest.raises(ValueError, match=r"wide of shape \(3, 200\), here .*\(5, 200\).*shape_mismatch=\"fresh\""):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    optimizer.load_options = LoadOptions(shape_mismatch="fresh")
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.last_load is not None
    assert optimizer.last_load.fresh == ("wide: it was of shape (3, 200) and is of shape (5, 200)",)
    assert same_bits(state_of(optimizer, params["gain"]), state_of(saved, there["gain"]))


def test_configured_values_win_where_the_user_says_so() -> None:
    """Case 28: each difference is listed with who wins."""
    saved, _ = trained(lr=0.25, weight_decay=0.5)
    params = parameters(seed=1)
    optimizer = FusedAdamW(params.items(), state="int8", lr=0.125, weight_decay=0.75)
    optimizer.param_groups[0]["initial_lr"] = 0.125
    saved.param_groups[0]["initial_lr"] = 0.25
    optimizer.load_options = LoadOptions(override=["lr"])
    optimizer.load_state_dict(saved.state_dict())
    group, report = optimizer.param_groups[0], optimizer.last_load
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.125, 0.125, 0.5)
    assert report is not None
    assert report.taken_over == ("group 0: weight_decay 0.5 from the checkpoint, configured 0.75",)
    assert report.overridden[0] == "group 0: lr 0.125 as configured, 0.25 in the checkpoint"
    assert not report.exact


def test_groups_cut_in_another_way_are_joined_where_they_agree() -> None:
    there = parameters()
    names = list(there)
    saved = FusedAdamW([{"params": [(n, there[n])]} for n in names], state="int8", lr=0.25)
    train(saved, there, range(3))
    params = parameters(seed=1)
    optimizer = built(params, lr=0.5)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert same_bits(bits(optimizer, params) | {n: p.detach() for n, p in there.items()}, bits(saved, there))
    saved.param_groups[1]["lr"] = 0.75
    refuse(optimizer, params, saved.state_dict(), ValueError, r"4 groups of the checkpoint, whose lr differ.*override")
    optimizer.load_options = LoadOptions(override=["lr"])
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25


BAD_OPTIONS = [
    ({"missing": "frehs"}, ValueError, "unknown value of missing 'frehs'; known: fresh, refuse; did you mean 'fresh'"),
    ({"override": "lr"}, TypeError, "must be a list of hyperparameters"),
    ({"rename": {"a.*": "b"}}, ValueError, "two beginnings"),
    ({"rename": ["a"]}, TypeError, "must map"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LoadOptions(**options)


NO_EFFECT = [
    ({"rename": {"wdie": "wide"}}, "no parameter 'wdie'; closest: wide"),
    ({"rename": {"wide": "bias"}}, "two parameters of the checkpoint are called 'bias'"),
    ({"rename": {"wide": "broad"}, "unexpected": "leave_out", "missing": "fresh"}, "no parameter here is called so"),
    ({"override": ["lrr"]}, "unknown hyperparameter 'lrr'; known: amsgrad"),
]


@pytest.mark.parametrize(("options", "words"), NO_EFFECT)
def test_options_that_would_have_no_effect(options: dict[str, Any], words: str) -> None:
    saved, _ = trained()
    params = parameters(seed=1)
    optimizer = built(params)
    optimizer.load_options = LoadOptions(**options)
    refuse(optimizer, params, saved.state_dict(), ValueError, words)
