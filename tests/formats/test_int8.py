"""int8 beyond the laws of every codec: scales, levels, codes, what scaling the gradients does, the mean over time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_fuse.formats import STATE_FORMATS, DitherKey, StateFormat
from tests.formats.values import SHAPES, as_rows, block_slices, largest_of_block, moments
from tests.tolerances import DITHER_MEAN, U, int8_quotient_bound

SIGNED, UNSIGNED = STATE_FORMATS["int8"].signed, STATE_FORMATS["int8"].unsigned
LAST = 2.0 ** (-254 / 16)  # of the scale: about where the levels of a wide block end
EVERY_KIND = pytest.mark.parametrize("kind", [0, 1, 2])
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@EVERY_SHAPE
def test_the_signed_scale_is_the_largest_magnitude(shape: tuple[int, ...]) -> None:
    values = moments(shape, True)
    scales = SIGNED.encode(values, DitherKey(1))[1].flatten()
    for scale, (row, columns) in zip(scales, block_slices(shape), strict=True):
        assert scale == as_rows(values)[row, columns].abs().max()


def by_hand(largest: float, smallest: float) -> tuple[float, int]:
    """Scale and kind of a block from the definition: (2 bits of mantissa, rounded up), in exact arithmetic."""
    mantissa, exponent = math.frexp(float(torch.tensor(largest) * torch.tensor(35 / 32)))
    scale = math.ceil(mantissa * 8) / 8 * 2.0**exponent
    return scale, int(smallest < scale / 32) + int(smallest < scale / 512)


def split(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Scales without their kinds, float64, and the kinds."""
    bits = stored.contiguous().view(torch.int32)
    return (bits & ~3).view(torch.float32).double(), bits & 3


@EVERY_SHAPE
def test_the_unsigned_scale_is_a_little_above_the_largest_root(shape: tuple[int, ...]) -> None:
    values = moments(shape, False)
    scales, kinds = split(UNSIGNED.encode(values, DitherKey(1))[1].flatten())
    for scale, kind, (row, columns) in zip(scales, kinds, block_slices(shape), strict=True):
        roots = as_rows(values)[row, columns].double().sqrt().float()
        if not roots.any():
            assert scale == kind == 0
            continue
        assert (float(scale), int(kind)) == by_hand(float(roots.max()), float(roots[roots > 0].min()))


