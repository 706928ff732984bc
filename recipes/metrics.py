"""Metrics that torchmetrics does not have, as torchmetrics: reset, reduced over ranks and kept like its own."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric


class BitsPerByte(MeanMetric):
    """The mean of losses given in nats per byte, as bits per byte: nats / ln 2."""

    def compute(self) -> Tensor:
        """Bits per byte of everything seen since the last reset."""
        return super().compute() / log(2)


class TokensPerSecond(Metric):
    """Tokens of all ranks together, per second of training.

    Attributes:
        tokens: Seen since the last reset, summed over ranks.
        seconds: They took; of the slowest rank.
    """

    full_state_update = False
    higher_is_better = True
    tokens: Tensor
    seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, tokens: int, seconds: float) -> None:
        """Adds one batch: how many tokens, and how many seconds from the end of the last batch to the end of this."""
        self.tokens += tokens
        self.seconds += seconds

    def compute(self) -> Tensor:
        """Tokens per second, float32; 0 before the first update."""
        return (self.tokens / self.seconds).nan_to_num(0.0).float()
