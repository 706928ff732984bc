"""State of bitsandbytes' real optimizers, loaded into ours (case 31)."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLion, FusedSGD
from lightning_fuse.formats import STATE_FORMATS, DitherKey
from lightning_fuse.formats.format import encode_moments
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.plugins.checkpoint_conversion import ConversionSpec, convert_file
from lightning_fuse.rules import RULES
from tests.tolerances import rule_bound

bnb = pytest.importorskip("bitsandbytes")

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.98), "eps": 0.02, "weight_decay": 0.2}
SIZES = {"big": (64, 128), "odd": (33, 131), "small": (100,)}  # bitsandbytes keeps 8 bits from 4,096 elements on


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SIZES.items()}


def give(params: dict[str, Parameter], step: int) -> None:
    for number, p in enumerate(params.values()):
        generator = torch.Generator().manual_seed(100 * step + number)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(cls: Any, settings: dict[str, Any], named: bool = False) -> tuple[Any, dict[str, Parameter], dict[str, Any]]:
    params = weights()
    optimizer = cls(list(params.values()), **settings)
    for step in range(5):
        give(params, step)
        optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return optimizer, params, torch.load(buffer, weights_only=True)


def values(optimizer: Any, p: Parameter, number: str) -> Tensor:
    """What bitsandbytes itself reads back of one of its moments."""
    state = optimizer.state[p]
    if f"qmap{number}" not in state:
        return state["state" + number].float()
    return bnb.functional.dequantize_blockwise(
        state["state" + number], absmax=state["absmax" + number], code=state["qmap" + number], blocksize=256
    ).float()


KINDS: list[tuple[Any, type[FusedOptimizer], dict[str, Any], str]] = [
    (bnb.optim.AdamW8bit, FusedAdamW, SETTINGS, "adamw"),
    (bnb.optim.AdamW32bit, FusedAdamW, SETTINGS, "adamw"),
    (bnb.optim.Adam8bit, FusedAdam, {**SETTINGS, "weight_decay": 0.0}, "adam"),
    (bnb.optim.SGD8bit, FusedSGD, {"lr": 0.01, "momentum": 0.8}, "sgd_momentum"),
    (bnb.optim.Lion8bit, FusedLion, {"lr": 0.01, "betas": (0.8, 0.95)}, "lion"),
]


@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize(
    ("theirs", "ours", "settings", "rule"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_it_loads_into_any_format(theirs: Any, ours: Any, settings: dict[str, Any], rule: str, state: str) -> None:
    optimizer, params, saved = run(theirs, settings)
    assert any(held[NESTED]["state1"].dtype == torch.uint8 for held in saved["state"].values()) == (
        "8bit" in theirs.__name__
    )
    mine = weights(seed=1)
    made = ours(mine.items(), **{**settings, "lr": 0.5}, state=state)
    made.load_state_dict(saved)
    assert made.param_groups[0]["lr"] == 0.01
    assert set(made.param_groups[0]) == set(ours(mine.items(), **settings).param_groups[0])
    for name, p in mine.items():
        held, fmt = made.state[p], STATE_FORMATS[made.formats()[name]]
        assert held["step"].item() == 5
        moments = RULES[rule].moments
        expected = [values(optimizer, params[name], str(number + 1)) for number in range(len(moments))]
        codecs = [fmt.codec(moment) for moment in moments]
        for moment, codec, parts in zip(
            moments, codecs, encode_moments(moments, codecs, expected, DitherKey(5)), strict=True
        ):
            for part, tensor in zip(codec.parts(tuple(p.shape)), parts, strict=True):
                assert torch.equal(held[moment.name + part.suffix], tensor), (name, moment.name)


NESTED = "__bnb_optimizer_quant_state__"


def test_training_goes_on_as_theirs() -> None:
    """From 32 bits: theirs and ours are float32 AdamW."""
    theirs, params, saved = run(bnb.optim.AdamW32bit, SETTINGS)
    mine = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    ours = FusedAdamW(mine.items(), lr=0.5)
    ours.load_state_dict(saved)
    fresh_params = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    fresh = FusedAdamW(fresh_params.items(), **SETTINGS)
    for step in range(5, 10):
        for given, optimizer in ((params, theirs), (mine, ours), (fresh_params, fresh)):
            give(given, step)
            optimizer.step()
    # bitsandbytes computes in another order: twice the rounding of one float32 rule.
    bound = 2 * rule_bound(SETTINGS, 5, 8.0, 12.0)
    with torch.no_grad():
        assert max(float((mine[name] - params[name]).abs().max()) for name in mine) <= bound
        assert max(float((fresh_params[name] - params[name]).abs().max()) for name in mine) > 10 * bound


def test_blocks_lie_in_memory_order() -> None:
    """A channels_last parameter: bitsandbytes runs over memory, not over indices."""
    generator = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(16, 32, 4, 4, generator=generator).to(memory_format=torch.channels_last))
    theirs = bnb.optim.AdamW8bit([p], **SETTINGS)
    for step in range(3):
        give({"p": p}, step)
        p.grad = p.grad.to(memory_format=torch.channels_last)
        theirs.step()
    mine = Parameter(p.detach().clone())
    ours = FusedAdamW([mine], **SETTINGS)
    ours.load_state_dict(theirs.state_dict())
    held = theirs.state[p]
    flat = held["qmap1"][held["state1"].permute(0, 2, 3, 1).reshape(-1).long()].view(-1, 256) * held["absmax1"][:, None]
    expected = flat.view(16, 4, 4, 32).permute(0, 3, 1, 2)
    assert torch.equal(ours.state[mine]["exp_avg"], expected)


SPOILED = {
    "a table of 16": (lambda s: s.update(qmap1=torch.zeros(16)), "table of 16 values: expected torch.uint8 and 256"),
    "too few blocks": (lambda s: s.update(absmax1=torch.ones(3)), "has 3 block scales: fits no block size"),
    "NaN scales": (lambda s: s.update(absmax2=torch.full((32,), float("nan"))), "infinite or NaN in exp_avg_sq of big"),
    "negative scales": (lambda s: s["absmax2"].neg_(), "a negative scale in exp_avg_sq of big"),
    "a signed table": (lambda s: s.update(qmap2=s["qmap1"]), "negative values, and it is a mean of squares"),
    "no blocks": (lambda s: s.update(max1=torch.ones(1)), "without blocks, of an old release"),
    "a third moment": (lambda s: s.update(state3=s["state1"]), "AdEMAMix"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_or_unknown_kind_is_refused(how: str) -> None:
    spoil, words = SPOILED[how]
    _, _, saved = run(bnb.optim.AdamW8bit, SETTINGS)
    spoil(saved["state"][0][NESTED])
    mine = weights(seed=1)
    ours = FusedAdamW(mine.items(), state="int8")
    with pytest.raises(ValueError, match=words):
        ours.load_state_dict(saved)
    assert not ours.state


def test_its_adam_is_an_adamw() -> None:
    """Case 37: bitsandbytes' Adam decays as AdamW does, so FusedAdam refuses its state where it decays at all."""
    _, _, saved = run(bnb.optim.Adam8bit, SETTINGS)
    with pytest.raises(ValueError, match="use FusedAdamW"):
        FusedAdam(weights().items()).load_state_dict(saved)
    FusedAdamW(weights().items()).load_state_dict(saved)


