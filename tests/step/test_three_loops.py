"""One training through a Trainer, through Fabric and through a plain torch loop: the same bits."""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_fuse.callbacks import Fuse
from lightning_fuse.optim import FusedAdamW
from lightning_fuse.plugins import contract_of
from lightning_fuse.step import LossScale, StepContract, StepOutcome

STEPS, WINDOW, CLIP = 50, 2, 0.5
BAD = (4, 37, 66)  # micro-batches whose loss overflows, each in another window
SCALE, GROWTH = 2.0**10, 7


class Ended(NamedTuple):
    """What is left of a training."""

    net: Net
    optimizer: Optimizer
    contract: StepContract
    outcomes: list[StepOutcome]


class Outcomes(L.Callback):
    """Keeps every outcome."""

    def __init__(self) -> None:
        self.seen: list[StepOutcome] = []

    def on_step_outcome(self, trainer: L.Trainer, pl_module: L.LightningModule, outcome: StepOutcome) -> None:
        self.seen.append(outcome)


class Net(L.LightningModule):
    """Two layers with a norm between; the loss of a bad micro-batch is infinite."""

    def __init__(self, state: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(20, 150), nn.LayerNorm(150), nn.ReLU(), nn.Linear(150, 4))
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1], batch_idx)

    def configure_optimizers(self) -> FusedAdamW:
        return FusedAdamW(self.named_parameters(), lr=3e-3, weight_decay=0.1, state=self.state)


def loss_of(out: Tensor, y: Tensor, index: int) -> Tensor:
    loss = nn.functional.mse_loss(out, y)
    return loss * float("inf") if index in BAD else loss


def expected_scale() -> tuple[float, int]:
    """The last scale and its growth counter: doubled after GROWTH updates in a row, halved after an overflow."""
    scale, counter = SCALE, 0
    bad = {index // WINDOW for index in BAD}
    for step in range(STEPS):
        counter = 0 if step in bad else counter + 1
        scale = scale / 2 if step in bad else scale
        if counter == GROWTH:
            scale, counter = scale * 2, 0
    return scale, counter


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    count = STEPS * WINDOW
    return [(torch.randn(8, 20, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def through_trainer(state: str) -> Ended:
    net, seen = Net(state), Outcomes()
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=WINDOW, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Fuse(), seen],
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=8))
    contract = contract_of(trainer)
    assert contract is not None
    return Ended(net, trainer.optimizers[0], contract, seen.seen)


def through_fabric(state: str) -> Ended:
    net, outcomes = Net(state), list[StepOutcome]()
    contract = StepContract(loss_scale=LossScale(SCALE, growth_interval=GROWTH))
    # Fabric opens autocast; the contract scales, so Fabric's own scaler is switched off.
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    fabric = Fabric(accelerator="cpu", plugins=FabricMixedPrecision("16-mixed", "cpu", scaler))
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    for index, (x, y) in enumerate(batches()):
        if index % WINDOW == 0:
            optimizer.zero_grad()
        fabric.backward(contract.scale(loss_of(model(x), y, index) / WINDOW))
        contract.accumulate()
        if index % WINDOW == WINDOW - 1:
            contract.step(optimizer, clip_norm=CLIP, window=WINDOW)
            outcomes += contract.update()
    return Ended(net, optimizer.optimizer, contract, outcomes)


def through_plain_loop(state: str) -> Ended:
    net, outcomes = Net(state), list[StepOutcome]()
    contract, optimizer = StepContract(loss_scale=LossScale(SCALE, growth_interval=GROWTH)), net.configure_optimizers()
    for index, (x, y) in enumerate(batches()):
        if index % WINDOW == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(net(x), y, index)
        contract.scale(loss / WINDOW).backward()
        contract.accumulate()
        if index % WINDOW == WINDOW - 1:
            contract.step(optimizer, clip_norm=CLIP, window=WINDOW)
            outcomes += contract.update()
    return Ended(net, optimizer, contract, outcomes)


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_the_same_bits(state: str) -> None:
    runs = [through_trainer(state), through_fabric(state), through_plain_loop(state)]
    plain = runs[-1]
    for run in runs:
        for (name, p), (_, q) in zip(run.net.named_parameters(), plain.net.named_parameters(), strict=True):
            assert torch.equal(p, q), name
            mine, its = run.optimizer.state[p], plain.optimizer.state[q]
            assert mine.keys() == its.keys()
            assert all(mine[key].dtype == its[key].dtype and torch.equal(mine[key], its[key]) for key in mine), name
        assert str(run.outcomes) == str(plain.outcomes)  # as words: NaN is equal to itself there
        assert run.contract.state_dict() | {"window": None} == plain.contract.state_dict() | {"window": None}
    # What is compared is no empty thing.
    assert [o.global_step for o in plain.outcomes if not o.applied] == [1 + index // WINDOW for index in BAD]
    assert {o.window_size for o in plain.outcomes} == {WINDOW}
    assert any(o.clip_coef < 1.0 for o in plain.outcomes)
    contract = plain.contract
    assert (contract.global_step, contract.updates, contract.skips["nonfinite"]) == (STEPS, STEPS - len(BAD), 3)
    assert contract.loss_scale is not None
    assert (contract.loss_scale.value, contract.loss_scale.growth_counter) == expected_scale()
    keys = {key for held in plain.optimizer.state.values() for key in held}
    assert keys >= ({"exp_avg.codes", "exp_avg.scale", "step"} if state == "int8" else {"exp_avg", "exp_avg_sq"})
    untrained = torch.cat([p.detach().flatten() for p in Net(state).parameters()])
    assert (torch.cat([p.detach().flatten() for p in plain.net.parameters()]) - untrained).norm() > 1.0
