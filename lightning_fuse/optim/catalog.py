"""The one table of optimizers: a new one is a row here, and every other module reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fuse.optim.adam import FusedAdam
from lightning_fuse.optim.adamw import FusedAdamW
from lightning_fuse.optim.ademamix import FusedAdEMAMix
from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.optim.lamb import FusedLAMB
from lightning_fuse.optim.lars import FusedLARS
from lightning_fuse.optim.lion import FusedLion
from lightning_fuse.optim.sgd import FusedSGD


@dataclass(frozen=True)
class CatalogEntry:
    """One optimizer.

    Attributes:
        name: Its name in conversions (``adamw``); the word that ``optimizer=`` takes is ``adamw_fused``.
        cls: The class.
        rules: The rules that it steps by, of ``lightning_fuse.rules.RULES``; parameters of another class's rules, such
            as the vectors of LARS, are not among them.
        transfers: Settings that it takes over from another optimizer, besides lr, weight_decay and maximize.
        torch_twin: torch's optimizer of the same maths, or None.
        bnb_twin: The name of bitsandbytes' optimizer whose state it can load, or "".
    """

    name: str
    cls: type[FusedOptimizer]
    rules: tuple[str, ...]
    transfers: frozenset[str]
    torch_twin: type[Optimizer] | None = None
    bnb_twin: str = ""

    @property
    def word(self) -> str:
        """The word that ``optimizer=`` takes."""
        return f"{self.name}_fused"

    @property
    def settings(self) -> frozenset[str]:
        """All settings that it takes over from another optimizer."""
        return self.transfers | {"lr", "weight_decay", "maximize"}


_ADAM = frozenset({"betas", "eps", "amsgrad"})

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry("adamw", FusedAdamW, ("adamw", "adamw_amsgrad"), _ADAM, AdamW, "AdamW"),
    CatalogEntry("adam", FusedAdam, ("adam", "adam_amsgrad"), _ADAM, Adam),
    CatalogEntry(
        "sgd",
        FusedSGD,
        ("sgd", "sgd_momentum", "sgd_nesterov"),
        frozenset({"momentum", "dampening", "nesterov"}),
        SGD,
        "SGD",
    ),
    CatalogEntry("lion", FusedLion, ("lion",), frozenset({"betas"}), bnb_twin="Lion"),
    CatalogEntry("lars", FusedLARS, ("lars", "lars_nesterov"), frozenset({"momentum", "nesterov"})),
    CatalogEntry("lamb", FusedLAMB, ("lamb",), frozenset({"betas", "eps"})),
    # Of AdEMAMix's three betas two are another optimizer's: none is taken over.
    CatalogEntry("ademamix", FusedAdEMAMix, ("ademamix",), frozenset({"eps"})),
)


def entry_of(cls: type[Optimizer]) -> CatalogEntry | None:
    """The row of a class or of the nearest class that it derives from; None where none of them is ours."""
    rows = {entry.cls: entry for entry in CATALOG}
    return next((rows[base] for base in cls.__mro__ if base in rows), None)
