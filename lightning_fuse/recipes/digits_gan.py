"""A generator draws handwritten digits against a discriminator: two optimizers in turns, by hand, one loss scale.

Manual optimization with everything that makes it go wrong elsewhere: the optimizers alternate on graphs of their own
(``toggle_optimizer``), each step is made of several micro-batches, gradients are clipped by hand, and under 16-mixed
one loss scale serves both. An overflow in one of them skips that one's step; the scale moves once per batch, after
both; each learning rate follows the applied updates of its own optimizer.

The losses are those of Goodfellow et al., 2014 (https://arxiv.org/abs/1406.2661), the generator's in the form that does
not saturate.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fuse.optim import param_groups
from lightning_fuse.recipes.metrics import EnergyDistance
from lightning_fuse.recipes.ranges import Count, Probability, Size
from lightning_fuse.recipes.recipe import Recipe, ScheduleFactory
from lightning_fuse.step import StepOutcome

PIXELS = 64
PARTS = ("discriminator", "generator")  # in the order of their optimizers and of their turns


class GAN(nn.Module):
    """Two small MLPs.

    Args:
        latent: Numbers of noise that an image is drawn from.
        width: Features of the hidden layers.
        dropout: Probability that a feature of the discriminator is dropped in training.

    Raises:
        ValueError: A size is below 1.
    """

    def __init__(self, *, latent: Size, width: Size, dropout: Probability = 0.0) -> None:
        super().__init__()
        if latent < 1 or width < 1:
            raise ValueError(f"model.latent={latent} model.width={width}; the GAN needs at least 1 of each")
        self.latent = latent
        # [B, latent] -> [B, 64], pixels in [0, 1]
        self.generator = nn.Sequential(
            nn.Linear(latent, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, PIXELS),
            nn.Sigmoid(),
        )
        # [B, 64] -> [B, 1], the logit of being real
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )


class DigitsGAN(Recipe):
    """Trains both parts in turns; logs their losses and the energy distance of drawn from held-out images.

    Args:
        model: A ``GAN``.
        optimizer: As in ``Recipe``; builds one for each part.
        schedule: As in ``Recipe``; over the updates of one part.
        micro_batches: Parts that a batch is cut into, each with a backward of its own.
        clip: Largest global L2 norm of each part's gradients, in unscaled units; None does not clip.

    Raises:
        ValueError: ``micro_batches`` is below 1, or ``clip`` not above 0.
    """

    def __init__(
        self,
        model: GAN,
        optimizer: partial[Optimizer],
        schedule: ScheduleFactory,
        *,
        micro_batches: Count = 1,
        clip: float | None = None,
    ) -> None:
        super().__init__(model, optimizer, schedule)
        if micro_batches < 1:
            raise ValueError(f"recipe.module.micro_batches={micro_batches}; a batch is cut into at least 1")
        if clip is not None and not clip > 0:
            raise ValueError(f"recipe.module.clip={clip}; give a norm above 0, or null for no clipping")
        self.automatic_optimization = False
        self.micro_batches, self.clip = micro_batches, clip
        self.val_distance = EnergyDistance()

    @property
    def gan(self) -> GAN:
        """The model, by its kind."""
        return cast(GAN, self.model)

    def optimizer_groups(self, part: str = PARTS[0]) -> list[dict[str, Any]]:
        """Named groups of one part, weights with the optimizer's decay, biases and norms with none."""
        decay = self.optimizer_factory.keywords.get("weight_decay", 0.0)
        groups = param_groups(self.model, weight_decay=decay)
        for group in groups:
            group["params"] = [(f"model.{name}", p) for name, p in group["params"] if name.startswith(f"{part}.")]
        return [group for group in groups if group["params"]]

    def groups_of_optimizers(self) -> list[list[dict[str, Any]]]:
        """See ``Recipe``; one optimizer for each part."""
        return [self.optimizer_groups(part) for part in PARTS]

    def configure_optimizers(self) -> Any:
        """Lightning's hook: an optimizer and a schedule for each part.

        Raises:
            NotImplementedError: The schedule waits for a metric.
        """
        updates = int(self.trainer.estimated_stepping_batches) // len(PARTS)
        configured = []
        for part in PARTS:
            optimizer = self.optimizer_factory(self.optimizer_groups(part))
            schedule = self.schedule_factory(optimizer, updates)
            if isinstance(schedule["scheduler"], ReduceLROnPlateau):
                raise NotImplementedError(
                    "schedule=plateau follows one metric, and a GAN has no loss that falls: use schedule=constant, "
                    "warmup_linear or warmup_cosine"
                )
            configured.append({"optimizer": optimizer, "lr_scheduler": schedule})
        return configured

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The discriminator's turn, then the generator's, on one batch of (images, labels)."""
        images = batch[0].flatten(1)
        noise = torch.randn(len(images), self.gan.latent, device=images.device)
        optimizers: Any = self.optimizers()
        for index, (part, loss_of) in enumerate(
            zip(PARTS, (self.discriminator_loss, self.generator_loss), strict=True)
        ):
            self.toggle_optimizer(optimizers[index])
            total = torch.zeros((), device=images.device)
            for real, drawn_from in zip(images.chunk(self.micro_batches), noise.chunk(self.micro_batches), strict=True):
                loss = loss_of(real, drawn_from) * (len(real) / len(images))
                self.manual_backward(loss)
                total += loss.detach()
            if self.clip is not None:
                self.clip_gradients(optimizers[index], self.clip, "norm")
            optimizers[index].step()
            optimizers[index].zero_grad()
            self.untoggle_optimizer(optimizers[index])
            self.log(f"train/{part}_loss", total, prog_bar=True)

    def on_step_outcome(self, trainer: Any, pl_module: Any, outcome: StepOutcome) -> None:
        """Moves a part's learning rate after an update of that part: in manual optimization nobody else does."""
        if outcome.applied:
            schedulers: Any = self.lr_schedulers()
            schedulers[outcome.optimizer].step()

    def discriminator_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        """Cross-entropy of telling real images [B, 64] from those drawn from noise [B, latent]."""
        with torch.no_grad():
            drawn = self.gan.generator(noise)
        as_real, as_drawn = self.gan.discriminator(real).float(), self.gan.discriminator(drawn).float()
        return F.softplus(-as_real).mean() + F.softplus(as_drawn).mean()

    def generator_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        """Cross-entropy of images drawn from noise [B, latent] being taken for real ones, which are not needed."""
        return F.softplus(-self.gan.discriminator(self.gan.generator(noise)).float()).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch of held-out images and as many drawn ones to the metric; the noise is the same every time."""
        images = batch[0].flatten(1)
        generator = torch.Generator().manual_seed(batch_idx)
        noise = torch.randn(len(images), self.gan.latent, generator=generator).to(images.device)
        self.val_distance.update(self.gan.generator(noise).float(), images.float())
        self.log("val/energy_distance", self.val_distance, prog_bar=True)
