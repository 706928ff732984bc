"""The GAN: two optimizers in turns by hand, one loss scale, and digits that come near to real ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_fuse import Fuse
from lightning_fuse.recipes.digits_gan import GAN, PARTS, DigitsGAN
from lightning_fuse.recipes.metrics import EnergyDistance
from lightning_fuse.run import train
from tests.cases import half
from tests.cases import train as fit
from tests.composing import ROOT, composed
from tests.tolerances import GAN_TURNS

WORDS = ["recipe=digits_gan", "logger=none", "trainer.enable_progress_bar=false"]


def halving(optimizer: Any, total: int) -> dict[str, Any]:
    return {"scheduler": LambdaLR(optimizer, lambda update: 0.5**update)}


LR = 0.1
SGD = partial(torch.optim.SGD, lr=LR, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def module(optimizer: Any = ADAMW, **settings: Any) -> DigitsGAN:
    torch.manual_seed(0)
    return DigitsGAN(GAN(latent=4, width=8), optimizer, halving, **settings)


def images(count: int, bad: int | None = None) -> DataLoader[Any]:
    """Batches of 6; the discriminator alone sees what is wrong with one of them."""
    made = torch.Generator().manual_seed(1)
    rows = [(torch.rand(6, 1, 8, 8, generator=made), torch.zeros(6)) for _ in range(count)]
    if bad is not None:
        rows[bad][0][0, 0, 0, 0] = torch.inf
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def weights(trained: DigitsGAN, part: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in getattr(trained.gan, part).parameters()])


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}, {"state": "int8"}])
def test_an_overflow_in_one_part_skips_that_part_alone(fuse: dict[str, Any]) -> None:
    trained, before = module(micro_batches=2, clip=0.5), module()
    trainer, outcomes = fit(trained, images(2, bad=0), Fuse(**fuse), precision=half(1024.0), max_steps=2)
    assert outcomes.of("optimizer") == [0, 1]
    assert outcomes.of("reason") == ["nonfinite", "ok"]
    assert outcomes.of("window_size") == [2, 2]
    assert outcomes.of("loss_scale_after") == [512.0, 512.0]
    assert torch.equal(weights(trained, "discriminator"), weights(before, "discriminator"))
    assert not torch.equal(weights(trained, "generator"), weights(before, "generator"))
    lrs = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    assert lrs == [1e-3, 0.5e-3]  # after one update of the generator


@pytest.mark.parametrize("precision", GAN_TURNS)
def test_it_is_what_plain_torch_does_in_turns(precision: str) -> None:
    trained, expected = module(SGD, micro_batches=3, clip=0.1), module(SGD)
    torch.manual_seed(5)
    fit(trained, images(4), Fuse(), precision=half(1024.0) if precision == "16-mixed" else precision)
    torch.manual_seed(5)
    by_hand(expected, precision == "16-mixed")
    for part in PARTS:
        assert (weights(trained, part) - weights(expected, part)).abs().max() < GAN_TURNS[precision]
        # A part that missed one of its four turns is further off than that.
        assert (weights(expected, part) - weights(module(), part)).abs().max() > 100 * GAN_TURNS[precision]


def by_hand(gan: DigitsGAN, half_precision: bool) -> None:
    """Each part's step on gradients of its own parameters alone, in three micro-batches."""
    parts = [list(getattr(gan.gan, part).parameters()) for part in PARTS]
    optimizers = [SGD(params) for params in parts]
    losses = (gan.discriminator_loss, gan.generator_loss)
    for index, (real, _) in enumerate(images(4)):
        noise = torch.randn(6, 4)
        for params, optimizer, loss_of in zip(parts, optimizers, losses, strict=True):
            optimizer.param_groups[0]["lr"] = LR * 0.5**index
            optimizer.zero_grad()
            for x, z in zip(real.flatten(1).chunk(3), noise.chunk(3), strict=True):
                with torch.autocast("cpu", torch.float16, enabled=half_precision):
                    loss = loss_of(x, z) / 3
                (loss * 1024.0).backward(inputs=params)
            for p in params:
                p.grad /= 1024.0  # type: ignore[operator]
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()


def test_both_parts_have_parameters_of_their_own_and_all_of_them() -> None:
    gan = module()
    named = [{name for group in gan.optimizer_groups(part) for name, _ in group["params"]} for part in PARTS]
    assert not named[0] & named[1]
    assert named[0] | named[1] == {name for name, _ in gan.named_parameters()}


def test_energy_distance_against_its_definition() -> None:
    torch.manual_seed(2)
    x, y = torch.randn(7, 3), torch.randn(5, 3) + 3

    def mean(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return sum(float((a - b).norm()) for a, b in pairs) / len(pairs)

    cross = mean([(a, b) for a in x for b in y])
    own = [mean([(s[i], s[j]) for i in range(len(s)) for j in range(i)]) for s in (x, y)]
    metric = EnergyDistance()
    metric.update(x[:2], y[:1])
    metric.update(x[2:], y[1:])
    assert float(metric.compute()) == pytest.approx(2 * cross - own[0] - own[1], rel=1e-5)
    same = EnergyDistance()
    same.update(torch.randn(400, 3), torch.randn(400, 3))
    assert abs(float(same.compute())) < 0.05 < float(metric.compute())


@pytest.mark.parametrize(
    ("words", "said"),
    [(["recipe.module.micro_batches=0"], "from 1"), (["recipe.module.clip=0"], "above 0"), (["model=cnn"], "gan")],
)
def test_settings_that_cannot_be(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        train(composed(*WORDS, *words, run_folder=tmp_path / "run"), words)
    assert not (tmp_path / "run").exists()


def test_a_plateau_is_refused(tmp_path: Path) -> None:
    words = [*WORDS, "schedule=plateau", "recipe.max_steps=4"]
    with pytest.raises(NotImplementedError, match="schedule=constant"):
        train(composed(*words, run_folder=tmp_path / "run"), words)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_it_learns_to_draw(state: str, tmp_path: Path) -> None:
    words = [*WORDS, f"state={state}", "recipe.max_steps=500"]
    metrics = train(composed(*words, run_folder=tmp_path / "run"), words)
    assert metrics["val/energy_distance"] < 0.2  # 0.009 between two parts of the real images, 3 at the start


@pytest.mark.slow
def test_a_run_in_two_parts_is_the_run(tmp_path: Path) -> None:
    words = [*WORDS, "precision=16-mixed", "recipe.max_steps=120", "callbacks.fuse.init_loss_scale=1e7"]
    train(composed(*words, run_folder=tmp_path / "whole"), words)
    first = [*words[:-2], "recipe.max_steps=60", words[-1]]
    train(composed(*first, run_folder=tmp_path / "first"), first)
    resumed = [f"resume={tmp_path / 'first'}", "recipe.max_steps=120"]
    with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
        train(hydra.compose("config", [*resumed, "run_folder=unused"]), resumed)
    one, two = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("whole", "first")
    )
    assert one["global_step"] == two["global_step"] == 120
    assert one["FusePrecision"]["counters"] == two["FusePrecision"]["counters"]
    for name, value in one["state_dict"].items():
        assert torch.equal(value, two["state_dict"][name]), name
