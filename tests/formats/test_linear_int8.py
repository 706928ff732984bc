"""The teaching codec of scripts/rival_codecs.py: what linear int8 keeps, what it loses, and how that explodes."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse.formats import STATE_FORMATS
from scripts.rival_codecs import LinearInt8, packaged
from tests.formats.values import moments
from tests.tolerances import FORMAT_ERROR_LINEAR

EVERY_KIND = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


@EVERY_KIND
def test_the_error_is_at_most_half_a_step(signed: bool) -> None:
    codec, values = LinearInt8(signed), moments((8, 256), signed)
    off = (codec(values, 1) - values).abs().view(-1, 128)
    assert (off <= codec.bound(values)).all()
    assert (off > 0.9 * codec.bound(values)).any()


@EVERY_KIND
def test_a_zero_block_has_scale_zero_and_comes_back(signed: bool) -> None:
    codec, values = LinearInt8(signed), torch.zeros(2, 128)
    values[0] = moments((128,), signed)
    codes, scale = codec.encode(values)
    assert scale[1] == 0
    assert (codes[1] == 0).all()
    assert (codec.decode(codes, scale, values.shape)[1] == 0).all()


def update_beside_a_large_gradient(second, steps: int = 50) -> float:
    """The largest update, in learning rates, of elements whose gradient is a hundredth of their neighbour's."""
    m, v, worst = torch.zeros(1, 128), torch.zeros(1, 128), 0.0
    g = torch.full((1, 128), 0.01)
    g[0, 0] = 1.0
    for step in range(1, steps + 1):
        m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
        u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        worst = max(worst, u[0, 1:].abs().max().item())
        v = second(v, step)
    return worst


def test_a_small_second_moment_is_lost_and_the_update_explodes() -> None:
    """r = 0.01 is 1e-4 of the block's v, below half of 1/255: each step finds v = 0 and only its own g^2 / 1000."""
    linear = update_beside_a_large_gradient(LinearInt8(False))
    assert linear > 5  # sqrt(50), growing with the root of the step, where 1 is exact
    assert update_beside_a_large_gradient(packaged(STATE_FORMATS["int8"].unsigned)) < 1.5


def test_once_the_gradient_stops_nothing_bounds_the_update() -> None:
    m, v = torch.full((1, 128), 1e-2), torch.full((1, 128), 1e-4)
    m[0, 0], v[0, 0] = 1.0, 1.0

    def after(second) -> float:
        return (m * 0.9 / (second(v, 1).sqrt() + 1e-8)).abs().max().item()

    assert after(LinearInt8(False)) > 1000 * FORMAT_ERROR_LINEAR
    assert after(packaged(STATE_FORMATS["int8"].unsigned)) < 2
