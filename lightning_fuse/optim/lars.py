"""FusedLARS: momentum SGD whose gradient is rescaled layer by layer, over any state format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fuse.optim.fused import FusedOptimizer, Params
from lightning_fuse.optim.selection import StateSpec
from lightning_fuse.optim.settings import check_nesterov, number, refuse_unsupported
from lightning_fuse.rules import RULES, UpdateRule


class FusedLARS(FusedOptimizer):
    """LARS; the formula and its source are in ``lightning_fuse.rules.lars``.

    A layer moves by about lr * trust_coefficient / (1 - momentum) of its norm in every update, 1 % with the defaults.
    Vectors and scalars (biases, norm parameters) take plain momentum SGD with the same lr.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
        lr: Learning rate; a number or a one-element tensor. Far larger than SGD's, as trust_coefficient multiplies it.
        momentum: Factor of the momentum buffer.
        weight_decay: Coupled decay, added to the gradient and to the norm it is compared with.
        nesterov: Nesterov's momentum; needs momentum > 0.
        trust_coefficient: What the ratio of the norms is multiplied with; more than 0.
        eps: Added to the norm in the ratio's denominator.
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
        lr: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
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
            "dampening": 0.0,  # no argument: the SGD rules that vectors take read it
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, master=master, kernel=kernel)

    def _rule(self, group: Mapping[str, Any]) -> UpdateRule:
        return RULES["lars_nesterov" if group["nesterov"] else "lars"]

    def rule_for(self, group: Mapping[str, Any], p: Tensor) -> UpdateRule:
        """See ``FusedOptimizer.rule_for``; a vector is moved by plain SGD."""
        if p.dim() > 1:
            return self._rule(group)
        return RULES["sgd_nesterov" if group["nesterov"] else "sgd_momentum"]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See ``FusedOptimizer.check_group``."""
        for key in ("lr", "weight_decay", "eps"):
            number(group, key)
        if number(group, "trust_coefficient") == 0.0:
            raise ValueError("trust_coefficient=0: no layer would ever move; must be a finite number > 0")
        if group["dampening"] != 0.0:
            raise ValueError(f"dampening={group['dampening']!r}: LARS has none; leave it out or set it to 0")
        check_nesterov(group)
