"""State of torch.optim's own optimizers, loaded into any format (case 31)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats import STATE_FORMATS, DitherKey
from lightning_fuse.formats.format import encode_moments
from lightning_fuse.rules import RULES
from tests.optim.checkpoint.test_refusals import refuse
from tests.optim.models import bits, groups_of, parameters, same_bits, train
from tests.rules.rule_table import CASES

EVERY_RULE = pytest.mark.parametrize("rule", CASES)


def torch_run(rule: str, named: bool, steps: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    params = parameters(dtype)
    optimizer = CASES[rule].make_torch(list(params.items()) if named else list(params.values()))
    train(optimizer, params, range(steps))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return params, torch.load(buffer, weights_only=True)


@EVERY_RULE
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("state", STATE_FORMATS)
def test_torchs_state_loads(rule: str, named: bool, state: str) -> None:
    if not RULES[rule].moments and state != "fp32":
        return
    theirs, saved = torch_run(rule, named)
    params = {name: Parameter(p.detach().clone()) for name, p in theirs.items()}
    ours = CASES[rule].make(params.items() if named else params.values(), state=state, lr=0.5)
    ours.load_state_dict(saved)
    assert groups_of(ours)[0]["lr"] == CASES[rule].settings["lr"]
    for index, (name, p) in enumerate(params.items()):
        if RULES[rule].moments:
            assert ours.state[p]["step"].item() == (5 if CASES[rule].is_adam else 1)
        moments = RULES[rule].moments
        kept = STATE_FORMATS[next(iter(ours.formats().values())) if not named else ours.formats()[name]]
        kept = STATE_FORMATS["fp32"] if p.dim() < 2 and kept.scaled else kept
        codecs, values = [kept.codec(moment) for moment in moments], [saved["state"][index][m.name] for m in moments]
        encoded = encode_moments(moments, codecs, values, DitherKey(int(ours.state[p]["step"]))) if moments else ()
        for moment, codec, expected in zip(moments, codecs, encoded, strict=True):
            for part, tensor in zip(codec.parts(tuple(p.shape)), expected, strict=True):
                assert torch.equal(ours.state[p][moment.name + part.suffix], tensor)


@EVERY_RULE
def test_the_next_steps_follow_torch(rule: str) -> None:
    theirs, saved = torch_run(rule, True)
    params = {name: Parameter(p.detach().clone()) for name, p in theirs.items()}
    torchs = CASES[rule].make_torch(list(theirs.items()))
    torchs.load_state_dict(saved)
    ours = CASES[rule].make(params.items())
    ours.load_state_dict(saved)
    train(torchs, theirs, range(5, 8))
    train(ours, params, range(5, 8))
    for name in params:
        torch.testing.assert_close(params[name], theirs[name], rtol=0, atol=1e-6)
    fresh = {name: Parameter(p.detach().clone()) for name, p in parameters().items()}
    assert any((params[name] - fresh[name]).abs().max() > 1e-3 for name in params)


def test_a_fused_torch_state_does_not_decide_how_we_run() -> None:
    """Case 26: foreach, fused, capturable and the like stay behind."""
    params, theirs = parameters(), parameters()
    torchs = torch.optim.AdamW(list(theirs.items()), fused=True)
    train(torchs, theirs, range(2))
    ours = FusedAdamW(params.items())
    keys = set(ours.param_groups[0])
    ours.load_state_dict(torchs.state_dict())
    assert set(ours.param_groups[0]) == keys


@pytest.mark.parametrize("wrong", ["sgd", "sgd_momentum", "adam"])
def test_another_optimizers_state_is_refused(wrong: str) -> None:
    """Adam's own too: its decay means another thing, and torch's state dict says which it is."""
    params = parameters()
    optimizer = FusedAdamW(params.items())
    train(optimizer, params, range(2))
    refuse(optimizer, params, torch_run(wrong, True)[1], ValueError, "")


@pytest.mark.parametrize(("here", "saved"), [("adamw", "adamw_amsgrad"), ("adamw_amsgrad", "adamw")])
def test_amsgrad_is_not_lost_and_not_invented(here: str, saved: str) -> None:
    """Either refused, or continued as torch would: never with a largest moment that was thrown away."""
    theirs, state = torch_run(saved, True)
    params = {name: Parameter(p.detach().clone()) for name, p in theirs.items()}
    ours = CASES[here].make(params.items())
    try:
        ours.load_state_dict(state)
    except ValueError:
        return
    for index, p in enumerate(params.values()):
        assert ("max_exp_avg_sq" in ours.state[p]) == ("max_exp_avg_sq" in state["state"][index])
        if "max_exp_avg_sq" in ours.state[p]:
            assert torch.equal(ours.state[p]["max_exp_avg_sq"], state["state"][index]["max_exp_avg_sq"])


def test_a_momentum_buffer_is_not_lost() -> None:
    """Built without momentum, loaded from a run with it: refused, or the buffer is there."""
    theirs, state = torch_run("sgd_momentum", True)
    params = {name: Parameter(p.detach().clone()) for name, p in theirs.items()}
    ours = FusedSGD(params.items(), lr=0.1)
    try:
        ours.load_state_dict(state)
    except ValueError:
        return
    for index, p in enumerate(params.values()):
        assert torch.equal(ours.state[p]["momentum_buffer"], state["state"][index]["momentum_buffer"])


def test_other_shapes_are_refused() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items())
    train(optimizer, params, range(2))
    _, saved = torch_run("adamw", True)
    saved["state"][0]["exp_avg"] = torch.zeros(3, 201)
    refuse(optimizer, params, saved, ValueError, "of shape .3, 200.")


def test_a_parameter_that_torch_never_stepped_starts_again() -> None:
    params, theirs = parameters(), parameters()
    torchs = torch.optim.AdamW(list(theirs.items()))
    train(torchs, theirs, range(3))
    saved = torchs.state_dict()
    del saved["state"][2]
    ours = FusedAdamW(params.items())
    train(ours, params, range(2))
    ours.load_state_dict(saved)
    assert params["bias"] not in ours.state
    assert ours.state[params["wide"]]["step"].item() == 3


def test_masters_start_from_the_parameter() -> None:
    """torch's state has no master weight: what an earlier training left in ours must not survive."""
    theirs, saved = torch_run("adamw", True, dtype=torch.bfloat16)
    for master in ("fp32", "split", "split8"):
        params = parameters(torch.bfloat16, seed=5)
        ours = FusedAdamW(params.items(), lr=1e-3, master=master)
        train(ours, params, range(3))
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(theirs[name])
        ours.load_state_dict(saved)
        fresh_params = {name: Parameter(p.detach().clone()) for name, p in theirs.items()}
        fresh = FusedAdamW(fresh_params.items(), lr=1e-3, master=master)
        fresh.load_state_dict(saved)
        train(ours, params, range(3, 4))
        train(fresh, fresh_params, range(3, 4))
        assert same_bits(bits(ours, params), bits(fresh, fresh_params)), master
