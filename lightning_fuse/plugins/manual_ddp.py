"""Manual optimization on several ranks: gradients are averaged once per optimizer step, not once per backward.

DistributedDataParallel averages in every backward, and in manual optimization nobody tells it which backward is the
last one before a step. So it is kept from averaging, and the gradients of an optimizer are averaged when they are
wanted: at its step, or where they are clipped or unscaled before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class GradientAverage:
    """Averages gradients over the ranks of one DistributedDataParallel module.

    Args:
        model: The wrapped module, without a communication hook of its own.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._group: Any = model.process_group
        self._averaged: WeakSet[Optimizer] = WeakSet()

    def hold(self) -> None:
        """Keeps the model from averaging in the backwards to come; Lightning lets it again after every batch."""
        self._model.require_backward_grad_sync = False

    @torch.no_grad()
    def average(self, optimizer: Optimizer) -> None:
        """Averages an optimizer's gradients, unless that has been done since its last step.

        A parameter without a gradient on this rank counts as zero where another rank has one.

        Args:
            optimizer: Whose gradients; every rank calls this for the same optimizers in the same order.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if optimizer in self._averaged:
            return
        self._averaged.add(optimizer)
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    raise RuntimeError(
                        "a gradient is sparse, in manual optimization on several ranks; the step contract averages "
                        "dense ones there: use Embedding(sparse=False), automatic optimization, or train without Fuse"
                    )
                by_dtype[p.dtype].append(p)
        for params in by_dtype.values():
            self._average(params)

    def stepped(self, optimizer: Optimizer) -> None:
        """Forgets that an optimizer's gradients are averaged: the next ones are others."""
        self._averaged.discard(optimizer)
        # Buffers are sent from the first rank in the next forward, as after a synchronised backward.
        self._model.require_forward_param_sync = True

    def _average(self, params: list[Tensor]) -> None:
        present = params[0].new_tensor([p.grad is not None for p in params])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([part.reshape(-1) for part in parts] + [present])
        # Divided first, as DistributedDataParallel does: a sum over ranks could overflow in 16 bits.
        flat = flat / dist.get_world_size(self._group)
        dist.all_reduce(flat, group=self._group)
        # Read only where this rank has to know whether another one has a gradient.
        counts = flat[-len(params) :].tolist() if any(p.grad is None for p in params) else [1.0] * len(params)
        begin = 0
        for p, count in zip(params, counts, strict=True):
            mean = flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()
            if p.grad is not None:
                p.grad.copy_(mean)
            elif count:
                p.grad = mean.clone()


def average_by_step(model: Module | None) -> GradientAverage | None:
    """What averages the gradients of a strategy's model in manual optimization.

    Args:
        model: What the strategy made of the module.

    Returns:
        None where the model averages nothing, or by a communication hook of its own, which is left alone.
    """
    if not isinstance(model, DistributedDataParallel) or getattr(model, "_comm_hooks", None):
        return None
    return GradientAverage(model)
