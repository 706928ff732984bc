"""Laws of every state format and both kinds of moment, over a table of shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_fuse.formats import STATE_FORMATS, Codec, DitherKey
from tests.formats.values import CODEC_IDS, CODECS, SHAPES, block_slices, largest_of_block, moments
from tests.tolerances import CODEC_BITS, CODEC_BOUNDS

EVERY_CODEC = pytest.mark.parametrize(("name", "signed", "codec"), CODECS, ids=CODEC_IDS)
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
STEPS = (1, 2, 1000, 2**31 + 7)


def test_every_codec_has_a_bound() -> None:
    assert {codec.name for _, _, codec in CODECS} == set(CODEC_BOUNDS) == set(CODEC_BITS)


@EVERY_CODEC
@EVERY_SHAPE
def test_parts_are_what_encode_gives(name: str, signed: bool, codec: Codec, shape: tuple[int, ...]) -> None:
    encoded = codec.encode(moments(shape, signed), DitherKey(1))
    for part, tensor in zip(codec.parts(shape), encoded, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (part.shape, part.dtype)
    assert codec.nbytes(shape) == sum(t.numel() * t.element_size() for t in encoded)
    back = codec.decode(encoded)
    assert (tuple(back.shape), back.dtype) == (shape, torch.float32)


@EVERY_CODEC
@EVERY_SHAPE
def test_the_error_is_within_the_bound(name: str, signed: bool, codec: Codec, shape: tuple[int, ...]) -> None:
    for step in STEPS:
        for scale in (1.0, 1e-6, 1e6):
            values = moments(shape, signed, seed=step % 97) * scale
            back = codec.decode(codec.encode(values, DitherKey(step)))
            off = (back.double() - values.double()).abs()
            assert (off <= CODEC_BOUNDS[codec.name](values, largest_of_block(values))).all()


@EVERY_CODEC
def test_half_of_the_bound_is_not_enough(name: str, signed: bool, codec: Codec) -> None:
    """The control: the bounds are no looser than a factor of two."""
    if codec.name == "fp32":
        return
    values = moments((64, 512), signed)
    off = (codec.decode(codec.encode(values, DitherKey(5))).double() - values.double()).abs()
    assert (off > 0.5 * CODEC_BOUNDS[codec.name](values, largest_of_block(values))).any()


@EVERY_CODEC
@EVERY_SHAPE
def test_zeros_stay_zero(name: str, signed: bool, codec: Codec, shape: tuple[int, ...]) -> None:
    zero = torch.zeros(shape)
    for step in STEPS:
        encoded = codec.encode(zero, DitherKey(step))
        assert all((part == 0).all() for part in encoded)
        assert (codec.decode(encoded) == 0).all()
    fresh = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in codec.parts(shape))
    assert (codec.decode(fresh) == 0).all()


@EVERY_CODEC
def test_a_zero_beside_others_stays_zero(name: str, signed: bool, codec: Codec) -> None:
    values = moments((4, 256), signed)
    values[:, ::3] = 0.0
    for step in range(1, 50):
        assert (codec.decode(codec.encode(values, DitherKey(step)))[:, ::3] == 0).all()


@EVERY_CODEC
def test_signs_are_kept(name: str, signed: bool, codec: Codec) -> None:
    values = moments((4, 256), signed)
    for step in range(1, 20):
        back = codec.decode(codec.encode(values, DitherKey(step)))
        assert (back * values >= 0).all()


@EVERY_CODEC
def test_encoding_is_pure(name: str, signed: bool, codec: Codec) -> None:
    """Case 45: no random state, no number of threads, nothing but values, step and index."""
    values = moments((64, 300), signed)
    copy = values.clone()
    torch.manual_seed(1)
    first, state = codec.encode(values, DitherKey(9)), torch.random.get_rng_state()
    torch.manual_seed(2)
    np.random.seed(5)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        second = codec.encode(values, DitherKey(9))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(values, copy)
    codec.encode(values, DitherKey(9))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


@EVERY_CODEC
@pytest.mark.parametrize("shape", [(9, 127), (9, 129), (9, 3, 50), (9, 1)], ids=str)
@pytest.mark.parametrize("cuts", [(4, 5), (1, 7, 1), (0, 9), (2, 3, 4)], ids=str)
def test_shards_have_the_same_bits(
    name: str, signed: bool, codec: Codec, shape: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    values = moments(shape, signed)
    whole, row = codec.encode(values, DitherKey(7)), values[0].numel()
    begin = 0
    for length in cuts:
        shard = codec.encode(values[begin : begin + length], DitherKey(7, first_index=begin * row))
        for part, full in zip(shard, whole, strict=True):
            assert torch.equal(part, full[begin : begin + length])
        begin += length


@EVERY_CODEC
def test_a_shard_with_a_wrong_index_is_not_the_same(name: str, signed: bool, codec: Codec) -> None:
    if codec.name == "fp32":
        return
    values = moments((8, 256), signed)
    right, wrong = codec.encode(values[4:], DitherKey(7, 1024)), codec.encode(values[4:], DitherKey(7, 0))
    assert not torch.equal(right[0], wrong[0])


@EVERY_CODEC
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_element_spoils_only_itself(name: str, signed: bool, codec: Codec, bad: float) -> None:
    """Case 43. The rest of its block has the bits that it has with a zero in that place."""
    values = moments((3, 200), signed)
    values[1, 5] = 0.0
    clean = codec.decode(codec.encode(values, DitherKey(3)))
    values[1, 5] = bad if signed else abs(bad)
    back = codec.decode(codec.encode(values, DitherKey(3)))
    others = torch.ones_like(values, dtype=torch.bool)
    others[1, 5] = False
    assert torch.equal(back[others], clean[others])


@EVERY_CODEC
def test_layout_does_not_matter(name: str, signed: bool, codec: Codec) -> None:
    values = moments((130, 70), signed)
    transposed = values.t().contiguous().t()
    assert not transposed.is_contiguous()
    for a, b in zip(codec.encode(values, DitherKey(3)), codec.encode(transposed, DitherKey(3)), strict=True):
        assert torch.equal(a, b)


@EVERY_CODEC
def test_bytes_per_element(name: str, signed: bool, codec: Codec) -> None:
    shape = (16, 128 * 8)
    assert codec.nbytes(shape) * 8 == CODEC_BITS[codec.name] * 16 * 128 * 8
    # A row that does not fill its last block pays for one more scale, nothing else.
    extra = 16 * 4 if codec.scaled else 0
    assert codec.nbytes((16, 128 * 8 + 1)) == codec.nbytes(shape) + 16 * codec.parts((1,))[0].nbytes + extra


def test_formats_choose_their_codec_by_the_kind_of_moment() -> None:
    from lightning_fuse.rules import Moment

    for fmt in STATE_FORMATS.values():
        assert fmt.codec(Moment("exp_avg", signed=True)) is fmt.signed
        assert fmt.codec(Moment("exp_avg_sq", signed=False)) is fmt.unsigned
        assert fmt.scaled == (fmt.signed.scaled or fmt.unsigned.scaled)


@EVERY_SHAPE
def test_blocks_lie_inside_rows(shape: tuple[int, ...]) -> None:
    """One scale per block, found by looking where a change of one element shows."""
    codec = STATE_FORMATS["int8"].signed
    scales = codec.encode(moments(shape, True), DitherKey(1))[1]
    assert scales.numel() == len(list(block_slices(shape)))
