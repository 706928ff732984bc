"""int8 beyond the laws of every codec: scales, codes, what scaling the gradients does, the mean over time."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse.formats import STATE_FORMATS, Place, StateFormat
from lightning_fuse.formats.int8 import grid_ceil, level, top_level
from tests.formats.values import SHAPES, as_rows, block_slices, largest_of_block, moments
from tests.tolerances import DITHER_MEAN, U, int8_signed_bound

SIGNED, UNSIGNED = STATE_FORMATS["int8"].signed, STATE_FORMATS["int8"].unsigned
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@EVERY_SHAPE
def test_the_signed_scale_is_the_largest_magnitude(shape: tuple[int, ...]) -> None:
    values = moments(shape, True)
    scales = SIGNED.encode(values, Place(1))[1].flatten()
    for scale, (row, columns) in zip(scales, block_slices(shape), strict=True):
        assert scale == as_rows(values)[row, columns].abs().max()


@EVERY_SHAPE
def test_the_unsigned_scale_is_the_next_grid_point(shape: tuple[int, ...]) -> None:
    values = moments(shape, False)
    scales = UNSIGNED.encode(values, Place(1))[1].flatten().abs()  # the sign is the kind of the block
    for scale, (row, columns) in zip(scales, block_slices(shape), strict=True):
        root = as_rows(values)[row, columns].double().max() ** 0.25
        if root == 0:
            assert scale == 0
            continue
        eighths = 8 * torch.log2(scale.double())
        assert (eighths - eighths.round()).abs() < 1e-5
        assert root * (1 - 4 * U) <= scale < root * 2 ** (1 / 8) * (1 + 4 * U)


def test_grid_ceil_is_the_smallest_grid_point_not_below() -> None:
    k = torch.arange(-8 * 40, 8 * 30)
    grid = (2.0 ** (k.double() / 8)).float()
    assert torch.equal(grid_ceil(grid), grid)
    above, below = torch.nextafter(grid, torch.tensor(torch.inf)), torch.nextafter(grid, torch.tensor(0.0))
    assert torch.equal(grid_ceil(above[:-1]), grid[1:])
    assert torch.equal(grid_ceil(below), grid)
    assert torch.equal(grid_ceil(torch.zeros(3)), torch.zeros(3))


def test_codes_use_their_range_and_no_more() -> None:
    for step in range(1, 30):
        codes = SIGNED.encode(moments((8, 512), True), Place(step))[0]
        assert codes.dtype == torch.int8
        assert codes.abs().max() == 127
        assert codes.min() >= -127
        assert UNSIGNED.encode(moments((8, 512), False), Place(step))[0].dtype == torch.uint8


def test_the_largest_value_comes_back_as_itself() -> None:
    values = moments((8, 128), True)
    back = SIGNED.decode(SIGNED.encode(values, Place(4)))
    where = values.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(back.gather(1, where), values.gather(1, where), rtol=8 * U, atol=0)


@pytest.mark.parametrize("small", [1e-6, 1e-12, 1e-20, 1e-37, 1e-45])
def test_a_positive_second_moment_never_becomes_zero(small: float) -> None:
    values = torch.full((1, 128), small)
    values[0, 0] = 1.0
    for step in range(1, 300):
        codes = UNSIGNED.encode(values, Place(step))[0]
        assert (codes > 0).all()
        assert (UNSIGNED.decode(UNSIGNED.encode(values, Place(step))) > 0).all()


@pytest.mark.parametrize("power", [-20, -6, -1, 1, 5, 12])
def test_multiplying_gradients_by_a_power_of_four_changes_no_code(power: int) -> None:
    """m scales by 4^k and v by 16^k; scales follow exactly."""
    m, step = moments((16, 300), True, spread=1.0), Place(11)
    v = torch.cat([moments((8, 300), False, spread=0.5), moments((8, 300), False, spread=2.0)])
    factor = 4.0**power
    assert 0 < torch.signbit(UNSIGNED.encode(v, step)[1]).sum() < 16 * 3  # blocks of both kinds
    roots, grown_roots = (UNSIGNED.root(UNSIGNED.encode(x, step)) for x in (v, v * factor**2))
    assert torch.equal(roots * factor, grown_roots)
    for one, other in zip(SIGNED.encode(m, step, roots), SIGNED.encode(m * factor, step, grown_roots), strict=True):
        assert torch.equal(one, other)
    for codec, values, grown, of_scale in ((SIGNED, m, factor, factor), (UNSIGNED, v, factor**2, factor**0.5)):
        codes, scale = codec.encode(values, step)
        codes_of_grown, scale_of_grown = codec.encode(values * grown, step)
        assert torch.equal(codes, codes_of_grown)
        assert torch.equal(scale * of_scale, scale_of_grown)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_the_mean_over_steps_is_right(signed: bool) -> None:
    """Dithering is unbiased over time in units of the root's codes; the same with nearest is half a code off."""
    codec, levels, root = (SIGNED, 127.0, 2) if signed else (UNSIGNED, 255.0, 4)
    values = torch.linspace(0.02, 1.0, 512).square().square().view(4, 128)
    sums, count = torch.zeros(values.shape, dtype=torch.float64), 100
    for step in range(1, count + 1):
        codes, scale = codec.encode(values, Place(step))
        sums += codes.double()
    exact = values.double() ** (1 / root) / (scale.double() if root == 4 else scale.double().sqrt()) * levels
    inside = (exact < levels - 1) & (exact > 1)
    assert inside.sum() > 400
    assert (sums / count - exact)[inside].abs().max() < DITHER_MEAN
    assert (exact.round() - exact)[inside].abs().max() > 2 * DITHER_MEAN


