"""FusedAdam: Adam with coupled (L2) decay over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fuse.optim.adamw import FusedAdamW
from lightning_fuse.optim.fused import Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.rules import RULES, UpdateRule


class FusedAdam(FusedAdamW):
    """Adam; the formula and its source are in ``lightning_fuse.rules.adam``.

    Its arguments are those of ``FusedAdamW``, but ``weight_decay`` is added to the gradient (coupled) and 0 by default,
    as in torch.optim.Adam.

    Raises:
        TypeError: As ``FusedAdamW``.
        ValueError: As ``FusedAdamW``.
    """

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state: StateSpec = "fp32",
        master: str = "none",
        kernel: str = "auto",
        **unsupported: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            state=state,
            master=master,
            kernel=kernel,
            **unsupported,
        )

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        return RULES["adam_amsgrad" if group["amsgrad"] else "adam"]
