"""MemoryTimeline: known allocations are found in their phases; on a GPU, through a fake allocator."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fuse.callbacks import Fuse, MemoryTimeline, StepProfile
from lightning_fuse.callbacks.memory_phases import (
    PHASE_RANGE,
    Held,
    curve_of,
    fragmentation,
    gradient_bytes,
    held_bytes,
    resident_bytes,
)
from lightning_fuse.callbacks.memory_timeline import describe, draw
from lightning_fuse.callbacks.profile_trace import MEMORY, Event, busy
from lightning_fuse.callbacks.run_result import peak_gpu_bytes
from lightning_fuse.ledger.count import count_module
from lightning_fuse.optim import FusedAdamW, FusedLion
from lightning_fuse.records import read_metrics
from tests.cases import Four, adamw, batches, quiet_trainer
from tests.tolerances import PEAK_MEMORY

MIB = 2**20


def phase(name: str, start: int, end: int) -> Event:
    return Event(PHASE_RANGE + name, start, end, annotation=True)


def change(at: int, nbytes: int) -> Event:
    return Event(MEMORY, at, at, nbytes)


def test_a_curve_is_followed_through_its_phases() -> None:
    events = [
        change(1, 5), phase("forward", 2, 10), change(3, 100), change(4, -30), phase("backward", 11, 20),
        change(12, 50), change(13, -120), phase("step", 21, 30), change(22, 7), change(31, -7),
    ]  # fmt: skip
    curve = curve_of(events, base=1000)
    assert curve.peaks == {"forward": 1105, "backward": 1125, "step": 1012}
    assert (curve.peak, curve.end) == (1125, 1005)
    dropped = curve_of(events, base=1000, freed={"backward": 200})
    assert dropped.peaks == {"forward": 1105, "backward": 925, "step": 812}
    with pytest.raises(ValueError, match="no phase"):
        curve_of([change(1, 5)], base=0)


def test_what_is_held_counts_each_piece_of_memory_once() -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    module.append(nn.Linear(128, 128, bias=False))
    module[2].weight = module[0].weight  # tied
    optimizer = FusedAdamW(module.parameters(), lr=1e-3)
    module(torch.randn(4, 128)).sum().backward()
    optimizer.step()
    held = held_bytes(module, [optimizer])
    elements = 128 * 128 + 3 * 128
    assert (held.parameters, held.gradients) == (4 * elements, 4 * elements)
    assert held.buffers == 2 * 128 * 4 + 8
    assert held.state >= 8 * elements
    assert held.state == count_module(module, FusedAdamW).allocated
    assert gradient_bytes(module) == held.gradients
    assert held.total == held.parameters + held.gradients + held.buffers + held.state


class Spend(torch.autograd.Function):
    """Takes memory in backward, and gives it back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.empty(24 * MIB, dtype=torch.uint8)
        return grad


