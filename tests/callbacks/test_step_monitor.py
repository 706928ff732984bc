"""StepMonitor counts every step, logs under stable names, and its counts survive a resume."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_fuse.callbacks import Fuse, StepMonitor
from lightning_fuse.callbacks.step_monitor import learning_rates, state_bytes
from tests.cases import Four, batches, half, one_bad, quiet_trainer, train


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "kept"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: v for k, v in metrics.items() if k.startswith("step/")}))

    def column(self, name: str) -> dict[int, float]:
        return {step: row[name] for step, row in self.rows if name in row}


def run(*bad: int, count: int = 8, fuse: dict[str, Any] | None = None, **settings: Any):
    """Case 18: bad batches among eight, under a loss scale of 1024."""
    monitor, logger = StepMonitor(), Kept()
    settings = {"precision": half(1024), "logger": logger, "log_every_n_steps": 1, **settings}
    trainer, _ = train(Four(), one_bad(count, *bad), Fuse(**(fuse or {})), monitor, **settings)
    return monitor, logger, trainer


def test_case_18_counts_and_loss_scale() -> None:
    monitor, logger, _ = run(0, 1)
    assert (monitor.updates, monitor.global_step, monitor.skips) == (6, 8, {"nonfinite": 2})
    assert list(logger.column("step/loss_scale").values()) == [512, 256, 256, 256, 256, 256, 256, 256]
    assert list(logger.column("step/update").values()) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert list(logger.column("step/skipped").values()) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert logger.column("step/skipped/nonfinite")[7] == 2
    assert monitor.describe() == "6 updates in 8 optimizer steps; skipped: 2 nonfinite; loss scale 256"


def test_the_names_are_these() -> None:
    _, logger, _ = run(gradient_clip_val=0.5)
    names = {name for _, row in logger.rows for name in row}
    assert names == {
        *("step/update", "step/skipped", "step/loss_scale", "step/grad_norm", "step/grad_norm_clipped"),
        *("step/clip_coef", "step/lr/0", "step/optimizer_ms", "step/state_bytes"),
        *("step/global_step", "step/train_seconds"),
    }
    assert logger.column("step/grad_norm") == dict.fromkeys(range(8), 2.0)
    assert logger.column("step/grad_norm_clipped") == pytest.approx(dict.fromkeys(range(8), 0.5), rel=1e-5)
    assert set(logger.column("step/lr/0").values()) == {0.01}
    assert all(ms > 0 for ms in logger.column("step/optimizer_ms").values())
    assert list(logger.column("step/state_bytes")) == [0]  # once
    assert logger.column("step/state_bytes")[0] >= 2 * 4 * 4  # two moments of four fp32 weights


def test_without_a_loss_scale() -> None:
    monitor, logger, _ = run(3, precision="32-true")
    assert logger.column("step/loss_scale") == {}
    assert monitor.loss_scale is None
    assert monitor.describe() == "7 updates in 8 optimizer steps; skipped: 1 nonfinite; no loss scale"


def test_only_every_nth_is_logged_but_every_skip() -> None:
    monitor, logger, _ = run(1, 5, log_every_n_steps=4)
    # x of the 4th and the 8th step, of the skips, and of the first update for the bytes.
    assert [step for step, row in logger.rows if row] == [0, 1, 3, 5, 7]
    assert set(logger.rows[0][1]) == {"step/state_bytes"}
    assert math.isinf(logger.column("step/grad_norm")[1]) or math.isnan(logger.column("step/grad_norm")[1])
    assert monitor.skips == {"nonfinite": 2}
    monitor, logger, _ = run(1, log_every_n_steps=0)
    assert "step/update" in logger.rows[1][1]
    assert monitor.updates == 7


def test_x_is_that_of_the_modules_own_metrics(tmp_path: Any) -> None:
    class Logging(Four):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("loss", loss)
            return loss

    logger = CSVLogger(tmp_path)
    settings = {"logger": logger, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    train(Logging(), one_bad(8), Fuse(), StepMonitor(), **settings)
    lines = [line.split(",") for line in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()]
    x = lines[0].index("step")
    logged = {name: {row[x] for row in lines[1:] if row[lines[0].index(name)]} for name in ("loss", "step/update")}
    assert logged["loss"] == logged["step/update"] == {"1", "3"}


def test_a_validation_says_where_in_the_run_it_was() -> None:
    class Validated(Four):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

    monitor, logger = StepMonitor(), Kept()
    trainer = quiet_trainer(Fuse(), monitor, precision=half(1024), logger=logger, log_every_n_steps=100, max_epochs=2)
    trainer.fit(Validated(), one_bad(4, 1), val_dataloaders=batches(1))
    places = [row for _, row in logger.rows if "step/update" in row and "step/clip_coef" not in row]
    assert [(row["step/update"], row["step/global_step"]) for row in places] == [(3, 4), (6, 8)]
    seconds = [row["step/train_seconds"] for row in places]
    assert 0 < seconds[0] < seconds[1]


def test_the_progress_bar_shows_skips_and_scale() -> None:
    _, _, trainer = run(0)
    assert {name: float(value) for name, value in trainer.progress_bar_metrics.items()} == {
        "fuse/skips": 1,
        "fuse/loss_scale": 512,
    }
    assert "fuse/skips" not in trainer.logged_metrics
    _, _, trainer = run(precision="32-true")
    assert set(trainer.progress_bar_metrics) == {"fuse/skips"}


def test_counts_survive_a_resume(tmp_path: Any) -> None:
    path = tmp_path / "saved.ckpt"
    first = StepMonitor()
    trainer, _ = train(Four(), one_bad(8, 0, 1), Fuse(), first, precision=half(1024))
    trainer.save_checkpoint(path)
    second = StepMonitor()
    module = Four()
    trainer = quiet_trainer(Fuse(), second, precision=half(1024), max_epochs=2)
    trainer.fit(module, one_bad(8, 4), ckpt_path=path, weights_only=True)
    assert (second.updates, second.global_step, second.skips) == (13, 16, {"nonfinite": 3})
    assert second.loss_scale == 128


def test_a_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    with caplog.at_level("INFO"):
        run(0, precision="32-true")
    assert "7 updates in 8 optimizer steps; skipped: 1 nonfinite; no loss scale" in caplog.text


def test_several_optimizers_have_names_of_their_own() -> None:
    class Two(Four):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.v = torch.nn.Parameter(torch.ones(4))

        def training_step(self, batch: torch.Tensor) -> None:
            for optimizer, weight in zip(self.optimizers(), (self.w, self.v), strict=True):
                optimizer.zero_grad()
                self.manual_backward((weight * batch).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w], lr=0.1), torch.optim.SGD([self.v], lr=0.2)

    logger = Kept()
    train(Two(), batches(1, 1), Fuse(), StepMonitor(), logger=logger, log_every_n_steps=1)
    assert logger.column("step/lr/0") == pytest.approx({0: 0.1, 1: 0.1})
    assert logger.column("step/lr/0/optimizer1") == pytest.approx({0: 0.2, 1: 0.2})
    assert set(logger.column("step/grad_norm/optimizer1").values()) == {2.0}


def test_group_names() -> None:
    one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    named = torch.optim.SGD([{"params": [one], "name": "body", "lr": 0.1}, {"params": [two], "lr": 0.2}], lr=1)
    assert learning_rates(named) == {"body": 0.1, "1": 0.2}
    doubled = torch.optim.SGD([{"params": [one], "name": "a"}, {"params": [two], "name": "a"}], lr=torch.tensor(0.5))
    assert learning_rates(doubled) == {"a.0": 0.5, "a.1": 0.5}


def test_state_bytes_of_others() -> None:
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([weight])
    assert state_bytes(optimizer) == {}
    weight.grad = torch.ones(10)
    optimizer.step()
    assert state_bytes(optimizer) == {"step": 4, "exp_avg": 40, "exp_avg_sq": 40}
