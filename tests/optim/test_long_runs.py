"""What shows only after hundreds or thousands of steps, through FusedAdamW (cases 40 to 43)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats import STATE_FORMATS, StateFormat
from lightning_fuse.formats.format import Codec, DitherKey, TensorSpec
from scripts.rival_codecs import power_nearest
from tests.optim.models import updates
from tests.tolerances import BF16_MOMENTUM, BF16_SECOND_MOMENT, FORMAT_ERROR_FALLEN

LR = 1e-3
Gradients = Callable[[int], Tensor]


class Nearest(Codec):
    """A negative control: the roots of int8 rounded to nearest, kept as the float32 that they stand for."""

    name = "nearest"

    def __init__(self, root: int, levels: float) -> None:
        self.keep = power_nearest(root, levels)

    def parts(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        return (TensorSpec("", shape, torch.float32),)

    def encode(
        self, values: Tensor, place: DitherKey, root: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return (self.keep(values, place.step),)

    def decode(self, parts: tuple[Tensor, ...], root: Tensor | None = None) -> Tensor:
        return parts[0]


@pytest.fixture
def more_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are no words of users: one moment alone, and the controls."""
    int8, fp32 = STATE_FORMATS["int8"], STATE_FORMATS["fp32"]
    first, second = Nearest(2, 127.0), Nearest(4, 255.0)
    for fmt in (
        StateFormat("second alone", fp32.signed, int8.unsigned),
        StateFormat("nearest", first, second),
        StateFormat("nearest first", first, int8.unsigned),
    ):
        monkeypatch.setitem(STATE_FORMATS._entries, fmt.name, fmt)


def drive(state: str, shape: tuple[int, int], gradients: Gradients, steps: int) -> Iterator[tuple[int, Tensor]]:
    """(step, update in learning rates) of every step; the parameter is put back, so float32 loses nothing."""
    p = Parameter(torch.zeros(shape))
    optimizer = FusedAdamW([("p", p)], lr=LR, weight_decay=0.0, state=state, kernel="reference")
    for step in range(1, steps + 1):
        p.grad = gradients(step)
        yield step, updates([p], optimizer)[0] / LR
        p.data.zero_()


def noise(shape: tuple[int, int], spread: float, change: Callable[[int, Tensor], Tensor]) -> Gradients:
    """Normal gradients of a lasting size per element; ``change`` says what becomes of every second element."""
    generator = torch.Generator().manual_seed(7)
    size = torch.exp(spread * torch.randn(shape, generator=generator))

    def at(step: int) -> Tensor:
        g = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * size
        g[:, ::2] = change(step, g[:, ::2])
        return g

    return at


# Case 41

R = torch.tensor([1e-2, 1e-3, 1e-4, 1e-5]).repeat(32)
EVEN = torch.logspace(-2, -5, 128)
LIVE, AFTER = 600, 300


def extremes(state: str, small: Tensor) -> dict[str, float]:
    """The largest updates, and the smallest and largest where r >= 1e-3, beside one element of gradient 1."""

    def gradients(step: int) -> Tensor:
        g = small.clone() if step <= LIVE else torch.zeros_like(small)
        g[0] = 1.0
        return g.repeat(8, 1)

    found = {"live": 0.0, "stopped": 0.0, "lowest": 9.0, "highest": 0.0}
    for step, u in drive(state, (8, 128), gradients, LIVE + AFTER):
        if step <= LIVE:
            found["live"] = max(found["live"], u.abs().max().item())
            middle = u[:, 1:][:, small[1:] >= 0.999e-3]
            found["lowest"] = min(found["lowest"], middle.min().item())
            found["highest"] = max(found["highest"], middle.max().item())
        else:
            found["stopped"] = max(found["stopped"], u[:, 1:].abs().max().item())
    return found


@pytest.mark.parametrize("small", [R, EVEN], ids=["decades", "evenly"])
@pytest.mark.parametrize("state", ["int8", "second alone", "int8_bf16"])
@pytest.mark.usefixtures("more_formats")
def test_case_41(state: str, small: Tensor) -> None:
    """Linear int8 reaches 1e5 here; fourth-root codes with a first moment on its own 13."""
    found = extremes(state, small)
    assert found["live"] <= 1.5
    assert found["stopped"] <= 1.0
    assert found["lowest"] >= 0.85
    assert found["highest"] <= 1.15


def test_case_41_of_float32() -> None:
    """The limits are met by exact moments, so they are no artefact of the test."""
    found = extremes("fp32", R)
    assert found["live"] <= 1.001
    assert found["stopped"] <= 1.0
    assert 0.999 <= found["lowest"] <= found["highest"] <= 1.001