def seconds(shape: tuple[int, ...], kind: int, seed: int = 0) -> Tensor:
    """Second moments whose blocks are of one kind, a few zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.rand(shape, generator=generator)
    roots = (1.3 / 32, 1.3 / 512, 2.0**-17)[kind] ** middle
    roots = torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, roots)
    roots[..., 0], roots[..., -1] = 1.0, (1.7 / 30, 1.7 / 500, 2.0**-14)[kind]
    assert set(split(UNSIGNED.encode(roots * roots, DitherKey(1))[1])[1].flatten().tolist()) >= {kind}
    return roots * roots


def code_by_hand(root: float, scale: float, kind: int, word: int) -> int:
    """One code from the definition of levels, in exact arithmetic: the level below, and how far it is to the next."""
    if root == 0:
        return 0
    if kind == 2:
        levels = [1 + quarter / 4 + k / (4 * n) for quarter, n in enumerate((5, 4, 4, 3)) for k in range(n)] + [2.0]
        (mantissa, exponent), (top, top_exponent) = math.frexp(root), math.frexp(scale)
        below = max(k for k in range(16) if levels[k] <= 2 * mantissa)
        share = (2 * mantissa - levels[below]) / (levels[below + 1] - levels[below])
        number = 16 * exponent + below + (share + (word >> 11) / 2.0**21 >= 1)
        return min(max(number - 16 * top_exponent - levels.index(2 * top) + 255, 1), 255)
    bits, offset = 6 - kind, scale / 2.0 ** (4 * 2**kind)
    y = float(torch.tensor(root) + torch.tensor(offset))  # one rounding to float32

    def number_of(x: float) -> tuple[int, float]:
        mantissa, exponent = math.frexp(x)
        along = (2 * mantissa - 1) * 2**bits
        return exponent * 2**bits + math.floor(along), along - math.floor(along)

    (level, share), (lowest, none) = number_of(y), number_of(offset)
    assert none == 0
    dither = (word >> (32 - (17 + kind))) / 2.0 ** (17 + kind)
    return level - lowest + (share + dither >= 1)


def gaps(roots: Tensor, scale: Tensor, kinds: Tensor) -> Tensor:
    """How far the levels around a root lie apart at most: the one above may be one of the next octave or quarter."""
    offset = scale / 2.0 ** (4 * 2**kinds)
    return torch.where(kinds == 2, roots / 20, (roots + offset) / 2.0 ** (6 - kinds)) * (1 + 2.0**-4)


@EVERY_KIND
def test_codes_are_those_of_the_definition(kind: int) -> None:
    values, place = seconds((8, 129), kind, seed=3), DitherKey(7)
    codes, stored = UNSIGNED.encode(values, place)
    scales, kinds = split(stored.flatten())
    for scale, of_block, (row, columns) in zip(scales, kinds, block_slices((8, 129)), strict=True):
        for column in range(columns.start, columns.stop):
            word = ((row.start * 129 + column) * 0x9E3779B1 + 7 * 0x9E3779B9) % 2**32
            root = float(values[row, column].double().sqrt().float())
            assert codes[row.start, column] == code_by_hand(root, float(scale), int(of_block), word)


def test_no_code_runs_over() -> None:
    """The largest root of a block, close below and above every step of the scale, under every dither."""
    steps = torch.arange(0.125, 0.26, 2.0**-12, dtype=torch.float64) * 32 / 35
    for near in (1 - 4 * U, 1.0, 1 + 4 * U):
        for smallest in (0.5, 1 / 64, 1 / 4096):  # of the largest: all kinds
            roots = (steps * near).float().view(-1, 1) * torch.tensor([1.0, smallest]).expand(len(steps), 2)
            seen = []
            for step in range(1, 40):
                codes, scale = UNSIGNED.encode(roots * roots, DitherKey(step))
                exact = (roots * roots).sqrt()
                assert (
                    UNSIGNED.sqrt_decoded((codes, scale))[:, 0] > 0.9 * exact[:, 0]
                ).all()  # it would wrap to nearly 0
                seen.append(codes[:, 0].max().item())
            assert max(seen) >= 240


def test_codes_use_their_range_and_no_more() -> None:
    for step in range(1, 30):
        codes = SIGNED.encode(moments((8, 512), True), DitherKey(step))[0]
        assert codes.dtype == torch.int8
        assert codes.abs().max() == 127
        assert codes.min() >= -127
        assert UNSIGNED.encode(moments((8, 512), False), DitherKey(step))[0].dtype == torch.uint8


def test_the_largest_value_comes_back_as_itself() -> None:
    values = moments((8, 128), True)
    back = SIGNED.decode(SIGNED.encode(values, DitherKey(4)))
    where = values.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(back.gather(1, where), values.gather(1, where), rtol=8 * U, atol=0)


@pytest.mark.parametrize("small", [1e-6, 1e-12, 1e-20, 1e-37, 1e-45])
def test_a_positive_second_moment_never_becomes_zero(small: float) -> None:
    values = torch.full((1, 128), small)
    values[0, 0] = 1.0
    for step in range(1, 300):
        codes = UNSIGNED.encode(values, DitherKey(step))[0]
        assert (codes > 0).all()
        assert (UNSIGNED.decode(UNSIGNED.encode(values, DitherKey(step))) > 0).all()


@pytest.mark.parametrize("power", [-40, -12, -1, 1, 5, 24])
def test_multiplying_gradients_by_a_power_of_two_changes_no_code(power: int) -> None:
    """m scales by 2^k and v by 4^k; scales follow exactly, and the quotients of the two stay as they are."""
    m, step, factor = moments((24, 300), True, spread=1.0), DitherKey(11), 2.0**power
    v = torch.cat([seconds((8, 300), kind) for kind in range(3)])
    parts, grown = UNSIGNED.encode(v, step), UNSIGNED.encode(v * factor**2, step)
    assert set(split(parts[1])[1].unique().tolist()) == {0, 1, 2}
    assert torch.equal(parts[0], grown[0])
    assert torch.equal(parts[1] * factor, grown[1])
    roots = v.sqrt()
    for one, other in zip(SIGNED.encode(m, step, roots), SIGNED.encode(m * factor, step, roots * factor), strict=True):
        assert torch.equal(one, other)
    if power % 2 == 0:
        (codes, scale), (codes_of_grown, scale_of_grown) = SIGNED.encode(m, step), SIGNED.encode(m * factor, step)
        assert torch.equal(codes, codes_of_grown)
        assert torch.equal(scale * factor, scale_of_grown)


def test_the_mean_of_momentum_over_steps_is_right() -> None:
    """Dithering is unbiased over time in units of the root's codes; the same with nearest is half a code off."""
    values = torch.linspace(0.02, 1.0, 512).square().square().view(4, 128)
    sums, count = torch.zeros(values.shape, dtype=torch.float64), 100
    for step in range(1, count + 1):
        codes, scale = SIGNED.encode(values, DitherKey(step))
        sums += codes.double()
    exact = (values.double() / scale.double()).sqrt() * 127
    inside = (exact < 126) & (exact > 1)
    assert inside.sum() > 400
    assert (sums / count - exact)[inside].abs().max() < DITHER_MEAN
    assert (exact.round() - exact)[inside].abs().max() > 2 * DITHER_MEAN


