"""Any state format and any master weight to any other, on load: what survives, what is told, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, LoadOptions
from lightning_fuse.formats import MASTERS, STATE_FORMATS, DitherKey
from lightning_fuse.formats.format import decode_moments, state_tensors
from lightning_fuse.formats.rounding import bits_to_float, float_bits
from lightning_fuse.optim import FusedLion, FusedOptimizer
from lightning_fuse.rules import RULES
from tests.formats.values import largest_of_block
from tests.optim.checkpoint.test_refusals import refuse
from tests.optim.models import bits, parameters, same_bits, train
from tests.rules.rule_table import CASES
from tests.tolerances import CODEC_BOUNDS, U, int8_quotient_bound

BF16 = torch.bfloat16
CONVERT = LoadOptions(formats="convert")
PAIRS = [(saved, here) for saved in STATE_FORMATS for here in STATE_FORMATS if saved != here]
MASTER_PAIRS = [(saved, here) for saved in MASTERS for here in MASTERS if saved != here]
RULES_WITH_STATE = ["adamw", "adamw_amsgrad", "sgd_momentum", "lion"]


def make(rule: str, params: dict[str, Parameter], **settings: Any) -> FusedOptimizer:
    if rule == "lion":
        return FusedLion(params.items(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.2, **settings)
    return CASES[rule].make(params.items(), **settings)


def copies(params: dict[str, Parameter]) -> dict[str, Parameter]:
    return {name: Parameter(p.detach().clone()) for name, p in params.items()}


def moved(rule: str, saved: str, here: str, **settings: Any) -> tuple[Any, ...]:
    """An optimizer after four steps, and one of another format (or master) that has loaded its state."""
    word = "master" if "dtype" in settings else "state"
    params = parameters(settings.pop("dtype", torch.float32))
    source = make(rule, params, **{word: saved}, **settings)
    train(source, params, range(4))
    weights = copies(params)
    target = make(rule, weights, **{word: here}, **settings)
    train(target, weights, range(20, 22))
    with torch.no_grad():
        for name, p in params.items():
            weights[name].copy_(p)
    target.load_state_dict(source.state_dict(), options=CONVERT)
    return source, params, target, weights


def decoded(optimizer: FusedOptimizer, rule: str, name: str, p: Parameter) -> dict[str, Tensor]:
    fmt, moments = STATE_FORMATS[optimizer.formats()[name]], RULES[rule].moments
    codecs = [fmt.codec(moment) for moment in moments]
    held = [state_tensors(m, c, optimizer.state[p], tuple(p.shape)) for m, c in zip(moments, codecs, strict=True)]
    return {m.name: value.clone() for m, value in zip(moments, decode_moments(moments, codecs, held), strict=True)}


@pytest.mark.parametrize("rule", RULES_WITH_STATE)
@pytest.mark.parametrize(("saved", "here"), PAIRS)
def test_every_moment_survives_within_the_targets_own_bound(rule: str, saved: str, here: str) -> None:
    source, params, target, weights = moved(rule, saved, here)
    for name, p in weights.items():
        assert torch.equal(target.state[p]["step"], source.state[params[name]]["step"])
        fmt = STATE_FORMATS[target.formats()[name]]
        before, after = decoded(source, rule, name, params[name]), decoded(target, rule, name, p)
        for moment in RULES[rule].moments:
            codec, value = fmt.codec(moment), before[moment.name]
            if codec.scaled and moment.normalizer:
                # Kept is the quotient by the root as it was, read back is that times the root as it is stored.
                root = fmt.unsigned.sqrt_decoded(
                    tuple(
                        target.state[p][moment.normalizer + part.suffix] for part in fmt.unsigned.parts(tuple(p.shape))
                    )
                ).double()
                of_unit = before[moment.normalizer].double().sqrt()
                ratio = torch.where(of_unit > 0, value / of_unit, 0.0)
                distance = (after[moment.name].double() - ratio * root).abs()
                bound = (int8_quotient_bound(ratio, largest_of_block(ratio.float())) + 8 * U * ratio.abs()) * root
            else:
                distance = (after[moment.name].double() - value.double()).abs()
                bound = CODEC_BOUNDS[codec.name](value, largest_of_block(value))
            assert (distance <= bound).all(), (name, moment.name)
            assert after[moment.name].any()


@pytest.mark.parametrize("rule", RULES_WITH_STATE)
@pytest.mark.parametrize("saved", ["bf16", "int8", "int8_bf16"])
def test_as_fp32_the_next_step_is_the_same_bit_for_bit(rule: str, saved: str) -> None:
    """float32 holds every decoded value, so the first update after the conversion is that of the other format."""
    source, params, target, weights = moved(rule, saved, "fp32")
    before = {name: p.detach().clone() for name, p in params.items()}
    train(source, params, range(4, 5))
    train(target, weights, range(4, 5))
    for name, p in params.items():
        assert torch.equal(p, weights[name])
        assert not torch.equal(p, before[name])
    assert target.last_load is not None
    assert all("nothing is lost" in note for note in target.last_load.converted)


@pytest.mark.parametrize(("saved", "here"), [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8_bf16")])
def test_a_conversion_is_a_pure_function_and_is_told(saved: str, here: str) -> None:
    first, second = moved("adamw", saved, here), moved("adamw", saved, here)
    assert same_bits(bits(first[2], first[3]), bits(second[2], second[3]))
    report = first[2].last_load
    vectors = 4 if "bf16" in saved else 2  # vectors and scalars are fp32 under a format with scales
    assert len(report.converted) == vectors
    assert report.converted[0].startswith(f"wide: state {saved} -> {here} (")
    assert "converted: wide" in str(report)
    if here != "fp32":
        assert "exp_avg off by" in report.converted[0]


def test_what_is_kept_alike_keeps_its_bits() -> None:
    """bf16 and int8_bf16 keep the second moment alike."""
    for saved, here in (("bf16", "int8_bf16"), ("int8_bf16", "bf16")):
        source, params, target, weights = moved("adamw", saved, here)
        for name in ("wide", "deep.kernel"):
            assert torch.equal(target.state[weights[name]]["exp_avg_sq"], source.state[params[name]]["exp_avg_sq"])


def test_formats_by_pattern_are_converted_one_by_one() -> None:
    params = parameters()
    source = FusedAdamW(params.items(), state=[("wide", "bf16"), ("bias", "int8"), "int8"])
    train(source, params, range(3))
    weights = copies(params)
    target = FusedAdamW(weights.items(), state=[("wide", "int8"), "int8"])
    with pytest.raises(ValueError, match=r"holds state 'bf16' for wide, this run asks for 'int8'.*state=bf16.*convert"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(source.state_dict(), options=CONVERT)
    assert [note.split(" (")[0] for note in target.last_load.converted] == [
        "wide: state bf16 -> int8",
        "bias: state int8 -> fp32",
    ]
    kernel, same = weights["deep.kernel"], params["deep.kernel"]
    assert all(torch.equal(target.state[kernel][key], value) for key, value in source.state[same].items())


@pytest.mark.parametrize(("saved", "here"), MASTER_PAIRS)
def test_a_weight_is_kept_as_far_as_the_target_can_hold_it(saved: str, here: str) -> None:
    source, params, target, weights = moved("adamw", saved, here, dtype=BF16)
    source_master, target_master = MASTERS[saved], MASTERS[here]
    for name, p in weights.items():
        assert torch.equal(p, params[name])  # the parameter is the model's
        weight = source_master.join(params[name].detach(), held(source, params[name], saved))
        now = target_master.join(p.detach(), held(target, p, here))
        if here == "none" or saved == "none":
            assert torch.equal(now, params[name].detach().float())
        elif "split8" in (saved, here) and here == "split8":
            # 24 bits of 32: one unit of the 24th, 2^-15 of the binade.
            assert ((now - weight).abs() <= weight.abs() * 2.0**-15).all()
        else:
            # A tie that split8 holds (one weight in 256) cannot be held by a copy, which rounds it to even.
            units = (float_bits(now) - float_bits(weight)).abs()
            assert (units <= (1 if saved == "split8" and here == "fp32" else 0)).all()
            assert (units > 0).float().mean() < 0.05
    report = target.last_load
    assert report is not None
    assert all(note.split(": ")[1].startswith(f"master {saved} -> {here} (") for note in report.converted)


def held(optimizer: FusedOptimizer, p: Parameter, master: str) -> tuple[Tensor, ...]:
    return tuple(optimizer.state[p][part.suffix] for part in MASTERS[master].parts(tuple(p.shape)))


def test_a_copy_becomes_a_remainder_and_training_goes_on_bit_for_bit() -> None:
    for saved, here in (("fp32", "split"), ("split", "fp32")):
        source, params, target, weights = moved("adamw", saved, here, dtype=BF16)
        train(source, params, range(4, 12))
        train(target, weights, range(4, 12))
        for name, p in params.items():
            assert torch.equal(
                MASTERS[saved].join(p.detach(), held(source, p, saved)),
                MASTERS[here].join(weights[name].detach(), held(target, weights[name], here)),
            )


@pytest.mark.parametrize("here", ["fp32", "split", "split8"])
def test_ties_move_by_one_unit_at_most_and_the_parameter_stays(here: str) -> None:
    """A copy's ties go to even, a remainder's away from zero: the weight gives way, never the parameter."""
    upper = torch.tensor([0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0001, 0x7F00], dtype=torch.int64)
    weight = bits_to_float((upper << 16) + 0x8000)
    other = {"fp32": "split", "split": "fp32", "split8": "fp32"}[here]
    param, parts = MASTERS[other].split(weight, BF16, DitherKey(3))
    assert torch.equal(MASTERS[other].join(param, parts), weight)
    now = MASTERS[here].join(param, MASTERS[here].fit(weight, param, DitherKey(3)))
    unit = 256 if here == "split8" else 1
    assert ((float_bits(now) - float_bits(weight)).abs() <= unit).all()


def test_a_parameter_written_to_since_wins_over_a_converted_master() -> None:
    params = parameters(BF16)
    source = FusedAdamW(params.items(), lr=1e-3, master="fp32")
    train(source, params, range(3))
    saved = source.state_dict()
    for here in ("split", "split8", "none"):
        weights = {name: Parameter(torch.full_like(p, 100.0)) for name, p in params.items()}
        target = FusedAdamW(weights.items(), lr=1e-3, master=here)
        with pytest.warns(UserWarning, match="600 of 600 weights of wide are not what their master weights round to"):
            target.load_state_dict(saved, options=CONVERT)
        for p in weights.values():
            assert (MASTERS[here].join(p.detach(), held(target, p, here)) == 100.0).all()


def test_a_float32_parameter_cannot_take_a_remainder_over() -> None:
    """The model's dtype changed: what lies below the old one is lost, and that is said."""
    params = parameters(BF16)
    source = FusedAdamW(params.items(), master="split")
    train(source, params, range(3))
    weights = {name: Parameter(p.detach().float()) for name, p in params.items()}
    target = FusedAdamW(weights.items())
    refuse(target, weights, source.state_dict(), ValueError, "holds master 'split' .*asks for 'none'")
    target.load_state_dict(source.state_dict(), options=CONVERT)
    assert "wide: master split -> none (what lies below the parameter's dtype is lost)" in target.last_load.converted


def test_the_moments_of_fp32_and_int8_differ() -> None:
    """The control of the bounds above: without a conversion of units the first moments would be far off."""
    params = parameters()
    source = FusedAdamW(params.items(), state="int8")
    train(source, params, range(4))
    saved = source.state_dict()
    raw = STATE_FORMATS["int8"].signed.decode((saved["state"][0]["exp_avg.codes"], saved["state"][0]["exp_avg.scale"]))
    right = decoded(source, "adamw", "wide", params["wide"])["exp_avg"]
    assert ((raw - right).abs() > int8_quotient_bound(right, largest_of_block(right))).any()
