"""A short recording of torch.profiler as plain events, and what they say about a training step.

torch itself puts every optimizer step into a range called ``Optimizer.step#<class>.step``; the ranges of whole training
steps, and a mark after every backward pass, are set by whoever records.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEP_RANGE = "lightning_fuse: training step"
AFTER_BACKWARD = "lightning_fuse: after backward"  # an empty range
OPTIMIZER_RANGE = "Optimizer.step#"
MEMORY = "[memory]"
# What starts a kernel on a GPU, as the host sees it.
LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("hipLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel"),
)


@dataclass(frozen=True)
class Event:
    """One event of a recording.

    Attributes:
        name: Its name.
        start: Nanoseconds of the profiler's clock.
        end: The same.
        nbytes: Of a memory event: bytes allocated, negative where they are freed.
        on_gpu: Whether it is an event of the device's own time line.
        annotation: Whether it is a range and no work.
        link: Number that a kernel and its launch share.
    """

    name: str
    start: int
    end: int
    nbytes: int = 0
    on_gpu: bool = False
    annotation: bool = False
    link: int = 0

    def inside(self, ranges: Sequence[Event]) -> bool:
        """Whether it begins in one of the ranges."""
        return any(one.start <= self.start < one.end for one in ranges)


class Trace:
    """A recording.

    Args:
        memory: Record what is allocated and freed, too.
    """

    def __init__(self, memory: bool = False) -> None:
        self.memory = memory
        self._profile: Any = None

    @staticmethod
    def warm_up() -> None:
        """Starts the profiler once: its first start takes seconds, which should not be a training step's."""
        # Kineto writes its own starts and stops to stderr unless told not to before its first.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if not busy():
            trace = Trace()
            trace.start()
            trace.stop()

    def start(self) -> None:
        """Begins."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=self.memory)
        self._profile.start()

    def stop(self) -> list[Event]:
        """Ends.

        Returns:
            The events by their start.
        """
        recorded, self._profile = self._profile, None
        recorded.stop()
        results = recorded.profiler.kineto_results
        return sorted((_event(raw) for raw in results.events()), key=lambda event: event.start)


def busy() -> bool:
    """Whether a profiler is recording already: torch has one at a time."""
    return bool(torch._C._autograd._profiler_enabled())


@dataclass(frozen=True)
class Digest:
    """What a recording says, per training step.

    Attributes:
        steps: Training steps recorded.
        step_ms: Milliseconds of one.
        optimizer_ms: Milliseconds of the optimizer's own ranges in one; on a GPU those of the kernels they launch.
        optimizer_steps: Optimizer ranges in all.
        optimizers: Their names.
        operators: Operator calls in one, nested ones included.
        optimizer_operators: Those inside the optimizer's ranges.
        kernels: Kernels launched on a GPU in one.
        optimizer_kernels: Those by the optimizer.
        host_ms: Host milliseconds of one.
        gpu_ms: Milliseconds of kernels in one; 0 on a CPU.
    """

    steps: int
    step_ms: float
    optimizer_ms: float
    optimizer_steps: int
    optimizers: tuple[str, ...]
    operators: float
    optimizer_operators: float
    kernels: float
    optimizer_kernels: float
    host_ms: float
    gpu_ms: float

    @property
    def share(self) -> float:
        """The optimizer's share of a training step, 0 to 1."""
        return min(1.0, self.optimizer_ms / self.step_ms) if self.step_ms > 0 else 0.0


def digest(events: Sequence[Event]) -> Digest:
    """Reads a recording.

    Args:
        events: By their start.

    Returns:
        The figures; on a GPU a training step lasts as long as its kernels or its host, whichever is longer.

    Raises:
        ValueError: No training step was recorded.
    """
    host = [event for event in events if not event.on_gpu]
    steps = [event for event in host if event.annotation and event.name == STEP_RANGE]
    if not steps:
        raise ValueError("the recording holds no training step")
    ranges = _updates(host, steps)
    operators = [e for e in host if not e.annotation and "::" in e.name and e.inside(steps)]
    launched = [e for e in host if e.name in LAUNCHES and e.inside(steps)]
    links = {e.link: e.inside(ranges) for e in launched}
    kernels = [e for e in events if e.on_gpu and not e.annotation and e.link in links]
    of_optimizer = sum(e.end - e.start for e in kernels if links[e.link])
    count, gpu_ns = len(steps), sum(e.end - e.start for e in kernels)
    host_ns = sum(e.end - e.start for e in steps)
    optimizer_ns = of_optimizer if kernels else sum(e.end - e.start for e in ranges)
    return Digest(
        steps=count,
        step_ms=max(host_ns, gpu_ns) / count / 1e6,
        optimizer_ms=optimizer_ns / count / 1e6,
        optimizer_steps=len(ranges),
        optimizers=tuple(sorted({e.name.removeprefix(OPTIMIZER_RANGE).removesuffix(".step") for e in ranges})),
        operators=len(operators) / count,
        optimizer_operators=sum(e.inside(ranges) for e in operators) / count,
        kernels=len(launched) / count,
        optimizer_kernels=sum(links[e.link] for e in launched) / count,
        host_ms=host_ns / count / 1e6,
        gpu_ms=gpu_ns / count / 1e6,
    )


def _updates(host: Sequence[Event], steps: Sequence[Event]) -> list[Event]:
    """The optimizer's ranges without forward and backward.

    A stock Trainer hands them to ``optimizer.step`` as a closure, which runs before the update and inside the range. A
    range inside another one (an optimizer whose ``step`` calls that of its base class) counts once.
    """
    marks = [event.end for event in host if event.name == AFTER_BACKWARD]
    ranges: list[Event] = []
    for event in host:
        inner = bool(ranges) and event.start < ranges[-1].end
        if event.annotation and event.name.startswith(OPTIMIZER_RANGE) and event.inside(steps) and not inner:
            ranges.append(event)
    starts = [max((mark for mark in marks if e.start < mark < e.end), default=e.start) for e in ranges]
    return [replace(e, start=start) for e, start in zip(ranges, starts, strict=True)]


def _event(raw: Any) -> Event:
    start, length = int(raw.start_ns()), int(raw.duration_ns())
    return Event(
        name=raw.name(),
        start=start,
        end=start + length,
        nbytes=int(raw.nbytes()) if raw.name() == MEMORY else 0,
        on_gpu=raw.device_type() != DeviceType.CPU,
        annotation=bool(raw.is_user_annotation()),
        link=int(raw.correlation_id()),
    )
