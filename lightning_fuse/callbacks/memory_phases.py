"""Memory of one training step: what is held, and the peaks of forward, backward and step.

On a GPU torch's allocator is asked (allocated, reserved, peak). On a CPU torch keeps no counts, so one step is recorded
with torch.profiler, which sees every allocation of a tensor; they are added to what is known to be held when the step
begins: parameters, gradients, buffers, optimizer state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fuse.callbacks.profile_trace import MEMORY, Event

PHASES = ("forward", "backward", "step")
PHASE_RANGE = "lightning_fuse: memory of "


@dataclass(frozen=True)
class Held:
    """Bytes of what a training run holds between two steps.

    Attributes:
        parameters: Of the module.
        buffers: Of the module.
        gradients: As far as they are there.
        state: Of all optimizers.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.buffers + self.gradients + self.state


@dataclass(frozen=True)
class Curve:
    """Peaks of one step.

    Attributes:
        peaks: Phase to the most bytes held in it.
        end: Bytes held at the end of the step.
    """

    peaks: dict[str, int]
    end: int

    @property
    def peak(self) -> int:
        """The most of the whole step."""
        return max(self.peaks.values())


class DeviceMemory(Protocol):
    """What is asked of a device's allocator."""

    def allocated(self) -> int:
        """Bytes of live tensors."""
        ...

    def reserved(self) -> int:
        """Bytes that the allocator has from the device."""
        ...

    def unusable(self) -> int:
        """Bytes of free pieces inside blocks that are partly in use."""
        ...

    def peak(self) -> int:
        """The most bytes allocated since ``reset_peak``."""
        ...

    def reset_peak(self) -> None:
        """Starts a new peak."""
        ...


class CudaMemory:
    """The allocator of one GPU.

    Args:
        device: It.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.memory_allocated(self.device))

    def reserved(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.memory_reserved(self.device))

    def unusable(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.memory_stats(self.device).get("inactive_split_bytes.all.current", 0))

    def peak(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """See ``DeviceMemory``."""
        torch.cuda.reset_peak_memory_stats(self.device)


def held_bytes(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Held:
    """Adds up the memory that tensors lie in, each piece once, in the order of ``Held``.

    Args:
        module: The module.
        optimizers: Its optimizers.

    Returns:
        The bytes on this device; whole regions, alignment included.
    """
    parameters = list(module.parameters())
    seen: set[int] = set()
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for o in optimizers for held in o.state.values() for t in _tensors(held)]
    kinds = (parameters, list(module.buffers()), gradients, state)
    return Held(*(sum(_new_bytes(tensor, seen) for tensor in tensors) for tensors in kinds))


def curve_of(events: Sequence[Event], base: int, freed: Mapping[str, int] | None = None) -> Curve:
    """Follows the bytes of tensors through a recorded step.

    Args:
        events: Of a ``Trace`` with memory; phases are ranges named ``PHASE_RANGE`` and the phase.
        base: Bytes held when it began.
        freed: Phase to bytes of ``base`` that were given back before it: the profiler does not see the end of what it
            has not seen begin.

    Returns:
        The peaks.

    Raises:
        ValueError: The recording holds no phase.
    """
    phases = [event for event in events if event.annotation and event.name.startswith(PHASE_RANGE)]
    if not phases:
        raise ValueError("the recording holds no phase of a training step")
    live, peaks, gone = base, dict.fromkeys(PHASES, 0), dict(freed or {})
    changes = [event for event in events if event.name == MEMORY and not event.on_gpu]
    index = 0
    for phase in sorted(phases, key=lambda event: event.start):
        while index < len(changes) and changes[index].start < phase.start:
            live += changes[index].nbytes
            index += 1
        name = phase.name.removeprefix(PHASE_RANGE)
        live -= gone.pop(name, 0)
        peaks[name] = max(peaks[name], live)
        while index < len(changes) and changes[index].start < phase.end:
            live += changes[index].nbytes
            peaks[name] = max(peaks[name], live)
            index += 1
    return Curve(peaks, live + sum(change.nbytes for change in changes[index:]))


def fragmentation(memory: DeviceMemory) -> float:
    """The share of reserved memory that lies in free pieces of blocks in use, 0 to 1."""
    reserved = memory.reserved()
    return memory.unusable() / reserved if reserved else 0.0


def resident_bytes() -> int | None:
    """Resident memory of this process now, or None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "darwin":  # the peak is all there is without further packages
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def gradient_bytes(module: torch.nn.Module) -> int:
    """Bytes of the gradients that are there."""
    seen: set[int] = set()
    return sum(_new_bytes(p.grad, seen) for p in module.parameters() if p.grad is not None)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    return [tensor for value in state for tensor in _tensors(value)] if isinstance(state, (list, tuple)) else []


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    storage = local.untyped_storage()
    if not storage.nbytes() or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return int(storage.nbytes())
