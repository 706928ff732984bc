"""Metrics that torchmetrics does not have, as torchmetrics: reset, reduced over ranks and kept like its own."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat


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


class EnergyDistance(Metric):
    """The energy distance of two samples of vectors: 0 where they have one distribution, more where they have not.

    2 E|x - y| - E|x - x'| - E|y - y'| over Euclidean distances (Székely and Rizzo, 2013,
    https://doi.org/10.1016/j.jspi.2013.03.018), each mean over all pairs of different elements.

    Attributes:
        first: The vectors of one sample.
        second: Those of the other.
    """

    full_state_update = False
    higher_is_better = False
    first: list[Tensor]
    second: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("first", [], dist_reduce_fx="cat")
        self.add_state("second", [], dist_reduce_fx="cat")

    def update(self, first: Tensor, second: Tensor) -> None:
        """Adds vectors [B, D] to each sample."""
        self.first.append(first)
        self.second.append(second)

    def compute(self) -> Tensor:
        """The distance, 0-dimensional; each sample needs two vectors at least."""
        x, y = dim_zero_cat(self.first), dim_zero_cat(self.second)
        return 2 * torch.cdist(x, y).mean() - _mean_distance(x) - _mean_distance(y)


def _mean_distance(x: Tensor) -> Tensor:
    """The mean distance of two different elements of a sample [N, D]."""
    return torch.pdist(x).mean()