def test_a_slow_decay_is_followed_and_nearest_rounding_sticks() -> None:
    """v decays by 0.1 % a step beside one element that holds the scale up: 2,000 steps take it to 0.135."""

    def decay(rounded_to_nearest: bool) -> torch.Tensor:
        values = torch.full((1, 128), 0.25)
        values[0, 0] = 1.0
        for step in range(1, 2001):
            values = torch.where(torch.arange(128) == 0, 1.0, values * 0.999)
            codes, scale = UNSIGNED.encode(values, Place(step))
            if rounded_to_nearest:
                codes = torch.round(values.sqrt().sqrt() / scale * 255).to(torch.uint8)
            values = UNSIGNED.decode((codes, scale))
        return values[0, 1:]

    exact = 0.25 * 0.999**2000
    assert (decay(False).mean() / exact - 1).abs() < 0.05
    assert decay(True).min() > 0.9 * 0.25


def test_the_scale_stands_still_while_values_move_a_little() -> None:
    values = moments((64, 128), False)
    before = UNSIGNED.encode(values, Place(1))[1]
    after = UNSIGNED.encode(values * 0.999, Place(2))[1]
    # A block moves by 0.00025 of an octave of the root: of grid steps of 1/8 octave 0.3 % change.
    assert (before != after).float().mean() < 0.05


# Wide blocks


def wide_values(small: int = 127, ratio: float = 1e-3) -> torch.Tensor:
    """Roots of one block: one, some that are much smaller, the others a half."""
    roots = torch.full((1, 128), 0.5)
    roots[0, 0] = 1.0
    roots[0, 1 : 1 + small] = ratio * torch.linspace(0.5, 1.0, small) if small else ratio
    return roots * roots


def test_levels_are_sixteenths_of_an_octave() -> None:
    numbers = torch.arange(16, 254 * 16)
    exact = 2.0 ** (numbers.double() / 16 - 127)
    assert ((level(numbers).double() / exact - 1).abs() <= U).all()
    scales = (2.0 ** (torch.arange(-8 * 30, 8 * 30).double() / 8)).float()
    off = level(top_level(scales)).double() / scales.double() ** 2 - 1
    assert (off.abs() < 4 * U).all()