@EVERY_KIND
def test_the_mean_of_roots_over_steps_is_right(kind: int) -> None:
    """Dithering is linear between two levels."""
    values, count = seconds((8, 128), kind, seed=5), 100
    sums = torch.zeros(values.shape, dtype=torch.float64)
    for step in range(1, count + 1):
        parts = UNSIGNED.encode(values, DitherKey(step))
        sums += UNSIGNED.sqrt_decoded(parts).double()
    scale, kinds = split(parts[1])
    assert (kinds == kind).all()
    exact = values.double().sqrt()
    inside = exact > (LAST * scale if kind == 2 else 0)  # what is below the last level is kept as that
    assert inside.sum() > 700
    assert ((sums / count - exact).abs() / gaps(exact, scale, kinds))[inside].max() < DITHER_MEAN


def test_a_slow_decay_is_followed_and_nearest_rounding_sticks() -> None:
    """v decays by 0.1 % a step beside one element that holds the scale up: 2,000 steps take it to 0.135."""

    def to_nearest(values: Tensor, scale: Tensor) -> Tensor:
        levels = UNSIGNED.sqrt_decoded((torch.arange(256).to(torch.uint8).view(2, 128), scale.expand(2, 1)))
        return (values.sqrt().view(-1, 1) - levels.view(1, -1)).abs().argmin(dim=1).to(torch.uint8).view(1, 128)

    def decay(rounded_to_nearest: bool) -> Tensor:
        values = torch.full((1, 128), 0.25)
        values[0, 0] = 1.0
        for step in range(1, 2001):
            values = torch.where(torch.arange(128) == 0, 1.0, values * 0.999)
            codes, scale = UNSIGNED.encode(values, DitherKey(step))
            if rounded_to_nearest:
                codes = to_nearest(values, scale)
            values = UNSIGNED.decode((codes, scale))
        return values[0, 1:]

    exact = 0.25 * 0.999**2000
    assert (decay(False).mean() / exact - 1).abs() < 0.05
    assert decay(True).min() > 0.9 * 0.25


def test_the_scale_stands_still_while_values_move_a_little() -> None:
    values = moments((64, 128), False)
    before = UNSIGNED.encode(values, DitherKey(1))[1]
    after = UNSIGNED.encode(values * 0.999, DitherKey(2))[1]
    # A block's root moves by 0.0007 of an octave: of steps of a quarter of an octave 0.3 % change.
    assert (before != after).float().mean() < 0.05


# Kinds of blocks

SMALL = (1 / 32, 1 / 512)  # of the scale: half an offset


@pytest.mark.parametrize(
    ("smallest", "kind"),
    [(SMALL[0], 0), (SMALL[0] * (1 - 2 * U), 1), (SMALL[1], 1), (SMALL[1] * (1 - 2 * U), 2), (0.0, 0)],
)
def test_one_small_root_decides_how_fine_levels_are(smallest: float, kind: int) -> None:
    """Of the scale, which is 1.25 where the largest root is 1; what is zero has no say, nor has a block's padding."""
    roots = torch.full((1, 100), 0.5)
    roots[0, 0], roots[0, 7] = 1.0, 1.25 * smallest
    squares = roots.double().square()
    assert torch.equal(squares.float().sqrt(), roots)
    scale, found = split(UNSIGNED.encode(squares.float(), DitherKey(1))[1])
    assert (scale.item(), found.item()) == (1.25, kind)


@EVERY_KIND
def test_levels_are_not_rounded_again(kind: int) -> None:
    """What was read back is written as it was, at any step: only what changes is rounded."""
    values = seconds((16, 128), kind, seed=2)
    for step in range(1, 40):
        codes, scale = UNSIGNED.encode(values, DitherKey(step))
        back = UNSIGNED.sqrt_decoded((codes, scale))
        again = UNSIGNED.encode((back.double() ** 2).float(), DitherKey(step + 1))
        exact = (back.double() ** 2).float().sqrt() == back
        same = (again[1] == scale).expand(codes.shape) & exact
        assert same.float().mean() > 0.6
        assert torch.equal(again[0][same], codes[same])


@EVERY_KIND
def test_a_root_errs_by_one_level_of_its_kind(kind: int) -> None:
    values = seconds((16, 300), kind, seed=4)
    for step in range(1, 20):
        codes, stored = UNSIGNED.encode(values, DitherKey(step))
        scale, kinds = (x.repeat_interleave(128, 1)[:, :300] for x in split(stored))
        exact, found = values.double().sqrt(), UNSIGNED.sqrt_decoded((codes, stored)).double()
        below = (exact > 0) & (exact < LAST * scale) & (kinds == 2)
        assert ((found[below] / (LAST * scale)[below] - 1).abs() < 0.06).all()
        assert bool(below.any()) == (kind == 2)
        gap = gaps(exact, scale, kinds)
        assert ((found - exact).abs() <= gap)[~below].all()
        assert ((found - exact).abs() > gap / 16).float().mean() > 0.5  # the control: no finer


