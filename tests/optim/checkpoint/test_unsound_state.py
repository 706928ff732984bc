"""Stored values that no step can have left are refused by name; those of a run without the check are a choice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fuse import FusedAdamW, FusedSGD, LoadOptions
from lightning_fuse.optim import FusedOptimizer
from tests.optim.checkpoint.test_refusals import refuse
from tests.optim.models import bits, give_gradients, parameters, same_bits, train

NAN, INF = float("nan"), float("inf")
Spoil = Callable[[dict[str, Tensor]], Any]

# what -> (state format, how the state of "wide" is spoilt, words of the refusal)
UNSOUND: dict[str, tuple[str, Spoil, str]] = {
    "NaN first moment": ("fp32", lambda s: s["exp_avg"][1, 3].fill_(NAN), "NaN or infinite values in exp_avg of wide"),
    "infinite first moment": ("fp32", lambda s: s["exp_avg"][0, 0].fill_(-INF), "NaN or infinite .*exp_avg of wide"),
    "NaN second moment": ("bf16", lambda s: s["exp_avg_sq"][2, 9].fill_(NAN), "NaN or infinite .*exp_avg_sq of wide"),
    "infinite second moment": ("bf16", lambda s: s["exp_avg_sq"][2, 9].fill_(INF), "NaN or inf.*exp_avg_sq of wide"),
    "negative second moment": ("fp32", lambda s: s["exp_avg_sq"][0, 5].neg_(), "negative values, and it is a mean of"),
    "negative bf16 second moment": ("bf16", lambda s: s["exp_avg_sq"].neg_(), "negative values.* exp_avg_sq of wide"),
    "negative scale": ("int8", lambda s: s["exp_avg.scale"][0, 1].neg_(), "a scale that is negative.*exp_avg of wide"),
    "NaN scale": ("int8", lambda s: s["exp_avg.scale"][0, 0].fill_(NAN), "a scale that is .*exp_avg of wide"),
    "infinite scale": (
        "int8",
        lambda s: s["exp_avg_sq.scale"][2, 1].fill_(INF),
        "scale that is negative, infinite or NaN",
    ),
    "minus infinite scale": (
        "int8",
        lambda s: s["exp_avg_sq.scale"][2, 1].fill_(-INF),
        "scale that is negative, infinite",
    ),
    "a scale of no block": ("int8", lambda s: s["exp_avg_sq.scale"][1, 0].fill_(0.3), "a scale that no block has"),
    "the code -128": ("int8", lambda s: s["exp_avg.codes"][0, 7].fill_(-128), "the code -128"),
    "step -1": ("fp32", lambda s: s["step"].fill_(-1), "holds step -1 for wide: must be a whole number >= 0"),
    "step 1.5": ("fp32", lambda s: s["step"].fill_(1.5), "holds step 1.5 for wide"),
    "step NaN": ("fp32", lambda s: s["step"].fill_(NAN), "holds step nan for wide"),
    "step infinite": ("fp32", lambda s: s["step"].fill_(INF), "holds step inf for wide"),
    "two steps": ("fp32", lambda s: s.update(step=torch.ones(2)), "a step of wide that is no number"),
    "float64 moments": ("fp32", lambda s: s.update(exp_avg=s["exp_avg"].double()), "expected .*float32"),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_it_is_refused_by_name(what: str) -> None:
    state, spoil, words = UNSOUND[what]
    params = parameters()
    optimizer = FusedAdamW(params.items(), state=state)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved["state"][0])
    refuse(optimizer, params, saved, ValueError, words)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_the_same_of_torchs_state(named: bool, state: str) -> None:
    theirs, params = parameters(), parameters()
    torchs = torch.optim.AdamW(list(theirs.items()) if named else list(theirs.values()))
    train(torchs, theirs, range(2))
    ours = FusedAdamW(params.items(), state=state)
    train(ours, params, range(1))
    for key, index, value, words in (
        ("exp_avg", 0, NAN, "NaN or infinite values in exp_avg of wide"),
        ("exp_avg_sq", 2, -1.0, "negative values.*exp_avg_sq of bias"),
        ("exp_avg", 1, None, "needs exp_avg of shape"),
        ("step", 3, -2.0, "holds step -2 for gain"),
    ):
        saved = copy.deepcopy(torchs.state_dict())
        if value is None:
            saved["state"][index][key] = torch.zeros(4, 3, 5, dtype=torch.int32)
        else:
            saved["state"][index][key].fill_(value)
        refuse(ours, params, saved, ValueError, words)


def stepped_on_nan(**settings: Any) -> tuple[FusedOptimizer, dict[str, Any]]:
    """A run with the check off whose gradient was NaN once, in one element (case 43)."""
    params = parameters()
    optimizer = FusedAdamW(params.items(), **settings)
    give_gradients(params, 0)
    params["wide"].grad[1, 3] = NAN
    optimizer.step()
    return optimizer, params


def test_nan_moments_of_a_run_without_the_check_are_kept_where_that_is_chosen() -> None:
    """Such a run must go on as it was: bit for bit."""
    source, there = stepped_on_nan()
    params = parameters()
    optimizer = FusedAdamW(params.items())
    with pytest.raises(ValueError, match=r"exp_avg of wide: it is damaged; keep them with .*nonfinite=\"keep\""):
        optimizer.load_state_dict(source.state_dict())
    optimizer.load_options = LoadOptions(nonfinite="keep")
    optimizer.load_state_dict(source.state_dict())
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(there[name])
    assert same_bits(bits(optimizer, params), bits(source, there))
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["exp_avg_sq"][0, 0] = -1.0
    refuse(optimizer, params, saved, ValueError, "negative values")  # that no run leaves


def test_int8_never_holds_them() -> None:
    source, there = stepped_on_nan(state="int8")
    params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in there.items()}
    optimizer = FusedAdamW(params.items(), state="int8")
    optimizer.load_state_dict(source.state_dict())
    assert same_bits(bits(optimizer, params), bits(source, there))


def test_a_momentum_buffer_may_be_negative() -> None:
    params = parameters()
    optimizer = FusedSGD(params.items(), lr=0.1, momentum=0.9)
    train(optimizer, params, range(2))
    assert optimizer.state[params["wide"]]["momentum_buffer"].min() < 0
    optimizer.load_state_dict(optimizer.state_dict())


def test_out_of_memory_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made before the first bit is written; where there is none, numbers and state come back."""
    from lightning_fuse.optim.checkpoint import plan

    params, there = parameters(), parameters(seed=1)
    optimizer = FusedAdamW(params.items(), lr=torch.tensor(0.25))
    train(optimizer, params, range(2))
    source = FusedAdamW(there.items(), lr=0.5, amsgrad=True)
    train(source, there, range(2))
    lr = optimizer.param_groups[0]["lr"]

    def full(requests: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(plan, "allocate", full)
    before = bits(optimizer, params)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(source.state_dict())
    assert same_bits(bits(optimizer, params), before)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    assert not optimizer.param_groups[0]["amsgrad"]
    train(optimizer, params, range(2, 3))