@pytest.mark.parametrize(("small", "wide"), [(0, False), (15, False), (16, True), (127, True)])
def test_a_block_is_wide_where_an_eighth_of_it_is_far_below_its_top(small: int, wide: bool) -> None:
    values = wide_values(small)
    scale = UNSIGNED.encode(values, Place(1))[1]
    assert scale.abs() == 1.0
    assert bool(torch.signbit(scale)) == wide
    # What is zero has no say; neither have the other block, the step and the padding of a short block.
    half = torch.cat([values[:, :1], values[:, 1 : 1 + small]], dim=1)
    assert bool(torch.signbit(UNSIGNED.encode(half, Place(9))[1])) == (small > 0)


def test_the_border_of_small_is_the_64th_part_of_the_top_level() -> None:
    for ratio, wide in ((1 / 64, False), (1 / 64 * (1 - 2 * U), True)):
        roots = torch.full((1, 128), ratio)
        roots[0, 0] = 1.0
        assert bool(torch.signbit(UNSIGNED.encode(roots * roots, Place(1))[1])) == wide


def test_levels_are_not_rounded_again() -> None:
    """What was read back is written as it was, at any step, and under a larger scale, too: codes move as one."""
    values = wide_values()
    for step in range(1, 40):
        parts = UNSIGNED.encode(values, Place(step))
        back = UNSIGNED.decode(parts)
        again = UNSIGNED.encode(back, Place(step + 1))
        assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
        for eighths in range(1, 9):
            back[0, 0] = 2.0 ** (eighths / 2)
            codes, scale = UNSIGNED.encode(back, Place(step + 2))
            assert torch.equal(codes[0, 1:], parts[0][0, 1:] - 4 * eighths)
            assert torch.equal(UNSIGNED.decode((codes, scale))[0, 1:], back[0, 1:])


def test_a_level_is_right_on_average() -> None:
    """Dithering is linear between two levels, in the root."""
    values, count = wide_values(), 100
    sums = torch.zeros(values.shape, dtype=torch.float64)
    for step in range(1, count + 1):
        sums += UNSIGNED.root(UNSIGNED.encode(values, Place(step))).double()
    exact = values.double().sqrt()
    gap = exact * (2 ** (1 / 16) - 1)
    assert ((sums / count - exact).abs() / gap)[0, 1:].max() < DITHER_MEAN


# The first moment in units of the second's root


def test_a_moment_with_a_unit_errs_by_a_code_of_the_quotient() -> None:
    m, v = moments((16, 300), True), moments((16, 300), False, seed=1)
    root = UNSIGNED.root(UNSIGNED.encode(v, Place(3)))
    back = SIGNED.decode(SIGNED.encode(m, Place(3), root), root)
    quotient = torch.where(root > 0, m / root, 0.0)
    bound = int8_signed_bound(quotient, largest_of_block(quotient)) * root.double() * (1 + 8 * U)
    assert ((back.double() - quotient.double() * root.double()).abs() <= bound).all()
    assert (back[root == 0] == 0).all()


@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
def test_without_a_usable_unit_nothing_is_kept(bad: float) -> None:
    m, root = torch.linspace(-1.0, 1.0, 256).view(2, 128), torch.ones(2, 128)
    clean = m.clone()
    clean[1, 5], root[1, 5] = 0.0, bad
    parts, expected = SIGNED.encode(m, Place(2), root), SIGNED.encode(clean, Place(2), torch.ones(2, 128))
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    assert torch.equal(SIGNED.decode(parts, root), SIGNED.decode(expected, torch.ones(2, 128)))


@pytest.mark.parametrize("fmt", STATE_FORMATS.values(), ids=list(STATE_FORMATS))
def test_the_root_is_that_of_what_is_read_back(fmt: StateFormat) -> None:
    parts = fmt.unsigned.encode(moments((8, 300), False), Place(4))
    exact = fmt.unsigned.decode(parts).double().sqrt()
    assert torch.equal(fmt.unsigned.root(parts), exact.float())
