"""FusedSGD: SGD, plain or with momentum, over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fuse.optim.fused import FusedOptimizer, Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import check_nesterov, number, refuse_unsupported
from lightning_fuse.rules import RULES, UpdateRule


class FusedSGD(FusedOptimizer):
    """SGD; the formula is in ``lightning_fuse.rules.sgd``.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
        lr: Learning rate; a number or a one-element tensor.
        momentum: Factor of the momentum buffer; 0 keeps no state.
        dampening: Share of the gradient that is kept out of the buffer from the second update on.
        weight_decay: Coupled decay, added to the gradient.
        nesterov: Nesterov's momentum; needs momentum > 0 and dampening 0.
        maximize: Ascend instead of descend.
        state: State format of the momentum buffer; see ``FusedAdamW``.
        master: Master weights of 16-bit parameters; see ``FusedAdamW``.
        kernel: "auto" or a kernel's name.

    Raises:
        TypeError: A parameter is not a dense float32, bfloat16 or float16 tensor, or an argument is unknown.
        ValueError: A value is out of range, unknown, or would have no effect.
    """

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state: StateSpec = "fp32",
        master: str = "none",
        kernel: str = "auto",
        **unsupported: Any,
    ) -> None:
        refuse_unsupported(type(self).__name__, unsupported)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, master=master, kernel=kernel)

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        if group["momentum"] == 0.0:
            return RULES["sgd"]
        return RULES["sgd_nesterov" if group["nesterov"] else "sgd_momentum"]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See ``FusedOptimizer.check_group``."""
        for key in ("lr", "weight_decay"):
            number(group, key)
        check_nesterov(group)
        if group["momentum"] == 0.0 and group["dampening"] != 0.0:
            raise ValueError(
                f"dampening={group['dampening']:g} has no effect without momentum: set momentum > 0 or dampening 0"
            )
