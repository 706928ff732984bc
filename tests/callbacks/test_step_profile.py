"""StepProfile: shares, launches and advice, from made-up recordings and from real training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_fuse.callbacks import Fuse, StepProfile
from lightning_fuse.callbacks.profile_trace import AFTER_BACKWARD, LAUNCHES, STEP_RANGE, Event, Trace, busy, digest
from lightning_fuse.callbacks.step_profile import advice, profile_rows, show_profile
from tests.cases import Four, adamw, batches, quiet_trainer

MS = 10**6  # nanoseconds


def made_up(gpu: bool) -> list[Event]:
    """Two training steps of 10 ms with an optimizer range of 2 ms each, and one such range outside of them."""
    events = [Event("Optimizer.step#Stray.step", 0, MS, annotation=True)]
    for number in (1, 2):
        at = 100 * number * MS
        events += [
            Event(STEP_RANGE, at, at + 10 * MS, annotation=True),
            Event("aten::mul", at + MS, at + 2 * MS),
            Event("Optimizer.step#FusedAdamW.step", at + 6 * MS, at + 8 * MS, annotation=True),
            Event("aten::add_", at + 7 * MS, at + 7 * MS + 1),
            Event("autograd engine", at + 3 * MS, at + 4 * MS),  # no operator
            Event("aten::late", at + 11 * MS, at + 12 * MS),
        ]
        if gpu:
            events += [
                Event(LAUNCHES[0], at + 2 * MS, at + 2 * MS + 1, link=10 * number),
                Event(LAUNCHES[0], at + 7 * MS, at + 7 * MS + 1, link=10 * number + 1),
                # Kernels run long after their launch, and longer than the host.
                Event("gemm", at + 50 * MS, at + 65 * MS, on_gpu=True, link=10 * number),
                Event("adamw", at + 65 * MS, at + 70 * MS, on_gpu=True, link=10 * number + 1),
                Event("Optimizer.step#FusedAdamW.step", at + 65 * MS, at + 70 * MS, on_gpu=True, annotation=True),
            ]
    return sorted(events, key=lambda event: event.start)


def test_shares_and_calls_of_a_recording() -> None:
    seen = digest(made_up(gpu=False))
    assert (seen.steps, seen.step_ms, seen.optimizer_ms, seen.share) == (2, 10, 2, 0.2)
    assert (seen.optimizer_steps, seen.optimizers) == (2, ("FusedAdamW",))
    assert (seen.operators, seen.optimizer_operators, seen.kernels, seen.gpu_ms) == (2, 1, 0, 0)


def test_on_a_gpu_kernels_count_for_whoever_launched_them() -> None:
    seen = digest(made_up(gpu=True))
    assert (seen.kernels, seen.optimizer_kernels) == (2, 1)
    assert (seen.gpu_ms, seen.host_ms, seen.step_ms, seen.optimizer_ms, seen.share) == (20, 10, 20, 5, 0.25)


def test_forward_and_backward_inside_a_closure_are_not_the_optimizer_s() -> None:
    events = made_up(gpu=False)
    marked = digest([*events, Event(AFTER_BACKWARD, 106 * MS, 107 * MS, annotation=True)])
    assert (digest(events).optimizer_ms, marked.optimizer_ms) == (2, 1.5)  # of the first of two steps one half is left
    assert marked.optimizer_operators == 1


def test_a_step_inside_a_step_counts_once() -> None:
    inner = Event("Optimizer.step#FusedAdamW.step", 106 * MS + 1, 107 * MS, annotation=True)
    seen = digest(sorted([*made_up(gpu=False), inner], key=lambda event: event.start))
    assert (seen.optimizer_steps, seen.optimizer_ms, seen.optimizer_operators) == (2, 2, 1)


def test_a_recording_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no training step"):
        digest([Event("aten::mul", 0, 1)])


class Sleepy(Four):
    """Sleeps in forward, in backward and in the optimizer's step for known times."""

    def __init__(self, step: float) -> None:
        super().__init__(lambda params: Slow(params, step))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return Pause.apply(self.w * batch).sum()


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return grad


class Slow(torch.optim.SGD):
    """Its step calls that of its base class, which torch puts into a range of its own once it has been used alone."""

    def __init__(self, params: Any, seconds: float) -> None:
        super().__init__(params, lr=0.1)
        self.seconds = seconds

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        time.sleep(self.seconds)


