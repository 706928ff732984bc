"""Lightning's precision seam: the plugin that runs the step contract, and taking over optimizers and schedulers."""

from lightning_fuse.plugins.lightning_precision import PRECISIONS, loss_scale_for, stock_precision
from lightning_fuse.plugins.optimizer_conversion import AUTO, FUSED, OptimizerSpec
from lightning_fuse.plugins.precision import FusePrecision, contract_of

__all__ = [
    "AUTO",
    "FUSED",
    "PRECISIONS",
    "FusePrecision",
    "OptimizerSpec",
    "contract_of",
    "loss_scale_for",
    "stock_precision",
]
