"""A language model on bytes: a small GPT learns the text of a file, and writes some of its own at the end.

Losses are in nats per byte; bits per byte is that divided by ln 2. Without ``data.path`` the text is the help topics
that ship with Python (0.5 MB of English), so the default job needs no download.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from lightning_fuse.recipes.dataloaders import train_loader, validation_loader
from lightning_fuse.recipes.gpt import GPT
from lightning_fuse.recipes.metrics import BitsPerByte, TokensPerSecond
from lightning_fuse.recipes.ranges import Count, Share, Size, Workers
from lightning_fuse.recipes.recipe import Recipe, ScheduleFactory

SHIPPED = "pydoc_data.topics"


class ByteLM(Recipe):
    """Next-byte prediction; logs nats and bits per byte and tokens (bytes) per second.

    Args:
        model: A GPT with a vocabulary of 256.
        optimizer: As in ``Recipe``.
        schedule: As in ``Recipe``.
        sample_bytes: Length of the text that is generated and printed at the end; 0 prints none.
    """

    model: GPT

    def __init__(
        self,
        model: GPT,
        optimizer: partial[Optimizer],
        schedule: ScheduleFactory,
        *,
        sample_bytes: Annotated[int, Field(ge=0, le=10**6)] = 300,
    ) -> None:
        super().__init__(model, optimizer, schedule)
        self.sample_bytes = sample_bytes
        self.train_bits = BitsPerByte()
        self.val_loss = MeanMetric()
        self.val_bits = BitsPerByte()
        self.throughput = TokensPerSecond()
        self._last_end = 0.0  # when the last batch ended, in seconds of the performance counter

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean loss of a batch of windows, [B, context + 1] integers."""
        loss = self._loss(batch)
        self.train_bits(loss)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/bits_per_byte", self.train_bits, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Adds a batch of windows to the validation metrics."""
        loss, tokens = self._loss(batch), batch[:, 1:].numel()
        self.val_loss.update(loss, weight=tokens)
        self.val_bits.update(loss, weight=tokens)
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.log("val/bits_per_byte", self.val_bits)

    def count_tokens(self, batch: Tensor) -> int:
        """Bytes that a batch of windows predicts."""
        return batch[:, 1:].numel()

    def on_train_start(self) -> None:
        """Starts the clock of the throughput."""
        self._last_end = perf_counter()

    def on_validation_end(self) -> None:
        """Restarts the clock: validation is not training time."""
        self._last_end = perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Counts the batch, and logs the throughput since the last log."""
        now = perf_counter()
        self.throughput.update(self.count_tokens(batch), now - self._last_end)
        self._last_end = now
        if (batch_idx + 1) % cast(Any, self.trainer).log_every_n_steps == 0:
            self.log("train/tokens_per_s", self.throughput.compute(), prog_bar=True)
            self.throughput.reset()

    def on_train_end(self) -> None:
        """Prints a sample of what the model writes."""
        if self.sample_bytes:
            self._print_sample()

    @rank_zero_only
    def _print_sample(self) -> None:
        self.model.eval()
        newline = torch.tensor([ord("\n")], device=self.device)
        drawn = self.model.generate(newline, self.sample_bytes).tolist()
        print(f"\nA sample of {self.sample_bytes} bytes:\n{printable(bytes(drawn)).strip()}\n")

    def _loss(self, batch: Tensor) -> Tensor:
        windows = batch.long()
        logits = self.model(windows[:, :-1])  # [B, context, 256]
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class ByteData(L.LightningDataModule):
    """A text cut into windows, its last part kept for validation.

    Args:
        context: Bytes that the model sees at once.
        batch_size: Windows per training batch (and rank).
        path: The text file, any encoding; None takes the text that ships with Python.
        validation: Share of the text kept for validation, in (0, 1): its end, in one piece.
        num_workers: Processes that load batches; 0 loads them in the training process.

    Attributes:
        data_hash: SHA-256 of the text, for the run's manifest.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A part of the text is too short for one batch of training or one window of validation, or a setting
            is outside its range.
    """

    def __init__(
        self,
        *,
        context: Size,
        batch_size: Count,
        path: Annotated[str, Field(min_length=1)] | None = None,
        validation: Share = 0.1,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__()
        if not 0 < validation < 1:
            raise ValueError(f"data.validation={validation}; give the share of the text for validation, in (0, 1)")
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}; a batch has at least 1 window")
        self.batch_size = batch_size
        self.num_workers = num_workers
        text = _shipped_text() if path is None else _read(Path(path))
        name = SHIPPED if path is None else str(path)
        self.data_hash = f"sha256:{sha256(text).hexdigest()}"
        cut = len(text) - int(len(text) * validation)
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        self.train_set = Windows(values[:cut], context)
        self.validation_set = Windows(values[cut:], context)
        self._check(f"{name!r} has {len(text):,} bytes", len(text), context)

    def train_dataloader(self) -> Any:
        """Shuffled batches of windows, [B, context + 1] uint8; resumable anywhere."""
        return train_loader(self.train_set, self.batch_size, self.num_workers, self.trainer)

    def val_dataloader(self) -> Any:
        """The validation windows in order."""
        return validation_loader(self.validation_set, 4 * self.batch_size, self.num_workers, self.trainer)

    def _check(self, size: str, length: int, context: int) -> None:
        if length < context + 1:
            raise ValueError(
                f"{size}, one context is {context} and a byte to predict: give a longer text or a smaller model.context"
            )
        if len(self.validation_set) < 1:
            raise ValueError(
                f"{size}; its validation part holds no window of {context + 1}: give a longer text, a smaller "
                f"model.context or a larger data.validation"
            )
        if len(self.train_set) < self.batch_size:
            raise ValueError(
                f"{size}; its training part holds {len(self.train_set)} windows of {context + 1}, one batch is "
                f"{self.batch_size}: give a longer text, a smaller data.batch_size or a smaller model.context"
            )


class Windows(Dataset[Tensor]):
    """A text as windows that begin ``context`` bytes apart, so that every byte is predicted once.

    Args:
        text: uint8, one dimension.
        context: Bytes that the model sees; an item is one longer, for the byte to predict.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1]  # [context + 1]


def printable(text: bytes) -> str:
    r"""Text as a terminal may show it: what is no printable character of UTF-8 is escaped, as ``\x1b``; lines stay.

    Args:
        text: Any bytes.

    Returns:
        Printable characters, line ends and tabs.
    """
    decoded = text.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in decoded)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"data.path={path}: there is no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ValueError(f"data.path={path} is a folder; give one text file") from None


def _shipped_text() -> bytes:
    topics: dict[str, str] = import_module(SHIPPED).topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()
