"""Files of state that earlier versions wrote are read by every later one: tests/assets, made by real code of the time.

What each file holds was decoded by the package that wrote it and lies beside the state. float32 state can hold every
decoded value, so reading as fp32 must give those: exactly, or for int8, whose formula has been put in another order
since, up to its roundings.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD, LoadOptions
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.formats.format import state_tensors
from lightning_fuse.optim.checkpoint.schema import FORMAT_VERSION, SavedFormat, saved_formats
from lightning_fuse.rules import RULES
from tests.formats.values import largest_of_block
from tests.optim.models import same_bits
from tests.tolerances import INT8_READ_ANEW, U, int8_quotient_bound, int8_unsigned_bound

ASSETS = Path(__file__).resolve().parents[2] / "assets"
VERSIONS = range(1, FORMAT_VERSION + 1)
KINDS = ("fp32", "bf16", "int8", "amsgrad", "momentum", "copy", "split", "split8")
CONVERT = LoadOptions(formats="convert")


def saved(version: int, kind: str) -> dict[str, Any]:
    with gzip.open(ASSETS / f"state_v{version}.pt.gz") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True)[kind]


def about(held: dict[str, Any]) -> list[SavedFormat]:
    """What each parameter's state is, in the order of the parameters."""
    formats = saved_formats(held["optimizer"])
    return [formats[index] for group in held["optimizer"]["param_groups"] for index in group["params"]]


def loaded(held: dict[str, Any], **settings: Any) -> tuple[Any, dict[str, Parameter]]:
    params = {name: Parameter(value.clone()) for name, value in held["weights"].items()}
    rule = about(held)[0].rule
    make = FusedSGD if rule.startswith("sgd") else FusedAdamW
    extra = {"momentum": 0.5} if make is FusedSGD else {"amsgrad": rule.endswith("amsgrad")}
    optimizer = make(params.items(), lr=0.5, **extra, **settings)
    optimizer.load_state_dict(held["optimizer"], options=CONVERT)
    return optimizer, params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_saved_is_read(version: int, kind: str) -> None:
    held = saved(version, kind)
    assert held["optimizer"]["lightning_fuse"]["format_version"] == version
    kinds = about(held)
    master = kinds[0].master
    optimizer, params = loaded(held, state="fp32", master=master)
    moments = RULES[kinds[0].rule].moments
    for name, p in params.items():
        *values, weight = held["decoded"][name]
        for moment, value in zip(moments, values, strict=True):
            assert value.any()
            read = optimizer.state[p][moment.name]
            if STATE_FORMATS[kinds[list(params).index(name)].state].codec(moment).scaled:
                assert ((read - value).abs() <= INT8_READ_ANEW * value.abs()).all(), (name, moment.name)
            else:
                assert torch.equal(read, value), (name, moment.name)
        parts = tuple(optimizer.state[p][part.suffix] for part in MASTERS[master].parts(tuple(p.shape)))
        assert torch.equal(MASTERS[master].join(p.detach(), parts), weight)
        assert optimizer.state[p]["step"].item() == 5
    assert optimizer.param_groups[0]["lr"] == (0.1 if kind == "momentum" else 0.01)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_todays_tensors_are_read_bit_for_bit(kind: str, version: int) -> None:
    """Version 4 keeps the tensors of version 3."""
    held = saved(version, kind)
    first = about(held)[0]
    optimizer, _ = loaded(held, state=first.state, master=first.master)
    assert optimizer.last_load.exact or optimizer.last_load.taken_over
    assert not optimizer.last_load.converted
    for index, tensors in held["optimizer"]["state"].items():
        now = optimizer.state_dict()["state"][index]
        keys = tensors.keys() - {"step", "format"}
        assert now.keys() - {"step", "format"} == keys
        assert same_bits({key: now[key] for key in keys}, {key: tensors[key] for key in keys})
        assert int(now["step"]) == int(tensors["step"])


@pytest.mark.parametrize("kind", ["int8", "amsgrad"])
@pytest.mark.parametrize("version", [1, 2])
def test_int8_of_an_earlier_version_goes_on_as_int8(version: int, kind: str) -> None:
    """What the file meant is encoded anew: within a code of this version's, and the report says so."""
    held = saved(version, kind)
    optimizer, params = loaded(held, state="int8")
    assert f"state int8 of version {version} -> int8" in str(optimizer.last_load)
    codec, moments = STATE_FORMATS["int8"], RULES[about(held)[0].rule].moments
    p, (first, *seconds, _) = params["wide"], held["decoded"]["wide"]
    kept = [state_tensors(m, codec.codec(m), optimizer.state[p], tuple(p.shape)) for m in moments]
    for parts, second in zip(kept[1:], seconds, strict=True):
        error = (codec.unsigned.decode(parts).double() - second.double()).abs()
        assert (error <= int8_unsigned_bound(second, largest_of_block(second))).all()
    root = seconds[0].double().sqrt()
    assert root.all()
    quotient, now = torch.where(root > 0, first / root, 0.0), codec.unsigned.sqrt_decoded(kept[1]).double()
    found = codec.signed.decode(kept[0], now.float()).double()
    bound = int8_quotient_bound(quotient, largest_of_block(quotient)) * now * (1 + 8 * U)
    assert ((found - quotient * now).abs() <= bound).all()


def test_version_1_differs_from_version_2() -> None:
    """The control: read as of the next version, a file would give other first moments."""
    held = saved(1, "int8")
    held["optimizer"]["lightning_fuse"]["format_version"] = 2
    optimizer, params = loaded(held, state="fp32")
    read, value = optimizer.state[params["wide"]]["exp_avg"], held["decoded"]["wide"][0]
    assert ((read - value).abs() > 0.1 * value.abs()).any()


def test_version_2_differs_from_version_3() -> None:
    """The control: its scales are none of the next version's."""
    held = saved(2, "int8")
    held["optimizer"]["lightning_fuse"]["format_version"] = 3
    with pytest.raises(ValueError, match="a scale that no block has"):
        loaded(held, state="fp32")


def test_files_are_small() -> None:
    assert [path.name for path in ASSETS.glob("*.gz") if path.stat().st_size > 100_000] == []
