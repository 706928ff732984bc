"""The dither sequence and the roundings on bits."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse.formats.rounding import (
    PHASE_SIGNED,
    PHASE_UNSIGNED,
    PHASE_WEIGHT,
    bf16_bits,
    bf16_dithered,
    bf16_nearest,
    bits_to_bf16,
    bits_to_float,
    dither_fraction,
    dither_word,
    float_bits,
)
from tests.tolerances import BF16_SECOND_MOMENT

CPU = torch.device("cpu")


def test_the_sequence_is_the_documented_integers() -> None:
    for step, phase, start in ((1, 0, 0), (5, PHASE_SIGNED, 3), (2**31 + 3, PHASE_WEIGHT, 2**33 + 1)):
        words = dither_word(4, step, phase, start, CPU).tolist()
        assert words == [((start + i) * 0x9E3779B1 + step * 0x9E3779B9 + phase) % 2**32 for i in range(4)]


def test_fractions_are_exact_and_below_one() -> None:
    words = torch.tensor([0, 255, 256, 2**32 - 1])
    assert dither_fraction(words).tolist() == [0.0, 0.0, 2.0**-24, 1 - 2.0**-24]


def test_a_shard_continues_the_sequence() -> None:
    whole = dither_word(1000, 7, PHASE_UNSIGNED, 0, CPU)
    assert torch.equal(whole[300:], dither_word(700, 7, PHASE_UNSIGNED, 300, CPU))


@pytest.mark.parametrize("along", ["steps", "index"])
def test_fractions_fill_the_unit_interval_evenly(along: str) -> None:
    """In each tenth lies a tenth of 1,000 terms, within 4: random numbers would be off by 9 at one deviation."""
    if along == "steps":
        words = torch.cat([dither_word(1, step, 0, 12345, CPU) for step in range(1, 1001)])
    else:
        words = dither_word(1000, 77, 0, 0, CPU)
    counts = torch.histc(dither_fraction(words), bins=10, min=0, max=1)
    assert (counts - 100).abs().max() <= 4


def test_the_phases_of_one_element_differ() -> None:
    phases = {dither_word(1, 9, phase, 4, CPU).item() for phase in (PHASE_UNSIGNED, PHASE_SIGNED, PHASE_WEIGHT)}
    assert len(phases) == 3


def test_bits_and_back() -> None:
    bits = torch.randint(0, 2**32, (100_000,), dtype=torch.int64)
    assert torch.equal(float_bits(bits_to_float(bits)), bits)
    half = torch.arange(2**16)
    assert torch.equal(bf16_bits(bits_to_bf16(half)), half)


def test_nearest_is_torchs_cast_for_every_upper_half() -> None:
    """All 65,536 upper halves with remainders below, at and above the tie."""
    upper = torch.arange(2**16) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = bits_to_float(upper + lower)
        found, expected = bf16_nearest(x), x.to(torch.bfloat16)
        finite = ~x.isnan()
        assert torch.equal(bf16_bits(found)[finite], bf16_bits(expected)[finite])
        assert found[~finite].isnan().all()


def test_dithered_is_one_of_the_two_neighbours() -> None:
    x = torch.rand(50_000) * torch.exp(torch.randn(50_000) * 20)
    x = x[x.isfinite()]
    below = bits_to_bf16(float_bits(x) >> 16).float()
    above = bits_to_bf16((float_bits(x) >> 16) + 1).float()
    for step in (1, 2, 3):
        rounded = bf16_dithered(x, dither_word(len(x), step, 0, 0, CPU)).float()
        assert ((rounded == below) | (rounded == above)).all()
        negative = bf16_dithered(-x, dither_word(len(x), step, 0, 0, CPU)).float()
        assert torch.equal(negative, -rounded)
    exact = below
    assert torch.equal(bf16_dithered(exact, dither_word(len(x), 4, 0, 0, CPU)).float(), exact)


def test_dithered_specials() -> None:
    x = torch.tensor([0.0, torch.inf, torch.nan, torch.finfo(torch.float32).max, 2.0**-149])
    top = torch.full((5,), 2**32 - 1, dtype=torch.int64)
    rounded = bf16_dithered(x, top).float()
    assert rounded[0] == 0
    assert rounded[1].isinf()
    assert rounded[2].isnan()
    assert rounded[3] == torch.finfo(torch.bfloat16).max
    assert rounded[4] > 0
    negative = bf16_dithered(-x, top).float()
    assert torch.equal(negative[torch.tensor([0, 1, 3, 4])], -rounded[torch.tensor([0, 1, 3, 4])])
    assert torch.signbit(negative[0])
    assert negative[2].isnan()
    hidden = bits_to_float(torch.tensor([0x7F800001]))  # a NaN whose upper half alone would read as infinity
    assert bf16_dithered(hidden, top[:1]).isnan().all()
    assert bf16_nearest(hidden).isnan().all()


def test_a_bf16_second_moment_follows_and_nearest_freezes() -> None:
    """Case 40: 300 steps of g = 1, then 3,000 of g = 0, against exact; nearest is the control."""

    def second_moment(dithered: bool) -> tuple[torch.Tensor, torch.Tensor]:
        v, exact = torch.zeros(256), 0.0
        for step in range(1, 3301):
            g = 1.0 if step <= 300 else 0.0
            v, exact = v * 0.999 + g * g * 0.001, exact * 0.999 + g * g * 0.001
            word = dither_word(256, step, 0, 0, CPU)
            v = (bf16_dithered(v, word) if dithered else bf16_nearest(v)).float()
            if step == 300:
                risen = v / exact - 1
        return risen, v / exact - 1

    risen, fallen = second_moment(True)
    assert risen.abs().max() < BF16_SECOND_MOMENT
    assert fallen.abs().max() < BF16_SECOND_MOMENT
    risen, fallen = second_moment(False)
    assert fallen.min() > 10 * BF16_SECOND_MOMENT
