"""A small GPT: token and position embeddings, pre-norm blocks of causal attention and a GELU MLP, tied output head.

The shapes in trailing comments use B = batch, T = positions, C = width, V = vocabulary.
"""

from __future__ import annotations

from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fuse.recipes.ranges import Probability, Size


class GPT(nn.Module):
    """Predicts the next token at every position.

    Args:
        vocabulary: Number of different tokens (256 for bytes).
        context: Longest sequence, in tokens.
        layers: Number of blocks.
        heads: Attention heads per block; ``width`` must be a multiple of it.
        width: Size of the residual stream.
        dropout: Probability that an element of an attention or MLP output is dropped in training.

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``, or a size is below 1.
    """

    def __init__(
        self,
        *,
        vocabulary: Size = 256,
        context: Size,
        layers: Size,
        heads: Size,
        width: Size,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "context": context, "layers": layers, "heads": heads, "width": width}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"model.{name}={size}; a GPT needs at least 1")
        if width % heads:
            raise ValueError(f"model.width={width} does not divide among model.heads={heads}; take a multiple of it")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        blocks = [Block(width, heads, dropout) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        # Each block adds two terms to the residual stream; this keeps its variance the same at any depth.
        for last in [weight for block in blocks for weight in (block.attention.out.weight, block.mlp[-1].weight)]:
            nn.init.normal_(cast(Tensor, last), std=0.02 / sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: Integers, [B, T] with T at most ``context``.

        Returns:
            [B, T, V], the parameters' dtype (or autocast's).
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [B, T, V]

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, *, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Draws ``length`` more tokens after a prompt. Global random state is left alone.

        Args:
            prompt: Integers, [T] with T at least 1.
            length: Tokens to draw.
            temperature: Divides the logits; below 1 the likely tokens become likelier.
            seed: Of the draw.

        Returns:
            Prompt and continuation, [T + length].
        """
        generator = torch.Generator().manual_seed(seed)
        text = prompt
        for _ in range(length):
            logits = self(text[-self.context :].unsqueeze(0))[0, -1].float().cpu()  # [V]
            drawn = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
            text = torch.cat([text, drawn.to(text)])
        return text


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class CausalAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)  # each [B, heads, T, c]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
