"""Handwritten digits: scikit-learn's 1,797 images of 8 × 8 pixels, a small CNN, validation accuracy in seconds."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fuse.recipes.dataloaders import train_loader, validation_loader
from lightning_fuse.recipes.ranges import Count, Probability, Share, Size, Workers
from lightning_fuse.recipes.recipe import Recipe, ScheduleFactory

CLASSES = 10
PIXELS = 64


class CNN(nn.Sequential):
    """Three convolutions with group norm, then one linear layer.

    Maps images [B, 1, 8, 8] to logits [B, 10].

    Args:
        width: Channels of the first convolution; the others have twice as many. A multiple of 8.
        dropout: Probability that a feature is dropped in training.

    Raises:
        ValueError: ``width`` is not a multiple of 8.
    """

    def __init__(self, *, width: Size, dropout: Probability = 0.0) -> None:
        if width < 8 or width % 8:
            raise ValueError(f"model.width={width}; the CNN needs a multiple of 8")
        super().__init__(
            _convolution(1, width),
            _convolution(width, 2 * width),
            nn.MaxPool2d(2),  # [B, 2 * width, 4, 4]
            _convolution(2 * width, 2 * width),
            nn.MaxPool2d(2),  # [B, 2 * width, 2, 2]
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * width, CLASSES),
        )


class MLP(nn.Sequential):
    """Linear layers with ReLU and no norm layer, so that gradients of very different size reach the layers.

    Maps images [B, 1, 8, 8] to logits [B, 10].

    Args:
        width: Features of every hidden layer.
        layers: Number of hidden layers.
        dropout: Probability that a feature of the last one is dropped in training.

    Raises:
        ValueError: ``width`` or ``layers`` is below 1.
    """

    def __init__(self, *, width: Size, layers: Size, dropout: Probability = 0.0) -> None:
        if width < 1 or layers < 1:
            raise ValueError(f"model.width={width} model.layers={layers}; the MLP needs at least 1 of each")
        hidden = [module for i in range(layers) for module in (nn.Linear(width if i else PIXELS, width), nn.ReLU())]
        super().__init__(nn.Flatten(), *hidden, nn.Dropout(dropout), nn.Linear(width, CLASSES))


class Digits(Recipe):
    """Cross-entropy on digits; logs loss and accuracy.

    Args:
        model: Maps [B, 1, 8, 8] to [B, 10].
        optimizer: As in ``Recipe``.
        schedule: As in ``Recipe``.
    """

    def __init__(self, model: nn.Module, optimizer: partial[Optimizer], schedule: ScheduleFactory) -> None:
        super().__init__(model, optimizer, schedule)
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_loss = MeanMetric()
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of a batch of (images, labels)."""
        images, labels = batch
        logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch to the validation metrics."""
        images, labels = batch
        logits = self.model(images)
        self.val_loss.update(F.cross_entropy(logits.float(), labels), weight=len(labels))
        self.val_accuracy.update(logits, labels)
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)


class DigitsData(L.LightningDataModule):
    """The images in [0, 1] and their labels, a fixed part of them kept for validation.

    Args:
        batch_size: Images per training batch.
        validation: Share of the images kept for validation, in (0, 1); every n-th of each class.
        num_workers: Processes that load batches; 0 loads them in the training process.

    Attributes:
        data_hash: SHA-256 of images and labels, for the run's manifest.

    Raises:
        ValueError: ``validation`` leaves one of the two parts empty, or a size is below its least value.
    """

    def __init__(self, *, batch_size: Count, validation: Share = 0.2, num_workers: Workers = 0) -> None:
        super().__init__()
        if not 0 < validation < 1:
            raise ValueError(f"data.validation={validation}; give the share of the images for validation, in (0, 1)")
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}; a batch has at least 1 image")
        self.batch_size = batch_size
        self.num_workers = num_workers
        images, labels = _load()
        held = _every_nth_of_each_class(labels, validation)
        self.train_set = TensorDataset(images[~held], labels[~held])
        self.validation_set = TensorDataset(images[held], labels[held])
        if batch_size > len(self.train_set):
            raise ValueError(f"data.batch_size={batch_size}; there are {len(self.train_set)} images for training")
        self.data_hash = f"sha256:{sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()}"

    def train_dataloader(self) -> Any:
        """Shuffled batches of (images [B, 1, 8, 8] float32, labels [B] int64); resumable anywhere."""
        return train_loader(self.train_set, self.batch_size, self.num_workers, self.trainer)

    def val_dataloader(self) -> Any:
        """The validation images in order."""
        return validation_loader(self.validation_set, 256, self.num_workers, self.trainer)


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU())


def _load() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # [1797, 1, 8, 8]
    return images, torch.from_numpy(digits.target).long()


def _every_nth_of_each_class(labels: Tensor, share: float) -> Tensor:
    """A mask that holds ``share`` of every class, spread evenly over it."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        places = (labels == label).nonzero().flatten()
        rank = torch.arange(len(places))
        held[places] = ((rank + 1) * share).floor() > (rank * share).floor()
    return held
