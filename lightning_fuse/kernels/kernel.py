"""The contract of a step kernel: one optimizer step for all parameters of a device, and one look at all gradients.

A kernel combines rules, codecs and master weights, which do not know each other. Whatever kernel runs, the result has
the same bits as ``reference.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fuse.formats.format import Codec, StateFormat, TensorSpec
from lightning_fuse.formats.master import MasterFormat
from lightning_fuse.kernels.shards import Shard, local_part
from lightning_fuse.rules.rule import UpdateRule

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# torch's own optimizers count in float32, which ends at 2^24; float64 is exact to 2^53, and torch's take it, too.
STEP = TensorSpec("step", (), torch.float64)


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


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """All that is decided about one parameter, from the whole of it; no memory of state.

    Kernels, allocation, saving, loading, conversion, export and the ledger read bytes, formats, masters, names and
    rules from here. Two specs are equal only where they are the same object.

    Attributes:
        name: The parameter's name, or ``group.position`` where the optimizer was given none.
        param: The parameter, the key of ``optimizer.state``: float32, bfloat16 or float16, any dense layout, or a
            DTensor of those. It may be on the meta device: nothing of a spec reads its values.
        group: Its parameter group, the live dict.
        rule: How it is updated.
        state_format: How its moments are kept.
        master: How its float32 weight is kept.
        shape: The shape of the whole, unsharded parameter.
        first_index: Index of the first element that lies here in the whole parameter, in row-major order.
        shard: Where it lies on the mesh; None where the parameter is no DTensor.
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    rule: UpdateRule
    state_format: StateFormat
    master: MasterFormat
    shape: tuple[int, ...]
    first_index: int = 0
    shard: Shard | None = None

    @cached_property
    def local(self) -> Tensor:
        """The memory of the parameter that lies here: of a DTensor its local tensor, else the parameter itself."""
        return local_part(self.param)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return tuple(self.local.shape)

    @cached_property
    def codecs(self) -> tuple[Codec, ...]:
        """What keeps each of the rule's moments."""
        return tuple(self.state_format.codec(moment) for moment in self.rule.moments)

    @cached_property
    def moment_tensors(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each moment; a suffix is the whole key in the state."""
        return tuple(
            tuple(replace(part, suffix=moment.name + part.suffix) for part in codec.parts(self.local_shape))
            for moment, codec in zip(self.rule.moments, self.codecs, strict=True)
        )

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the state by its key: the step, the moments' and the master weight's."""
        moments = chain.from_iterable(self.moment_tensors)
        return {part.suffix: part for part in (STEP, *moments, *self.master.parts(self.local_shape))}

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Bytes of state that lie here, by key."""
        return {key: part.nbytes for key, part in self.tensors.items()}


@dataclass(frozen=True, eq=False)
class ParamState:
    """A parameter's spec with its memory. The kernel overwrites the tensors in place.

    Attributes:
        spec: What is decided about it.
        step: float64, 0-dimensional, a whole number: updates applied to it so far. Counted up by the kernel.
        moments: The tensors of each of the rule's moments.
        master: The tensors of the master weight.
    """

    spec: ParamSpec
    step: Tensor
    moments: tuple[tuple[Tensor, ...], ...]
    master: tuple[Tensor, ...]

    @classmethod
    def of(cls, spec: ParamSpec, held: Mapping[str, Tensor]) -> ParamState:
        """The state of a parameter, looked up by key.

        Args:
            spec: Its spec.
            held: ``optimizer.state[p]``.

        Returns:
            The state.

        Raises:
            KeyError: A tensor is missing.
        """
        moments = tuple(tuple(local_part(held[part.suffix]) for part in parts) for parts in spec.moment_tensors)
        master = tuple(local_part(held[part.suffix]) for part in spec.master.parts(spec.local_shape))
        return cls(spec, held["step"], moments, master)


class ParamUpdate(NamedTuple):
    """One parameter's part in one step.

    Attributes:
        state: The parameter and its state.
        grad: Its gradient; float32, bfloat16 or float16, the shape of what lies here, any layout. Not changed.
        hyper: Hyperparameters of its group as plain numbers; ``maximize`` negates the gradient.
    """

    state: ParamState
    grad: Tensor
    hyper: Mapping[str, Any]


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
    """Whether a tensor is a wrapper subclass, such as a DTensor, whose own address holds no elements."""
    return shows_no_memory(type(tensor))


def shows_no_memory(kind: type[Tensor]) -> bool:
    """Whether a class is a wrapper subclass; see ``is_wrapped``."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def check_fits(spec: ParamSpec, grad: Tensor) -> None:
    """Refuses a gradient of another shape than its parameter: a kernel would read out of bounds.

    torch checks the shape where ``.grad`` is set, not where ``p.data`` is replaced after that.

    Args:
        spec: The parameter.
        grad: Its gradient.

    Raises:
        RuntimeError: Shape or device differ.
    """
    if grad.shape != spec.local.shape or grad.device != spec.local.device:
        raise RuntimeError(
            f"the gradient of {spec.name} is {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(spec.local.shape)} on {spec.local.device}: set p.grad = None after replacing p.data"
        )


class StepKernel(ABC):
    """Steps all parameters of a device.

    Attributes:
        name: The word of ``kernel=``.
    """

    name: ClassVar[str]

    def clone(self) -> StepKernel:
        """The kernel for the parameters of one optimizer: itself, or a copy where it remembers their addresses."""
        return self

    def unavailable_reason(self) -> str:
        """Why it cannot run on this machine at all, as it reads after "because"; empty where it can."""
        return ""

    def description(self) -> str:
        """What it runs with, in a few words: CPU level and threads; empty where there is nothing to say."""
        return ""

    @abstractmethod
    def supports(self, spec: ParamSpec) -> Support:
        """Whether this kernel can step the given parameter, and why not."""

    @abstractmethod
    def step(self, updates: Sequence[ParamUpdate], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Steps every parameter of ``updates``, or none.

        Args:
            updates: Parameters with gradients, each at most once.
            factor: float32, 0-dimensional: each gradient is multiplied by it in a register; None stands for 1.
            found_inf: float32, 0-dimensional: other than 0 leaves every bit as it is; None stands for 0.
        """

    @abstractmethod
    def supports_reduction(self, device: torch.device) -> bool:
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
