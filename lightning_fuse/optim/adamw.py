"""FusedAdamW: AdamW (decoupled decay) over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fuse.optim.fused import FusedOptimizer, Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import check_adam, refuse_unsupported
from lightning_fuse.rules import RULES, UpdateRule


class FusedAdamW(FusedOptimizer):
    """AdamW with decoupled weight decay; the formula and its source are in ``lightning_fuse.rules.adamw``.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
        lr: Learning rate; a number or a one-element tensor.
        betas: Decay of the running averages of gradient and squared gradient.
        eps: Added to the denominator.
        weight_decay: Decoupled decay: each step multiplies the parameter by 1 - lr * weight_decay.
        amsgrad: Divide by the largest second moment so far.
        maximize: Ascend instead of descend.
        state: State format: "fp32", "bf16", "int8", "int8_bf16", or a list of (name pattern, format) with a bare
            format as the default, for instance ``[("embed.*", "bf16"), "int8"]``. Vectors stay fp32 under int8.
        master: Master weights of 16-bit parameters: "none", "fp32", "split", "split8".
        kernel: "auto" or a kernel's name.

    Raises:
        TypeError: A parameter is not a dense float32, bfloat16 or float16 tensor, or an argument is unknown.
        ValueError: A value is out of range, unknown, or would have no effect.
    """

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, master=master, kernel=kernel)

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        return RULES["adamw_amsgrad" if group["amsgrad"] else "adamw"]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See ``FusedOptimizer.check_group``."""
        check_adam(group)