def profiled(folder: Path, module: Any, count: int = 12, fuse: Any = None, **settings: Any) -> StepProfile:
    callback = StepProfile(folder, warmup=2, active=4, table=False)
    callbacks = [callback] if fuse is None else [fuse, callback]
    quiet_trainer(*callbacks, **settings).fit(module, batches(*[1.0] * count))
    return callback


@pytest.fixture
def _base_class_was_used() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.usefixtures("_base_class_was_used")
@pytest.mark.parametrize("fuse", [None, Fuse(optimizer=None)])
def test_known_times_are_found_in_their_places(tmp_path: Path, fuse: Any) -> None:
    figures = profiled(tmp_path, Sleepy(step=0.05), fuse=fuse).result
    phases = figures["phases_ms"]
    # Lower bounds are what was slept; upper ones would measure the machine.
    assert phases["forward"] >= 20
    assert phases["backward"] >= 30
    assert (phases["contract"] if fuse else phases["other"]) >= 50
    assert figures["training_step_ms"] >= 100
    assert figures["optimizer_ms"] >= 50
    assert figures["optimizers"] == ["Slow"]
    assert (figures["timed_steps"], figures["profiled_steps"], figures["optimizer_steps"]) == (4, 4, 4)
    # What was slept in forward and backward is not the optimizer's, with and without a closure.
    assert figures["profiled_step_ms"] - figures["optimizer_ms"] >= 50
    assert figures["optimizer_share"] == pytest.approx(figures["optimizer_ms"] / figures["profiled_step_ms"])
    share = phases["contract"] / figures["training_step_ms"] if fuse else None
    assert figures["contract_share"] == share
    assert figures["advice"][0].startswith("the optimizer is ")
    assert json.loads((tmp_path / "profile.json").read_text()) == figures


def test_our_step_under_the_contract_is_a_range_of_torch_s(tmp_path: Path) -> None:
    figures = profiled(tmp_path, Four(adamw), fuse=Fuse()).result
    assert figures["optimizers"] == ["FusedAdamW"]
    assert figures["optimizer_steps"] == 4
    assert 0 < figures["optimizer_share"] < 1
    assert figures["operators"] > figures["optimizer_operators"]
    assert figures["samples_per_s"] > 0
    assert figures["tokens_per_s"] is None


def test_every_optimizer_s_step_is_timed_in_manual_optimization(tmp_path: Path) -> None:
    class Turns(Sleepy):
        """Two optimizers, each with forward, backward and step of its own."""

        def __init__(self) -> None:
            super().__init__(step=0.02)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return Slow([self.w], 0.02), Slow([self.idle], 0.03)

        def training_step(self, batch: torch.Tensor) -> None:
            for optimizer, weight in zip(self.optimizers(), (self.w, self.idle), strict=True):
                optimizer.zero_grad()
                time.sleep(0.01)
                self.manual_backward(Pause.apply(weight * batch).sum())
                optimizer.step()

    callback = profiled(tmp_path, Turns(), count=8, fuse=Fuse(optimizer=None))
    phases = callback.result["phases_ms"]
    assert phases["contract"] >= 50
    assert phases["backward"] >= 60
    assert phases["forward"] >= 20
    assert callback.result["optimizer_steps"] == 2 * callback.result["profiled_steps"]
    assert callback.result["training_step_ms"] == pytest.approx(
        sum(value for name, value in phases.items() if name != "between")
    )


def test_the_contract_is_left_as_it_was(tmp_path: Path) -> None:
    fuse = Fuse()
    callback = StepProfile(tmp_path, warmup=1, active=2, table=False)
    trainer = quiet_trainer(fuse, callback)
    trainer.fit(Four(adamw), batches(1, 1, 1, 1, 1, 1))
    assert "step" not in vars(trainer.precision_plugin.contract)
    assert not callback.recording


def test_a_window_holds_whole_accumulation_windows(tmp_path: Path) -> None:
    callback = profiled(tmp_path, Four(adamw), count=18, fuse=Fuse(), accumulate_grad_batches=3)
    assert (callback.warmup, callback.active) == (3, 6)
    assert callback.result["timed_steps"] == 6
    assert callback.result["optimizer_steps"] == 2