@pytest.mark.parametrize("words", [{"state": "int8"}, {"to": "lightning"}], ids=str)
def test_a_checkpoint_file_of_it_is_converted(words: dict[str, str], tmp_path: Path) -> None:
    """To ours, and to one that torch's own AdamW goes on from; the model's names are not in its state."""
    _, params, saved = run(bnb.optim.AdamW8bit, SETTINGS)
    state_dict = {name: p.detach() for name, p in params.items()}
    torch.save({"state_dict": state_dict, "optimizer_states": [saved], "global_step": 5}, tmp_path / "bnb.ckpt")
    convert_file(tmp_path / "bnb.ckpt", tmp_path / "out.ckpt", ConversionSpec(**words))
    written = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert written["global_step"] == 5
    mine, other = weights(seed=1), weights(seed=1)
    direct = FusedAdamW(mine.values(), state=words.get("state", "fp32"))
    direct.load_state_dict(saved)
    if "state" in words:
        made: Any = FusedAdamW(other.values(), state=words["state"])
    else:
        made = torch.optim.AdamW(list(other.values()))
    made.load_state_dict(written["optimizer_states"][0])
    for p, q in zip(mine.values(), other.values(), strict=True):
        assert set(direct.state[p]) == set(made.state[q])
        assert all(torch.equal(made.state[q][key].double(), value.double()) for key, value in direct.state[p].items())


@pytest.mark.parametrize("state", ["fp32", "int8"])
@pytest.mark.parametrize("theirs", ["AdEMAMix8bit", "AdEMAMix"])
def test_the_two_averages_of_ademamix(theirs: str, state: str) -> None:
    """They lie in one tensor, as do their block scales. Its own CPU kernel does not run: the moments are made up."""
    settings = {"lr": 0.01, "betas": (0.8, 0.98, 0.99), "alpha": 4.0, "eps": 0.02, "weight_decay": 0.2}
    params = weights()
    optimizer = getattr(bnb.optim, theirs)(list(params.values()), **settings)
    generator = torch.Generator().manual_seed(3)
    for number, p in enumerate(params.values()):
        optimizer.init_state(optimizer.param_groups[0], p, 0, number)
        held = optimizer.state[p]
        held["step"] = 5
        for key in ("state1", "state2"):
            noise = torch.rand(held[key].shape, generator=generator)
            held[key].copy_(noise if held[key].is_floating_point() else (noise * 127 + 128).to(torch.uint8))
        for key in ("absmax1", "absmax2"):
            if key in held:
                held[key].copy_(torch.rand(held[key].shape, generator=generator))
    mine = weights(seed=1)
    made = FusedAdEMAMix(mine.items(), lr=0.5, state=state)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {key: made.param_groups[0][key] for key in settings} == settings
    assert int(made.state[mine["big"]]["step"]) == 5
    if state == "int8":
        assert "exp_avg_slow.codes" in made.state[mine["big"]]
        return
    for name, p in mine.items():
        held = optimizer.state[params[name]]
        for number, key in enumerate(("exp_avg", "exp_avg_slow")):
            expected = held["state1"][number].float()
            if "qmap1" in held:
                expected = bnb.functional.dequantize_blockwise(
                    held["state1"][number].contiguous(),
                    absmax=held["absmax1"][number].contiguous(),
                    code=held["qmap1"],
                    blocksize=256,
                ).float()
            assert torch.equal(made.state[p][key], expected), (name, key)
        assert torch.equal(made.state[p]["exp_avg_sq"], values(optimizer, params[name], "2"))
