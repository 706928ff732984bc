"""One training through a Trainer, through Fabric and through a plain torch loop: the same bits."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fuse.callbacks import Fuse
from lightning_fuse.optim import FusedAdamW
from lightning_fuse.plugins import contract_of
from lightning_fuse.step import LossScale, StepContract

STEPS, WINDOW, CLIP = 50, 2, 0.5
BAD = (4, 37, 66)  # micro-batches whose loss overflows, each in another window
SCALE = 2.0**10


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


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    count = STEPS * WINDOW
    return [(torch.randn(8, 20, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def through_trainer(state: str) -> tuple[Net, StepContract]:
    net = Net(state)
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=WINDOW, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Fuse()],
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE)),
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=8))
    contract = contract_of(trainer)
    assert contract is not None
    return net, contract


def through_fabric(state: str) -> tuple[Net, StepContract]:
    net = Net(state)
    contract = StepContract(loss_scale=LossScale(SCALE))
    # Fabric opens autocast; the contract scales, so Fabric's own scaler is switched off.
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    fabric = Fabric(accelerator="cpu", plugins=FabricMixedPrecision("16-mixed", "cpu", scaler))
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    for index, (x, y) in enumerate(batches()):
        if index % WINDOW == 0:
            optimizer.zero_grad()
        fabric.backward(contract.scale(loss_of(model(x), y, index) / WINDOW))
        contract.contribute()
        if index % WINDOW == WINDOW - 1:
            contract.step(optimizer, clip_norm=CLIP, window=WINDOW)
            contract.settle()
    return net, contract


def through_plain_loop(state: str) -> tuple[Net, StepContract]:
    net = Net(state)
    contract, optimizer = StepContract(loss_scale=LossScale(SCALE)), net.configure_optimizers()
    for index, (x, y) in enumerate(batches()):
        if index % WINDOW == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(net(x), y, index)
        contract.scale(loss / WINDOW).backward()
        contract.contribute()
        if index % WINDOW == WINDOW - 1:
            contract.step(optimizer, clip_norm=CLIP, window=WINDOW)
            contract.settle()
    return net, contract


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_the_same_bits(state: str) -> None:
    runs = [through_trainer(state), through_fabric(state), through_plain_loop(state)]
    weights = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net, _ in runs]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[2])
    for _, contract in runs:
        assert (contract.global_step, contract.updates, contract.skips["nonfinite"]) == (STEPS, STEPS - len(BAD), 3)
        assert contract.last is not None
        assert contract.last.clip_coef < 1.0
        assert contract.last == runs[0][1].last
        assert contract.loss_scale is not None
        assert contract.loss_scale.value == SCALE / 2 ** len(BAD)
    untrained = torch.cat([p.detach().flatten() for p in Net(state).parameters()])
    assert (weights[0] - untrained).norm() > 1.0