def test_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    class Checked(Four):
        def validation_step(self, batch: torch.Tensor) -> None:
            time.sleep(0.3)

    callback = StepProfile(tmp_path, warmup=2, active=4, table=False)
    trainer = quiet_trainer(Fuse(), callback, val_check_interval=1)
    trainer.fit(Checked(adamw), batches(*[1.0] * 8), batches(1))
    phases = callback.result["phases_ms"]
    assert sum(phases.values()) < 300  # less than one validation a step


def test_a_run_that_is_too_short_leaves_no_profile(tmp_path: Path) -> None:
    callback = profiled(tmp_path / "new", Four(adamw), count=6)
    assert callback.result is None
    assert not (tmp_path / "new").exists()
    part = profiled(tmp_path, Four(adamw), count=8)  # of the second part of the window, two steps
    assert part.result["profiled_steps"] == 2
    assert not busy()


def test_a_failure_inside_the_window_stops_the_recording(tmp_path: Path) -> None:
    class Falls(Four):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            if self.trainer.global_step == 7:
                assert busy()
                raise RuntimeError("fell")
            return super().training_step(batch)

    with pytest.raises(RuntimeError, match="fell"):
        profiled(tmp_path, Falls(adamw))
    assert not busy()


def figures_with(**changes: Any) -> dict[str, Any]:
    phases = {"forward": 30.0, "backward": 60.0, "contract": 3.0, "other": 7.0, "between": 1.0}
    return {
        "device": "cpu", "contract_share": 0.03, "optimizer_share": 0.02, "optimizer_operators": 53, "kernels": 9,
        "optimizer_kernels": 0, "parameter_tensors": 52, "optimizers": ["FusedAdamW"], "phases_ms": phases,
        "training_step_ms": 100.0, "timed_steps": 10, "optimizer_ms": 2.0, "profiled_step_ms": 110.0, "operators": 900,
        "tokens_per_s": 1234.5, "samples_per_s": 9.5, "host_ms": 110.0, "gpu_ms": 0.0, **changes,
    }  # fmt: skip


def test_advice_only_where_it_is_earned() -> None:
    assert advice(figures_with()) == ["the optimizer is 3 % of your step: no optimizer can give you more than that"]
    assert advice(figures_with(contract_share=0.0001))[0].startswith("the optimizer is less than 1 % of your step")
    assert advice(figures_with(contract_share=0.12)) == []
    [large] = advice(figures_with(contract_share=0.5))
    assert large.endswith("twice as fast makes the step 1.33 times as fast, none more than 2.00 times")
    calls = advice(figures_with(contract_share=0.5, optimizers=["AdamW"], optimizer_operators=468))[1]
    assert calls.startswith("it makes 468 calls for 52 parameter tensors; a fused one")
    assert len(advice(figures_with(contract_share=0.5, optimizers=["AdamW"], optimizer_operators=40))) == 1
    waits = figures_with(phases_ms={**figures_with()["phases_ms"], "between": 40.0}, contract_share=0.1)
    assert advice(waits)[0].startswith("29 % of the time passes between two steps")
    assert advice(figures_with(contract_share=None, optimizer_share=0.3))[0].startswith("the optimizer is 30 %")


def test_the_table_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_with(advice=["do nothing"])
    table = dict(profile_rows(figures))
    assert table["  forward"] == "30.00 ms, 30.0 %"
    assert table["Optimizer.step"] == "2.00 ms, 2.0 % of 110.00 ms under torch.profiler (FusedAdamW)"
    assert table["operator calls"] == "900 per step, 53 in it"
    assert table["tokens/s"] == "1,234"
    assert "kernels" not in table
    on_gpu = dict(profile_rows({**figures, "device": "cuda", "tokens_per_s": None}))
    assert (on_gpu["kernels"], on_gpu["samples/s"]) == ("9 per step, 0 in it", "10")
    show_profile(figures)
    assert "where the time goes" in capsys.readouterr().out


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="warmup=-1 active=10: give at least 0 steps before and 1 step"):
        StepProfile(tmp_path, warmup=-1)

    class Unused(PyTorchProfiler):
        def teardown(self, stage: str | None) -> None:
            pass

    with pytest.raises(ValueError, match="profiler=PyTorchProfiler"):
        profiled(tmp_path, Four(adamw), profiler=Unused(dirpath=tmp_path))


def test_warming_up_leaves_a_running_profiler_alone() -> None:
    with torch.profiler.profile() as running:
        Trace.warm_up()
        torch.ones(3).add_(1)
    assert any(event.key == "aten::add_" for event in running.key_averages())
