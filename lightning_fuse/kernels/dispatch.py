"""Which kernel steps a parameter: the one the user named, or the best that supports it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from operator import attrgetter

from torch import Tensor

from lightning_fuse.kernels.cpu.native import NativeKernel
from lightning_fuse.kernels.kernel import ParamSpec, StepKernel
from lightning_fuse.kernels.reference import ReferenceKernel
from lightning_fuse.registry import Registry, unknown_name

# Best first: ``auto`` takes the first that supports all parameters.
KERNELS: Registry[StepKernel] = Registry("kernel", [NativeKernel(), ReferenceKernel()])
AUTO = "auto"
_DEVICE = attrgetter("device")


def check_kernel_name(name: str) -> None:
    """Refuses a word that ``kernel=`` does not know.

    Args:
        name: What the user asked for.

    Raises:
        ValueError: Neither "auto" nor a known kernel.
    """
    if name != AUTO and name not in KERNELS:
        raise ValueError(unknown_name(KERNELS.kind, name, [AUTO, *KERNELS]))


def choose_kernel(name: str, specs: Sequence[ParamSpec]) -> StepKernel:
    """The kernel that will step the given parameters.

    Args:
        name: "auto" or a kernel's name.
        specs: All parameters of an optimizer.

    Returns:
        The kernel.

    Raises:
        NotImplementedError: The named kernel does not support one of the parameters.
    """
    candidates = list(KERNELS.values()) if name == AUTO else [KERNELS[name]]
    refusals = []
    for kernel in candidates:
        refusal = next(((spec.name, why.why) for spec in specs if not (why := kernel.supports(spec))), None)
        if refusal is None:
            return kernel.clone()
        if name == AUTO and refusal[1] == kernel.unavailable_reason():
            _say_once(kernel.name, refusal[1])
        refusals.append(f"{kernel.name} ({refusal[0]}: {refusal[1]})")
    raise NotImplementedError(
        f"no kernel for these parameters: {'; '.join(refusals)}; use kernel=auto or kernel=reference"
    )


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """One look at gradients of any optimizer, by the best kernel for each device.

    Args:
        grads: At least one; float32, bfloat16 or float16.

    Returns:
        float64, 0-dimensional, on the first gradient's device; see ``StepKernel.sum_of_squares``.
    """
    devices = list(dict.fromkeys(map(_DEVICE, grads)))
    sums = []
    for device in devices:
        kernel = next(kernel for kernel in KERNELS.values() if kernel.supports_reduction(device))
        mine = grads if len(devices) == 1 else [grad for grad in grads if grad.device == device]
        sums.append(kernel.sum_of_squares(mine))
    total = sums[0]
    for partial in sums[1:]:
        total = total + partial.to(devices[0])
    return total


@cache
def _say_once(kernel: str, why: str) -> None:
    """One line per process about a kernel that this machine lacks: the next best gives the same bits, but slower."""
    warnings.warn(f"the {kernel} kernel is not used because {why}; the reference kernel runs instead", stacklevel=2)
