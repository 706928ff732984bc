"""Optimizers: torch.optim.Optimizer on top of rules, formats and kernels."""

from lightning_fuse.optim.adam import FusedAdam
from lightning_fuse.optim.adamw import FusedAdamW
from lightning_fuse.optim.ademamix import FusedAdEMAMix
from lightning_fuse.optim.checkpoint.export import to_torch_state
from lightning_fuse.optim.checkpoint.options import LoadOptions, LoadReport
from lightning_fuse.optim.checkpoint.rebuild import convert
from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.optim.groups import param_groups
from lightning_fuse.optim.lamb import FusedLAMB
from lightning_fuse.optim.lars import FusedLARS
from lightning_fuse.optim.lion import FusedLion
from lightning_fuse.optim.sgd import FusedSGD

__all__ = [
    "FusedAdEMAMix",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedLARS",
    "FusedLion",
    "FusedOptimizer",
    "FusedSGD",
    "LoadOptions",
    "LoadReport",
    "convert",
    "param_groups",
    "to_torch_state",
]
