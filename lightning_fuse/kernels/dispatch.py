"""Which kernel steps a parameter: the one the user named, or the best that supports it."""

from __future__ import annotations

from lightning_fuse.kernels.kernel import Slot, StepKernel
from lightning_fuse.kernels.reference import ReferenceKernel
from lightning_fuse.registry import Registry, unknown_name

# Best first: ``auto`` takes the first that supports all parameters.
KERNELS: Registry[StepKernel] = Registry("kernel", [ReferenceKernel()])
AUTO = "auto"


def check_kernel_name(name: str) -> None:
    """Refuses a word that ``kernel=`` does not know.

    Args:
        name: What the user asked for.

    Raises:
        ValueError: Neither "auto" nor a known kernel.
    """
    if name != AUTO and name not in KERNELS:
        raise ValueError(unknown_name(KERNELS.kind, name, [AUTO, *KERNELS]))


def choose_kernel(name: str, slots: list[Slot]) -> StepKernel:
    """The kernel that will step the given parameters.

    Args:
        name: "auto" or a kernel's name.
        slots: All parameters of an optimizer.

    Returns:
        The kernel.

    Raises:
        NotImplementedError: The named kernel does not support one of the parameters.
    """
    candidates = list(KERNELS.values()) if name == AUTO else [KERNELS[name]]
    refusals = []
    for kernel in candidates:
        refusal = next((f"{slot.name}: {why.why}" for slot in slots if not (why := kernel.supports(slot))), None)
        if refusal is None:
            return kernel
        refusals.append(f"{kernel.name} ({refusal})")
    raise NotImplementedError(f"no kernel for these parameters: {'; '.join(refusals)}; use kernel=auto or kernel=reference")
