"""Where the gradients of format_error.py come from: a byte-level GPT in training, and noise of a known kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FALL = 0.05  # what the standard deviation of half the elements is multiplied by


@dataclass(frozen=True)
class GPTSize:
    """How large the model is and how long it trains.

    Attributes:
        layers: Transformer blocks.
        width: Size of the residual stream.
        context: Bytes that a position sees.
        batch: Windows per step.
        steps: Optimizer steps.
    """

    layers: int
    width: int
    context: int
    batch: int
    steps: int


FULL = GPTSize(layers=3, width=128, context=128, batch=8, steps=400)
SHORT = GPTSize(layers=1, width=64, context=64, batch=8, steps=250)


class ByteGPT(nn.Module):
    """A pre-norm GPT on bytes with a tied head.

    Args:
        size: Its dimensions.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.width // 32, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [B, T, 256], for bytes [B, T]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.tokens.weight)


def gpt_gradients(size: GPTSize, seed: int = 0) -> Iterator[list[Tensor]]:
    """Trains in float32 and hands out the gradients of all matrices before each step.

    AdamW with lr 2e-3, 50 steps of warm-up, clipping at 1. Vectors are left out: they keep float32 state.

    Args:
        size: The model and the number of steps.
        seed: Of the initial weights and of the batches.

    Yields:
        One float32 tensor per matrix; valid until the next one is asked for.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = torch.frombuffer(bytearray("\n".join(topics[k] for k in sorted(topics)), "utf-8"), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ByteGPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, size.steps + 1):
        starts = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=generator)
        windows = text[starts + torch.arange(size.context + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield [p.grad for p in model.parameters() if p.dim() > 1 and p.grad is not None]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50)
        optimizer.step()


def noise_gradients(
    shape: tuple[int, int], spread: float, before: int, after: int, seed: int = 0
) -> Iterator[list[Tensor]]:
    """Independent normal gradients, each element with a standard deviation of its own, of which half fall.

    Args:
        shape: Rows and columns of the one matrix.
        spread: The standard deviations are exp(spread * N(0, 1)).
        before: Steps in which nothing changes.
        after: Steps after every second element's gradients fell to ``FALL`` times what they were.
        seed: Of everything.

    Yields:
        One list of one float32 tensor per step.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation = torch.exp(spread * torch.randn(shape, generator=generator))
    for step in range(before + after):
        if step == before:
            deviation[:, ::2] *= FALL
        yield [torch.randn(shape, generator=generator) * deviation]
