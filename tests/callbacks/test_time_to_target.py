"""TimeToTarget: clocks that never go backwards, and a result that is recorded once."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_fuse.callbacks import Fuse, TimeToTarget
from lightning_fuse.callbacks.run_clocks import RunClocks, Stopwatch
from lightning_fuse.callbacks.target_history import BatchCounter
from tests.cases import Four, batches, one_bad, quiet_trainer

STEP, VALIDATION = 0.01, 0.03  # seconds that the task below sleeps per batch


class Slow(Four):
    """Weights fall by 0.01 an update; validation reports their mean. Both take their time."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP)
        return super().training_step(batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        time.sleep(VALIDATION)
        self.log("val/loss", self.w.mean())


def fit(timer: TimeToTarget, *others: Any, resume: Path | None = None, count: int = 4, **settings: Any):
    trainer = quiet_trainer(Fuse(), timer, *others, **{"max_epochs": 2, **settings})
    trainer.fit(Slow(), one_bad(count), batches(1), ckpt_path=resume, weights_only=resume and True)
    return trainer


def test_the_first_validation_that_reaches_it_is_recorded_once() -> None:
    timer = TimeToTarget("val/loss", target=0.965)
    fit(timer, max_epochs=3)
    reached = timer.reached
    assert (reached.updates, reached.value) == (4, pytest.approx(0.96, abs=1e-4))
    assert 4 * STEP <= reached.train_seconds <= timer.train_seconds - 8 * STEP
    assert reached.train_seconds + VALIDATION <= reached.wall_seconds <= timer.wall_seconds
    assert timer.record() == {
        "metric": "val/loss", "mode": "min", "target": 0.965, "reached": True,
        "train_seconds": reached.train_seconds, "wall_seconds": reached.wall_seconds,
        "updates": 4, "value": reached.value, "samples": 4, "tokens": None,
    }  # fmt: skip


def test_clocks_are_told_apart() -> None:
    timer = TimeToTarget(target=-1.0)
    fit(timer, max_epochs=2)
    assert timer.train_seconds >= 8 * STEP
    assert timer.validation_seconds >= 2 * VALIDATION
    assert timer.wall_seconds >= timer.train_seconds + timer.validation_seconds
    assert timer.reached is None
    assert timer.record() == {"metric": "val/loss", "mode": "min", "target": -1.0, "reached": False}
    before = timer.wall_seconds
    time.sleep(0.02)
    assert timer.wall_seconds == before  # nothing runs after a fit


def test_the_sanity_check_does_not_count() -> None:
    class Loud(Slow):
        def validation_step(self, batch: torch.Tensor) -> None:
            time.sleep(0.2 if self.trainer.sanity_checking else 0.0)
            self.log("val/loss", torch.tensor(0.0) if self.trainer.sanity_checking else self.w.mean())

    timer = TimeToTarget(target=0.5)
    trainer = quiet_trainer(Fuse(), timer, max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(Loud(), one_bad(2), batches(1, 1))
    assert timer.reached is None
    assert timer.validation_seconds < 0.2
    assert timer.train_seconds < 0.2
    assert timer.wall_seconds > 0.4


def test_case_19_continuing_over_a_resume_without_downtime(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first = TimeToTarget(target=0.95)
    fit(first, max_epochs=1).save_checkpoint(path)
    time.sleep(0.3)  # downtime
    second = TimeToTarget(target=0.95)
    began = time.perf_counter()
    fit(second, resume=path, max_epochs=3)
    took = time.perf_counter() - began
    assert second.train_seconds >= first.train_seconds + 8 * STEP
    assert second.validation_seconds >= first.validation_seconds + 2 * VALIDATION
    assert first.wall_seconds < second.wall_seconds < first.wall_seconds + took
    assert second.reached.updates == 8
    assert first.train_seconds < second.reached.train_seconds < second.train_seconds


def test_the_result_is_kept_across_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first = TimeToTarget(target=0.965)
    fit(first, max_epochs=1).save_checkpoint(path)
    second = TimeToTarget(target=0.965)
    fit(second, resume=path, max_epochs=2)
    assert second.reached == first.reached
    changed = TimeToTarget(target=0.925)  # another target: its own result, the same clocks
    fit(changed, resume=path, max_epochs=2)
    assert changed.reached.updates == 8
    assert changed.train_seconds >= first.train_seconds + 4 * STEP


def test_case_19_continuing_over_a_second_fit() -> None:
    timer = TimeToTarget(target=0.0)
    trainer = fit(timer, max_epochs=1)
    clocks = (timer.train_seconds, timer.validation_seconds, timer.wall_seconds)
    time.sleep(0.1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, one_bad(4), batches(1))
    again = (timer.train_seconds, timer.validation_seconds, timer.wall_seconds)
    assert all(now > before >= 0 for now, before in zip(again, clocks, strict=True))
    assert again[2] >= again[0] + again[1]


def test_an_exception_stops_the_clocks() -> None:
    class Falling(Slow):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            if self.trainer.global_step == 2:
                raise RuntimeError("fell")
            return super().training_step(batch)

    timer = TimeToTarget()
    with pytest.raises(RuntimeError, match="fell"):
        quiet_trainer(Fuse(), timer).fit(Falling(), one_bad(4), batches(1))
    before = timer.state_dict()
    time.sleep(0.02)
    assert timer.state_dict() == before
    assert before["clocks"]["train"] >= 2 * STEP


def test_max_nan_and_stop() -> None:
    class Rising(Four):
        def validation_step(self, batch: torch.Tensor) -> None:
            value = 2.0 - float(self.w.mean())
            self.log("val/acc", math.nan if self.trainer.current_epoch == 1 else value)

    timer = TimeToTarget("val/acc", target=1.035, mode="max", stop=True)
    trainer = quiet_trainer(Fuse(), timer, max_epochs=9)
    trainer.fit(Rising(), one_bad(2), batches(1))
    assert timer.reached.updates == 6  # after 2: 1.02, after 4: nan
    assert trainer.current_epoch == 3


def test_validating_outside_a_fit_is_nothing() -> None:
    timer = TimeToTarget(target=5.0)
    quiet_trainer(timer).validate(Slow(), batches(1), verbose=False)
    assert timer.reached is None
    assert timer.state_dict()["clocks"] == {"train": 0.0, "validation": 0.0, "wall": 0.0}


def test_without_the_contract_lightnings_count_is_used() -> None:
    timer = TimeToTarget(target=0.965)
    trainer = quiet_trainer(timer, max_epochs=1)
    trainer.fit(Slow(), one_bad(4), batches(1))
    assert timer.reached.updates == 4


def test_a_metric_that_nobody_logs_is_named() -> None:
    with pytest.warns(UserWarning, match="validation logs no metric 'val/los'; it logs val/loss. TimeToTarget"):
        fit(TimeToTarget("val/los"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "least"}, "unknown mode 'least'; known: min, max"),
        ({"metric": ""}, "metric is empty; give the name"),
        ({"target": math.nan}, "target=nan is not a finite number; give"),
        ({"targets": [math.inf]}, "target=inf is not a finite number; give"),
        ({"targets": [2.5, 2.0, 2.5]}, "2.5 is there twice; name it once"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimeToTarget(**arguments)


def test_several_targets_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    near, far = TimeToTarget(target=0.965), TimeToTarget(target=0.925)
    fit(near, far, max_epochs=2).save_checkpoint(path)
    assert (near.reached.updates, far.reached.updates) == (4, 8)
    again, other = TimeToTarget(target=0.965), TimeToTarget(target=0.925)
    fit(again, other, resume=path, max_epochs=3)
    assert (again.reached, other.reached) == (near.reached, far.reached)


class Wordy(Slow):
    """Counts seven tokens in every sample."""

    def count_tokens(self, batch: torch.Tensor) -> int:
        return 7


def test_several_targets_of_one_callback_over_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole = TimeToTarget(target=0.93, targets=[0.97, 0.89, 0.5])
    first = TimeToTarget(target=0.93, targets=[0.97, 0.89, 0.5])
    second = TimeToTarget(target=0.93, targets=[0.97, 0.89, 0.5])
    for timer, epochs, resume in ((whole, 4, None), (first, 2, None), (second, 4, path)):
        trainer = quiet_trainer(Fuse(), timer, max_epochs=epochs)
        trainer.fit(Wordy(), batches(1, 1, 1, 1), batches(1), ckpt_path=resume, weights_only=resume and True)
        if timer is first:
            trainer.save_checkpoint(path)
    for timer in (whole, second):
        records = timer.records()
        assert [(r["target"], r.get("updates"), r.get("samples"), r.get("tokens")) for r in records] == [
            (0.97, 4, 4, 28), (0.93, 8, 8, 56), (0.89, 12, 12, 84), (0.5, None, None, None),
        ]  # fmt: skip
        assert timer.record() == records[1]
        times = [r["train_seconds"] for r in records[:3]]
        assert times == sorted(times)
        assert all(r["wall_seconds"] > r["train_seconds"] for r in records[:3])
        assert (timer.batches.samples, timer.batches.tokens) == (16, 112)
    assert second.records()[:2] == first.records()[:2]


def test_the_main_target_may_be_named_again() -> None:
    timer = TimeToTarget(target=2.0, targets=[2.5, 2.0])
    assert timer.targets == [2.5, 2.0]
    assert TimeToTarget(target=0.9, targets=[0.8, 0.95], mode="max").targets == [0.8, 0.9, 0.95]


def test_a_target_named_after_it_was_reached_gets_its_true_time(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first = TimeToTarget(target=0.93)
    fit(first, max_epochs=2).save_checkpoint(path)
    other, more = TimeToTarget(target=0.965), TimeToTarget(target=0.93, targets=[0.965])
    for timer in (other, more):
        fit(timer, resume=path, max_epochs=3)
        assert timer.record(0.965) == {**first.record(0.965)}
        assert timer.record(0.965)["updates"] == 4
    elsewhere = TimeToTarget("val/other", target=0.965)  # clocks alone, no results of another metric
    with pytest.warns(UserWarning, match="logs no metric"):
        fit(elsewhere, resume=path, max_epochs=3)
    assert elsewhere.reached is None
    assert elsewhere.train_seconds > first.train_seconds


def test_a_checkpoint_of_before_the_history_is_still_read() -> None:
    timer = TimeToTarget(target=0.93)
    reached = {"train_seconds": 1.0, "wall_seconds": 2.0, "updates": 4, "value": 0.92}
    timer.load_state_dict({"clocks": {"train": 3.0, "validation": 1.0, "wall": 5.0}, "updates": 9, "reached": reached})
    assert timer.record() == {
        "metric": "val/loss", "mode": "min", "target": 0.93, "reached": True,
        **reached, "samples": None, "tokens": None,
    }  # fmt: skip
    assert timer.batches.samples is None  # unknown stays unknown


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ({"name": "x", "image": torch.zeros(3, 2)}, 3),
        ([[torch.zeros(6)], 1], 6),
        ("words", None),
    ],
)
def test_samples_of_a_batch(batch: Any, size: int | None) -> None:
    counter = BatchCounter()
    counter.add(torch.nn.Linear(1, 1), batch, ranks=2)
    assert counter.samples == (None if size is None else 2 * size)
    assert counter.tokens is None


def test_figures_of_every_target_reach_the_loggers() -> None:
    class Kept(Logger):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, float] = {}

        name = property(lambda self: "kept")
        version = property(lambda self: 0)

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen.update(metrics)

    logger = Kept()
    trainer = quiet_trainer(Fuse(), TimeToTarget(target=0.93, targets=[0.97]), max_epochs=2, logger=logger)
    trainer.fit(Wordy(), batches(1, 1, 1, 1), batches(1))
    assert (logger.seen["target/val/loss/updates"], logger.seen["target/val/loss/0.97/updates"]) == (8, 4)
    assert (logger.seen["target/val/loss/tokens"], logger.seen["target/val/loss/samples"]) == (56, 8)


def test_stopwatch_never_goes_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lightning_fuse.callbacks.run_clocks.perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.start()
    now[0] += 5
    watch.start()  # running already
    watch.stop(at=90.0)  # before it began
    assert watch.seconds == 0.0
    watch.start(since=103.0)
    assert watch.seconds == 2.0
    watch.stop()
    watch.stop()
    watch.continue_from(7)
    assert watch.seconds == 7.0


def test_validation_begins_with_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lightning_fuse.callbacks.run_clocks.perf_counter", lambda: now[0])
    clocks = RunClocks()
    for event, later in (
        (clocks.fit_begins, 10), (clocks.train_begins, 5), (clocks.batch_ends, 2), (clocks.validation_begins, 3),
        (clocks.validation_ends, 4), (clocks.train_ends, 1), (clocks.fit_ends, 50),
    ):  # fmt: skip
        event()
        now[0] += later
    assert clocks.state_dict() == {"train": 5 + 4, "validation": 2 + 3, "wall": 10 + 5 + 2 + 3 + 4 + 1}
