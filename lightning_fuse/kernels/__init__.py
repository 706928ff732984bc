"""Step kernels: one optimizer step for all parameters of a device. ``kernel.py`` is the contract."""

from lightning_fuse.kernels.dispatch import AUTO, KERNELS, check_kernel_name, choose_kernel, sum_of_squares
from lightning_fuse.kernels.kernel import Slot, StepKernel, StoredMoment, Support, Work

__all__ = [
    "AUTO",
    "KERNELS",
    "Slot",
    "StepKernel",
    "StoredMoment",
    "Support",
    "Work",
    "check_kernel_name",
    "choose_kernel",
    "sum_of_squares",
]
