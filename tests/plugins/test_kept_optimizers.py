"""The five acts in the right order with an optimizer that is neither ours nor torch's: bitsandbytes' 8-bit AdamW."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import half, train

bitsandbytes: Any = pytest.importorskip("bitsandbytes")
WIDTH, CLIP = 128, 0.1


class Net(L.LightningModule):
    """One layer large enough for 8-bit state; a batch whose last column is 1 has an infinite loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, 64)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.layer(batch[:, :WIDTH]).float().square().mean()
        return loss * float("inf") if batch[0, WIDTH] == 1 else loss

    def configure_optimizers(self) -> Any:
        return bitsandbytes.optim.AdamW8bit(self.parameters(), lr=1e-2, min_8bit_size=16)


def ended(bad: bool, scale: float | None) -> tuple[Net, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    seen = [torch.cat([torch.randn(4, WIDTH, generator=generator), torch.zeros(4, 1)], 1) for _ in range(6)]
    if bad:
        seen.insert(3, torch.ones(4, WIDTH + 1))
    net, precision = Net(), "32-true" if scale is None else half(scale, growth_interval=1000)
    loader = DataLoader(seen, batch_size=None)
    return net, *train(net, loader, Fuse(optimizer=None), precision=precision, gradient_clip_val=CLIP)


@pytest.mark.parametrize("scale", [None, 256.0])
def test_a_skipped_step_of_bitsandbytes_leaves_no_trace(scale: float | None) -> None:
    (net, trainer, outcomes), (without, other, _) = ended(True, scale), ended(False, scale)
    assert type(trainer.optimizers[0]) is bitsandbytes.optim.AdamW8bit
    assert outcomes.of("reason") == ["ok"] * 3 + ["nonfinite"] + ["ok"] * 3
    assert all(norm > CLIP for norm in outcomes.of("grad_norm"))
    assert contract_of(trainer).updates == 6
    for p, q in zip(net.parameters(), without.parameters(), strict=True):
        assert torch.equal(p, q)
        mine, its = trainer.optimizers[0].state[p], other.optimizers[0].state[q]
        assert mine.keys() == its.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(its[key])) for key in mine)
    assert any(held["state1"].dtype == torch.uint8 for held in trainer.optimizers[0].state.values())


def test_what_bitsandbytes_steps_on_is_unscaled_and_clipped() -> None:
    """A loss scale of 2^8 changes what it sees by float16's rounding, not 256-fold."""
    norms = {}
    for scale in (None, 256.0):
        net, _, _ = ended(False, scale)
        norms[scale] = [float(p.grad.norm()) for p in net.parameters()]
        assert sum(norm**2 for norm in norms[scale]) ** 0.5 == pytest.approx(CLIP, rel=1e-3)
    assert norms[256.0] == pytest.approx(norms[None], rel=0.05)