@pytest.mark.parametrize(
    ("bits", "kept"),
    [
        (0x00000001, False),
        (0x10000000, False),
        (0x61000000, False),
        (0x1A200000, True),
        (0, True),
        (0x3FA00003, False),
        (0x3FA00004, False),
        (0x3F900000, False),
        (0x3FA00002, True),
    ],
)
def test_a_scale_that_no_block_has_is_a_fault(bits: int, kept: bool) -> None:
    scale = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
    fault = UNSIGNED.validate((torch.ones(1, 128, dtype=torch.uint8), scale), signed=False, finite=True)
    assert fault == ("" if kept else "a scale that no block has")


# The first moment in units of the second's root


def test_a_moment_with_a_unit_errs_by_a_code_of_the_quotient() -> None:
    m, v = moments((16, 300), True), moments((16, 300), False, seed=1)
    root = UNSIGNED.sqrt_decoded(UNSIGNED.encode(v, DitherKey(3)))
    back = SIGNED.decode(SIGNED.encode(m, DitherKey(3), root), root)
    quotient = torch.where(root > 0, m / root, 0.0)
    bound = int8_quotient_bound(quotient, largest_of_block(quotient)) * root.double() * (1 + 8 * U)
    assert ((back.double() - quotient.double() * root.double()).abs() <= bound).all()
    assert (back[root == 0] == 0).all()


def test_quotients_use_their_range_and_no_more() -> None:
    """Both ends under every dither: 127 and -127 are reached, -128 (which would be 128, wrapped) never."""
    generator = torch.Generator().manual_seed(8)
    size = torch.exp(3 * torch.randn(512, 1, generator=generator))
    quotients = size * torch.tensor([1.0, -1.0] * 64)
    lowest, highest = 0, 0
    for step in range(1, 60):
        codes, scale = SIGNED.encode(quotients, DitherKey(step), torch.ones_like(quotients))
        assert torch.equal(scale, size)
        assert (codes.abs() >= 126).all()
        assert torch.equal(codes.sign(), quotients.sign().to(torch.int8))
        lowest, highest = min(lowest, codes.min().item()), max(highest, codes.max().item())
    assert (lowest, highest) == (-127, 127)


def test_the_mean_of_quotients_over_steps_is_right() -> None:
    quotients = torch.linspace(-1.0, 1.0, 512).view(4, 128)
    sums, count = torch.zeros(quotients.shape, dtype=torch.float64), 100
    for step in range(1, count + 1):
        codes, scale = SIGNED.encode(quotients, DitherKey(step), torch.ones_like(quotients))
        sums += codes.double()
    exact = quotients.double() / scale.double() * 127
    assert (sums / count - exact).abs().max() < DITHER_MEAN
    assert (exact.round() - exact).abs().max() > 2 * DITHER_MEAN


@pytest.mark.parametrize(("largest", "kept"), [(2.0**-64, True), (2.0**-64 * (1 - U), False), (1e-40, False)])
def test_quotients_of_nothing_are_nothing(largest: float, kept: bool) -> None:
    quotients = largest * torch.linspace(-1.0, 1.0, 128).view(1, 128)
    codes, scale = SIGNED.encode(quotients, DitherKey(5), torch.ones_like(quotients))
    assert bool(codes.any()) == bool(scale.any()) == kept


@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
def test_without_a_usable_unit_nothing_is_kept(bad: float) -> None:
    m, root = torch.linspace(-1.0, 1.0, 256).view(2, 128), torch.ones(2, 128)
    clean = m.clone()
    clean[1, 5], root[1, 5] = 0.0, bad
    parts, expected = SIGNED.encode(m, DitherKey(2), root), SIGNED.encode(clean, DitherKey(2), torch.ones(2, 128))
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    assert torch.equal(SIGNED.decode(parts, root), SIGNED.decode(expected, torch.ones(2, 128)))


@pytest.mark.parametrize("fmt", STATE_FORMATS.values(), ids=list(STATE_FORMATS))
def test_the_root_is_that_of_what_is_read_back(fmt: StateFormat) -> None:
    parts = fmt.unsigned.encode(moments((8, 300), False), DitherKey(4))
    exact = fmt.unsigned.decode(parts).double().sqrt()
    assert torch.equal(fmt.unsigned.sqrt_decoded(parts), exact.float())
