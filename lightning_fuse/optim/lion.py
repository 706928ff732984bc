"""FusedLion: Lion (the sign of an interpolated momentum, decoupled decay) over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fuse.optim.fused import FusedOptimizer, Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import check_betas, number, refuse_unsupported
from lightning_fuse.rules import RULES, UpdateRule


class FusedLion(FusedOptimizer):
    """Lion; the formula and its source are in ``lightning_fuse.rules.lion``.

    Every element moves by lr, whatever its gradient: take a third to a tenth of AdamW's lr, and three to ten times its
    weight_decay, which lr multiplies.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
        lr: Learning rate; a number or a one-element tensor.
        betas: Share of the momentum in the direction, and decay of the momentum.
        weight_decay: Decoupled decay: each step multiplies the parameter by 1 - lr * weight_decay.
        maximize: Ascend instead of descend.
        state: State format of the momentum; see ``FusedAdamW``.
        master: Master weights of 16-bit parameters; see ``FusedAdamW``.
        kernel: "auto" or a kernel's name.

    Raises:
        TypeError: A parameter is not a dense float32, bfloat16 or float16 tensor, or an argument is unknown.
        ValueError: A value is out of range, unknown, or would have no effect.
    """

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: StateSpec = "fp32",
        master: str = "none",
        kernel: str = "auto",
        **unsupported: Any,
    ) -> None:
        refuse_unsupported(type(self).__name__, unsupported)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, master=master, kernel=kernel)

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        return RULES["lion"]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See ``FusedOptimizer.check_group``."""
        for key in ("lr", "weight_decay"):
            number(group, key)
        check_betas(group)
