"""Master weights: which bits are kept, for which values, and what happens below the last place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fuse.formats import MASTERS, DitherKey
from lightning_fuse.formats.master import CANONICAL_NAN, canonical_nan
from lightning_fuse.formats.rounding import bits_to_float, float_bits

BF16 = torch.bfloat16
EVERY_MASTER = pytest.mark.parametrize("master", MASTERS.values(), ids=lambda master: master.name)


def hard_patterns() -> Tensor:
    """Every sign and exponent (zeros, subnormals, infinities, NaN among them) with mantissas around all ties."""
    upper = torch.arange(2**9) << 23  # sign and exponent
    middle = torch.tensor([0x000000, 0x000001, 0x007FFF, 0x008000, 0x008001, 0x00FFFF, 0x010000, 0x018000, 0x3F7FFF,
                           0x3F8000, 0x400000, 0x408000, 0x7F0000, 0x7F7FFF, 0x7F8000, 0x7F8001, 0x7FFFFF])  # fmt: skip
    random = torch.randint(0, 2**23, (200,), generator=torch.Generator().manual_seed(0))
    return (upper[:, None] + torch.cat([middle, random])[None, :]).flatten()


def test_split_keeps_every_bit() -> None:
    """Case 44: joined again, all 32 bits; NaN too, as kernels store it."""
    split, bits = MASTERS["split"], hard_patterns()
    weight = bits_to_float(bits)
    for step in (1, 9):
        param, parts = split.split(weight, BF16, DitherKey(step))
        assert param.dtype == BF16
        assert parts[0].dtype == torch.int16
        assert torch.equal(float_bits(split.join(param, parts)), bits)


def test_split_shows_the_nearest_bf16() -> None:
    """Ties go away from zero, so the parameter is one of the two nearest and never farther than torch's cast."""
    weight = bits_to_float(hard_patterns())
    weight = weight[weight.isfinite() & (weight.abs() < torch.finfo(BF16).max)]
    param, _ = MASTERS["split"].split(weight, BF16, DitherKey(1))
    ours, torchs = (param.double() - weight.double()).abs(), (weight.to(BF16).double() - weight.double()).abs()
    assert torch.equal(ours, torchs)


def test_a_nan_is_seen_in_the_parameter() -> None:
    nan = bits_to_float(torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, CANONICAL_NAN]))
    assert nan.isnan().all()
    clean = canonical_nan(nan)
    assert (float_bits(clean) == CANONICAL_NAN).all()
    for name in ("split", "split8", "fp32", "none"):
        param, parts = MASTERS[name].split(clean, BF16, DitherKey(1))
        assert param.isnan().all()
        assert MASTERS[name].join(param, parts).isnan().all()
    # The control: without it, the first of them would be stored as -0.
    assert not MASTERS["split"].split(nan[:1], BF16, DitherKey(1))[0].isnan().any()
    other = torch.tensor([0.0, -0.0, 1.0, torch.inf])
    assert torch.equal(float_bits(canonical_nan(other)), float_bits(other))


def test_split8_keeps_24_bits() -> None:
    bits = hard_patterns() & ~0xFF
    weight = bits_to_float(bits)
    param, parts = MASTERS["split8"].split(weight, BF16, DitherKey(3))
    assert parts[0].dtype == torch.int8
    kept = float_bits(MASTERS["split8"].join(param, parts))
    finite = weight.isfinite()
    # What already has 24 bits is not moved by the dither: it adds less than one unit.
    assert torch.equal(kept[finite], bits[finite])


def test_split8_moves_by_less_than_one_of_its_units_and_is_right_on_average() -> None:
    bits = hard_patterns()
    weight = bits_to_float(bits)
    finite = (bits & 0x7FFFFFFF) + 0xFF < 0x7F800000
    count, total = 200, torch.zeros(len(bits), dtype=torch.float64)
    for step in range(1, count + 1):
        param, parts = MASTERS["split8"].split(weight, BF16, DitherKey(step))
        moved = float_bits(MASTERS["split8"].join(param, parts)) - bits
        assert moved[finite].abs().max() < 256
        total += moved.double()
    assert (total[finite] / count).abs().max() < 0.1 * 256


def test_split8_makes_no_infinity_of_a_finite_weight() -> None:
    weight = bits_to_float(torch.tensor([0x7F7FFFFF, 0x7F7FFF01, 0xFF7FFFFF, 0x7F800000, 0xFF800000]))
    for step in range(1, 50):
        param, parts = MASTERS["split8"].split(weight, BF16, DitherKey(step))
        joined = MASTERS["split8"].join(param, parts)
        assert torch.equal(joined.isfinite(), weight.isfinite())
        assert torch.equal(joined[3:], weight[3:])


@EVERY_MASTER
def test_parts_start_and_split_agree(master) -> None:
    for dtype in master.dtypes:
        for shape in ((), (0,), (5,), (3, 4)):
            param = torch.randn(shape).to(dtype)
            started = master.start(param)
            weight = master.join(param, started)
            assert weight.dtype == torch.float32
            assert torch.equal(weight, param.float())
            again, parts = master.split(weight, dtype, DitherKey(1))
            assert again.dtype == dtype
            assert torch.equal(again, param)
            for part, a, b in zip(master.parts(shape), started, parts, strict=True):
                assert part.shape == tuple(a.shape) == tuple(b.shape)
                assert part.dtype == a.dtype == b.dtype


def test_bytes_per_parameter() -> None:
    extra = {name: sum(part.nbytes for part in master.parts((100,))) / 100 for name, master in MASTERS.items()}
    assert extra == {"none": 0, "fp32": 4, "split": 2, "split8": 1}


@EVERY_MASTER
def test_a_shard_is_split_as_the_whole(master) -> None:
    weight = torch.randn(10, 33)
    whole, parts = master.split(weight, BF16, DitherKey(4))
    shard, shard_parts = master.split(weight[3:7], BF16, DitherKey(4, first_index=3 * 33))
    assert torch.equal(whole[3:7], shard)
    assert all(torch.equal(a[3:7], b) for a, b in zip(parts, shard_parts, strict=True))