# Case 42


def fallen(state: str, spread: float) -> float:
    """rms(update - float32's) / rms(float32's), 1,500 steps after half the gradients of each block fell to 5 %."""
    gradients = noise((16, 512), spread, lambda step, g: g * 0.05 if step > 600 else g)
    pairs = zip(*(drive(word, (16, 512), gradients, 2100) for word in (state, "fp32")), strict=True)
    *_, ((_, found), (_, true)) = pairs
    return ((found - true).square().mean() / true.square().mean()).sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["int8", "int8_bf16", "bf16"])
@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_the_second_moment_does_not_stick(state: str, spread: float) -> None:
    assert fallen(state, spread) < FORMAT_ERROR_FALLEN


@pytest.mark.usefixtures("more_formats")
def test_rounded_to_nearest_it_does() -> None:
    assert fallen("nearest", 0.5) > 2 * FORMAT_ERROR_FALLEN


# Case 42b


def stopped(state: str, steps: int) -> tuple[float, float]:
    """The largest update of elements whose gradients stopped at step 500: in the middle, and in the last 1,000."""
    gradients, middle, end = noise((2, 128), 0.5, lambda step, g: g * 0.0 if step > 500 else g), 0.0, 0.0
    for step, u in drive(state, (2, 128), gradients, steps):
        if step > steps - 1000:
            end = max(end, u[:, ::2].abs().max().item())
        elif 1500 < step <= 3000:
            middle = max(middle, u[:, ::2].abs().max().item())
    return middle, end


@pytest.mark.slow
def test_updates_of_stopped_elements_fall_to_zero_and_never_grow_again() -> None:
    assert stopped("int8", 15_500) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("more_formats")
def test_with_a_first_moment_rounded_to_nearest_they_grow() -> None:
    middle, end = stopped("nearest first", 8_000)
    assert middle > 0
    assert end > 2 * middle


# Case 40, bf16 second moment


@pytest.mark.parametrize("state", ["bf16", "int8_bf16"])
def test_a_bf16_second_moment_rises_and_falls(state: str) -> None:
    """300 steps of g = 1, 3,000 of g = 0: within 5 % of exact."""
    p = Parameter(torch.zeros(2, 128))
    optimizer = FusedAdamW([("p", p)], lr=LR, weight_decay=0.0, state=state)
    exact = 0.0
    for step in range(3300):
        g = 1.0 if step < 300 else 0.0
        p.grad = torch.full_like(p, g)
        optimizer.step()
        exact = 0.999 * exact + 0.001 * g
        if step == 299:
            risen = optimizer.state[p]["exp_avg_sq"].float() / exact - 1
    fell = optimizer.state[p]["exp_avg_sq"].float() / exact - 1
    assert risen.abs().max() < BF16_SECOND_MOMENT
    assert fell.abs().max() < BF16_SECOND_MOMENT


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_bf16_momentum_buffer_reaches_its_value(sign: float) -> None:
    """Rounded to nearest it stops at 9.875 of 10, and a first moment at 0.984 of 1."""
    p = Parameter(torch.zeros(2, 128))
    optimizer = FusedSGD([("p", p)], lr=LR, momentum=0.9, state="bf16")
    buffers = []
    for step in range(400):
        p.grad = torch.full_like(p, sign)
        optimizer.step()
        if step >= 300:
            buffers.append(optimizer.state[p]["momentum_buffer"].float())
    assert (torch.stack(buffers).mean() / (10 * sign) - 1).abs() < BF16_MOMENTUM
    nearest = torch.zeros(())
    for _ in range(400):
        nearest = (nearest * 0.9 + 1.0).bfloat16().float()
    assert nearest < 10 * (1 - 10 * BF16_MOMENTUM)  # the control


# Case 43


@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_gradient_spoils_one_element(state: str, bad: float) -> None:
    """The others of its block go on bit for bit as beside a zero gradient."""

    def run(value: float) -> Tensor:
        p = Parameter(torch.ones(2, 200))
        optimizer = FusedAdamW([("p", p)], lr=LR, state=state)
        for step in range(5):
            g = torch.randn(2, 200, generator=torch.Generator().manual_seed(step))
            g[1, 7] = value if step == 2 else 0.0
            p.grad = g
            optimizer.step()
        return p.detach()

    spoilt, clean = run(bad), run(0.0)
    others = torch.ones(2, 200, dtype=torch.bool)
    others[1, 7] = False
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[1, 7].isfinite() or spoilt[1, 7] != clean[1, 7]