class Spender(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        torch.empty(40 * MIB, dtype=torch.uint8)


class Spending(Four):
    """16 MiB in forward, kept for backward, 24 more there, 40 in the step."""

    def __init__(self) -> None:
        super().__init__(lambda params: Spender(params, lr=0.1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        large = torch.ones(4 * MIB)
        return Spend.apply((self.w.sum() * large).sum())


@pytest.mark.parametrize("fuse", [None, Fuse(optimizer=None)])
def test_known_allocations_are_found_in_their_phases(tmp_path: Path, fuse: Any) -> None:
    timeline = MemoryTimeline(tmp_path, every=3)
    callbacks = [timeline] if fuse is None else [fuse, timeline]
    quiet_trainer(*callbacks).fit(Spending(), batches(*[1.0] * 7))
    rows = read_metrics(tmp_path / "memory.csv")
    assert [row["step"] for row in rows] == [1, 4, 7]
    for row in rows:
        # The factor itself and its product with the weights: two of 16 MiB.
        assert row["memory/forward_peak"] == pytest.approx(32 * MIB, rel=0.01)
        assert row["memory/backward_peak"] == pytest.approx(16 * MIB + 24 * MIB, rel=0.01)
        assert row["memory/step_peak"] == pytest.approx(40 * MIB, rel=0.01)
        assert row["memory/held"] < 1000
        assert row["memory/transient"] == pytest.approx(40 * MIB, rel=0.01)
        assert row["memory/resident"] > row["memory/held"]
    result = json.loads((tmp_path / "memory.json").read_text())
    assert result == timeline.result
    assert (result["looks"], result["parameter_bytes"]) == (3, 20)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert f"for scripts/ledger.py: activations={result['transient_bytes']:.0f}" in describe(result)
    assert not busy()


class Wide(Four):
    """A few matrices and as many activations, so that no part of the memory can be left out unnoticed."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.layers = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(512, 512), nn.GELU())))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def looked_at(folder: Path, **fuse: Any) -> tuple[dict[str, float], Wide]:
    """The last row of a short run, and its module."""
    module = Wide()
    timeline = MemoryTimeline(folder, every=2)
    loader = torch.utils.data.DataLoader([torch.randn(384, 512) for _ in range(3)], batch_size=None)
    quiet_trainer(Fuse(**fuse), timeline).fit(module, loader)
    return read_metrics(folder / "memory.csv")[-1], module


def test_the_peak_is_predicted_from_one_step(tmp_path: Path) -> None:
    """One step with float32 state says what activations take; the ledger adds any state, and the peak is right."""
    seen, module = looked_at(tmp_path / "seen", optimizer="adamw_fused", state="fp32")
    transient = int(seen["memory/transient"])
    for optimizer, state in (("adamw", "int8"), ("adamw", "bf16"), ("lion", "fp32"), ("adamw", "int8_bf16")):
        row, _ = looked_at(tmp_path / optimizer / state, optimizer=f"{optimizer}_fused", state=state)
        measured = max(row[f"memory/{name}_peak"] for name in ("forward", "backward", "step"))
        kind = FusedAdamW if optimizer == "adamw" else FusedLion
        ledger = count_module(module, partial(kind, state=state))
        assert ledger.peak(transient) == pytest.approx(measured, rel=PEAK_MEMORY), (optimizer, state)
        # Without its state, or without activations, the prediction would be no good.
        assert ledger.peak(transient) - ledger.state_total < measured * (1 - PEAK_MEMORY / 2)
        assert ledger.total < measured * (1 - PEAK_MEMORY)
    wrong = count_module(module, FusedAdamW).peak(transient)
    small = max(value for name, value in row.items() if name.endswith("_peak"))
    assert wrong != pytest.approx(small, rel=PEAK_MEMORY)


class FakeGpu:
    """An allocator that does as it is told."""

    def __init__(self) -> None:
        self.now = self.top = 0
        self.resets = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.top = max(self.top, self.now)

    def allocated(self) -> int:
        return self.now

    def reserved(self) -> int:
        return 2 * max(self.now, 1000)

    def unusable(self) -> int:
        return 500

    def peak(self) -> int:
        return self.top

    def reset_peak(self) -> None:
        self.resets += 1
        self.top = self.now


def test_a_gpu_s_allocator_is_asked_at_the_borders_of_phases(tmp_path: Path) -> None:
    gpu = FakeGpu()
    gpu.take(9000)  # before training, more than ever after
    gpu.take(-8000)

    class OnGpu(Four):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            gpu.take(300)
            gpu.take(-100)
            return super().training_step(batch)

        def on_after_backward(self) -> None:
            gpu.take(-200)

        def backward(self, loss: torch.Tensor) -> None:
            gpu.take(50)
            super().backward(loss)
            gpu.take(-50)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            gpu.take(4000)
            gpu.take(-4000)

    timeline = MemoryTimeline(tmp_path, every=2, memory=gpu)
    trainer = quiet_trainer(Fuse(), timeline)
    trainer.fit(OnGpu(adamw), batches(1, 1, 1))
    [first, second] = read_metrics(tmp_path / "memory.csv")
    assert (first["step"], second["step"]) == (1, 3)
    for row in (first, second):
        assert (row["memory/forward_peak"], row["memory/backward_peak"]) == (1300, 1250)
        assert row["memory/step_peak"] == 5000
        assert (row["memory/allocated"], row["memory/reserved"], row["memory/fragmentation"]) == (1000, 2000, 0.25)
    assert gpu.resets == 6  # three phases, twice; steps that are not looked at are left alone
    assert timeline.gpu_watermark == 9000
    assert timeline.result["largest_fragmentation"] == 0.25
    assert peak_gpu_bytes(trainer) is None  # no GPU here


def test_a_resume_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    trainer = quiet_trainer(Fuse(), MemoryTimeline(tmp_path, every=1), max_epochs=1)
    trainer.fit(Four(adamw), batches(1, 1))
    trainer.save_checkpoint(path)
    for _ in range(2):
        trainer = quiet_trainer(Fuse(), MemoryTimeline(tmp_path, every=1), max_epochs=2)
        trainer.fit(Four(adamw), batches(1, 1), ckpt_path=path, weights_only=True)
    assert [row["step"] for row in read_metrics(tmp_path / "memory.csv")] == [1, 2, 3, 4]


def test_another_profiler_is_left_alone(tmp_path: Path) -> None:
    timeline = MemoryTimeline(tmp_path, every=1)
    trainer = quiet_trainer(Fuse(), timeline)
    with torch.profiler.profile():
        trainer.fit(Four(adamw), batches(1, 1))
    assert timeline.result is None


def test_a_profile_s_window_is_not_disturbed(tmp_path: Path) -> None:
    profile = StepProfile(tmp_path, warmup=2, active=2, table=False)
    trainer = quiet_trainer(Fuse(), profile, MemoryTimeline(tmp_path, every=4))
    trainer.fit(Four(adamw), batches(*[1.0] * 12))
    # Due at 1, 5 and 9; steps 3 to 6 are the window's.
    assert [row["step"] for row in read_metrics(tmp_path / "memory.csv")] == [1, 7, 9]
    assert profile.result["profiled_steps"] == 2


def test_a_failure_stops_the_recording(tmp_path: Path) -> None:
    class Falls(Four):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("fell")

    with pytest.raises(RuntimeError, match="fell"):
        quiet_trainer(MemoryTimeline(tmp_path)).fit(Falls(adamw), batches(1))
    assert not busy()


def test_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="every=0: give training steps between two"):
        MemoryTimeline(tmp_path, every=0)
    before = resident_bytes()
    assert before is None or before > 10 * MIB
    gpu = FakeGpu()
    assert fragmentation(gpu) == 0.25
    monkeypatch.setattr(gpu, "reserved", lambda: 0)
    assert fragmentation(gpu) == 0.0
    assert Held(1, 2, 3, 4).total == 10
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert draw([{"step": 1, "memory/held": 1.0}], tmp_path / "none.png") is False
