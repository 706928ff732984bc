"""FusedAdEMAMix: AdamW with a second, slow average of the gradient, over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fuse.optim.fused import FusedOptimizer, Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import check_betas, number, refuse_unsupported
from lightning_fuse.rules import RULES, UpdateRule


class FusedAdEMAMix(FusedOptimizer):
    """AdEMAMix; the formula and its source are in ``lightning_fuse.rules.ademamix``.

    The paper trains with both schedules as long as the run, and decay, lr and the first two betas as for AdamW.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
        lr: Learning rate; a number or a one-element tensor.
        betas: Decay of the fast average of the gradient, of the squared gradient, of the slow average.
        alpha: What the slow average is multiplied by; 4 to 10 in the paper.
        t_alpha: Updates over which alpha grows from 0, usually those of the run; None for alpha from the start.
        t_beta3: Updates over which the decay of the slow average grows from that of the fast one; None likewise.
        eps: Added to the denominator.
        weight_decay: Decoupled decay: each step multiplies the parameter by 1 - lr * weight_decay.
        maximize: Ascend instead of descend.
        state: State format of all three moments; see ``FusedAdamW``.
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
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
            "alpha": alpha,
            "t_alpha": t_alpha,
            "t_beta3": t_beta3,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, master=master, kernel=kernel)

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        return RULES["ademamix"]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See ``FusedOptimizer.check_group``."""
        for key in ("lr", "eps", "weight_decay", "alpha"):
            number(group, key)
        check_betas(group, 3)
        for key in ("t_alpha", "t_beta3"):
            length = group[key]
            if length is not None and (not number(group, key) >= 1 or float(length) % 1):
                raise ValueError(f"{key}={length!r}: must be a whole number of updates >= 1, or None for no schedule")
