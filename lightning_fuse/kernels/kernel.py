"""The contract of a step kernel: one optimizer step for all parameters of a device, and one look at all gradients.

A kernel combines rules, codecs and master weights, which do not know each other. Whatever kernel runs, the result has
the same bits as ``reference.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.rules.rule import Moment, UpdateRule


@dataclass(frozen=True)
class Support:
    """Whether a kernel can do something.

    Attributes:
        ok: Whether it can.
        why: The reason where it cannot, as it reads after "because".
    """

    ok: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class StoredMoment:
    """One moment of one parameter as it lies in memory.

    Attributes:
        moment: Which moment.
        codec: How it is kept.
        tensors: Its parts, in the codec's order; the kernel overwrites them.
    """

    moment: Moment
    codec: Codec
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Slot:
    """All of one parameter that stays the same from step to step.

    Attributes:
        name: The parameter's name, for messages.
        param: The parameter; float32, bfloat16 or float16, any dense layout. Overwritten in place.
        rule: How it is updated.
        moments: Its moments, in the rule's order.
        master: How its float32 weight is kept.
        master_tensors: The master's parts; overwritten in place.
        step: int64, 0-dimensional: updates applied to it so far. Counted up by the kernel.
        index_start: Index of its first element in the whole, unsharded parameter.
    """

    name: str
    param: Tensor
    rule: UpdateRule
    moments: tuple[StoredMoment, ...]
    master: MasterFormat
    master_tensors: tuple[Tensor, ...]
    step: Tensor
    index_start: int = 0


class Work(NamedTuple):
    """One parameter's part in one step.

    Attributes:
        slot: The parameter and its state.
        grad: Its gradient; float32, bfloat16 or float16, the parameter's shape, any layout. Not changed.
        group: Hyperparameters as plain numbers; ``maximize`` negates the gradient.
    """

    slot: Slot
    grad: Tensor
    group: Mapping[str, Any]


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory: sorted by stride, no dimension may reach into the next one.

    Args:
        tensor: Any strided tensor.

    Returns:
        False for every tensor without an overlap that slicing, transposing and permuting can make.
    """
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is a subclass that stands for other tensors, such as a DTensor."""
    return shows_no_memory(type(tensor))


def shows_no_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of a class stand for other tensors; see ``is_wrapped``."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def check_fits(slot: Slot, grad: Tensor) -> None:
    """Refuses a gradient of another shape than its parameter: a kernel would read beside it.

    torch checks the shape where ``.grad`` is set, not where ``p.data`` is replaced after that.

    Args:
        slot: The parameter and its state.
        grad: Its gradient.

    Raises:
        RuntimeError: Shape or device differ.
    """
    if grad.shape != slot.param.shape or grad.device != slot.param.device:
        raise RuntimeError(
            f"the gradient of {slot.name} is {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(slot.param.shape)} on {slot.param.device}: set p.grad = None after replacing p.data"
        )


class StepKernel(ABC):
    """Steps all parameters of a device.

    Attributes:
        name: The word of ``kernel=``.
    """

    name: ClassVar[str]

    def for_one_optimizer(self) -> StepKernel:
        """The kernel for the parameters of one optimizer: itself, or a copy where it remembers their addresses."""
        return self

    def missing(self) -> str:
        """Why it cannot run on this machine at all, as it reads after "because"; empty where it can."""
        return ""

    def how(self) -> str:
        """What it runs with, in a few words: CPU level and threads; empty where there is nothing to say."""
        return ""

    @abstractmethod
    def supports(self, slot: Slot) -> Support:
        """Whether this kernel can step the given parameter, and why not."""

    @abstractmethod
    def step(self, work: Sequence[Work], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Steps every parameter of ``work``, or none.

        Args:
            work: Parameters with gradients, each at most once.
            factor: float32, 0-dimensional: each gradient is multiplied by it in a register; None stands for 1.
            found_inf: float32, 0-dimensional: other than 0 leaves every bit as it is; None stands for 0.
        """

    @abstractmethod
    def reads(self, device: torch.device) -> bool:
        """Whether ``sum_of_squares`` can look at gradients on the given device."""

    @abstractmethod
    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """One look at all gradients, as they are.

        The squares of finite float32 numbers neither overflow nor vanish in float64, so the sum is finite exactly
        when every gradient is.

        Args:
            grads: float32, bfloat16 or float16, any shapes and layouts, one device.

        Returns:
            float64, 0-dimensional: the sum of all squares; the same bits at any number of threads.
        """


PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
