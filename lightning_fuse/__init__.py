"""The training step as one contract, in any optimizer-state precision.

Importing this package loads neither Lightning, Triton nor Hydra and starts no compiler: a public name is looked up in
the module that defines it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fuse.callbacks import Fuse
    from lightning_fuse.optim import (
        FusedAdam,
        FusedAdamW,
        FusedAdEMAMix,
        FusedLAMB,
        FusedLARS,
        FusedLion,
        FusedSGD,
        LoadOptions,
        param_groups,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "Fuse",
    "FusedAdEMAMix",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedLARS",
    "FusedLion",
    "FusedSGD",
    "LoadOptions",
    "__version__",
    "param_groups",
]

# Public name -> the module it is defined in.
_HOMES = {
    "Fuse": "lightning_fuse.callbacks",
    "FusedAdam": "lightning_fuse.optim",
    "FusedAdEMAMix": "lightning_fuse.optim",
    "FusedAdamW": "lightning_fuse.optim",
    "FusedLAMB": "lightning_fuse.optim",
    "FusedLARS": "lightning_fuse.optim",
    "FusedLion": "lightning_fuse.optim",
    "FusedSGD": "lightning_fuse.optim",
    "LoadOptions": "lightning_fuse.optim",
    "param_groups": "lightning_fuse.optim",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use and keep it here.

    Raises:
        AttributeError: the package has no such public name; the message lists the ones it has.
    """
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lightning_fuse' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
