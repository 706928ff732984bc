"""Step kernels: one optimizer step for all parameters of a device. ``kernel.py`` is the contract."""

from lightning_fuse.kernels.dispatch import AUTO, KERNELS, check_kernel_name, choose_kernel, sum_of_squares
from lightning_fuse.kernels.kernel import ParamSpec, ParamState, ParamUpdate, StepKernel, Support

__all__ = [
    "AUTO",
    "KERNELS",
    "ParamSpec",
    "ParamState",
    "ParamUpdate",
    "StepKernel",
    "Support",
    "check_kernel_name",
    "choose_kernel",
    "sum_of_squares",
]
