"""Every rule of the package beside its public class, its oracle and torch's own; settings away from neutral."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD
from tests.oracles import AdamOracle, Oracle, SGDOracle


@dataclass(frozen=True)
class RuleCase:
    """One rule.

    Attributes:
        rule: Its name in ``RULES``.
        ours: The public class that runs it.
        torch: torch.optim's class of the same maths.
        oracle: The float64 one.
        switches: Keyword arguments, ours and torch's, that choose the rule.
        settings: Hyperparameters, none of them neutral.
        only_oracle: What the oracle needs to be told besides.
        twin: The rule that differs only in how it decays, or the nearest relative.
    """

    rule: str
    ours: type[FusedOptimizer]
    torch: Callable[..., torch.optim.Optimizer]
    oracle: type[Oracle]
    switches: dict[str, Any]
    settings: dict[str, Any]
    only_oracle: dict[str, Any] = field(default_factory=dict)
    twin: str = ""

    def make(self, params: Any, **changes: Any) -> FusedOptimizer:
        return self.ours(params, **{**self.settings, **self.switches, **changes})

    def make_torch(self, params: Any, **changes: Any) -> torch.optim.Optimizer:
        return self.torch(params, **{**self.settings, **self.switches, "foreach": False, **changes})

    def make_oracle(self, params: Any, **changes: Any) -> Oracle:
        return self.oracle(params, **{**self.settings, **self.switches, **self.only_oracle, **changes})

    @property
    def is_adam(self) -> bool:
        return "betas" in self.settings


ADAM = {"lr": 0.01, "betas": (0.8, 0.98), "eps": 0.02, "weight_decay": 0.2}
PLAIN = {"lr": 0.02, "weight_decay": 0.1}
BUFFERED = {**PLAIN, "momentum": 0.8}
COUPLED, DECOUPLED = {"decoupled": False}, {"decoupled": True}

AMSGRAD, NO_AMSGRAD = {"amsgrad": True}, {"amsgrad": False}
ADAMW_CLASSES = (FusedAdamW, torch.optim.AdamW, AdamOracle)
ADAM_CLASSES = (FusedAdam, torch.optim.Adam, AdamOracle)
SGD_CLASSES = (FusedSGD, torch.optim.SGD, SGDOracle)
NO_MOMENTUM = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}

CASES: dict[str, RuleCase] = {
    case.rule: case
    for case in (
        RuleCase("adamw", *ADAMW_CLASSES, NO_AMSGRAD, ADAM, DECOUPLED, twin="adam"),
        RuleCase("adamw_amsgrad", *ADAMW_CLASSES, AMSGRAD, ADAM, DECOUPLED, twin="adam_amsgrad"),
        RuleCase("adam", *ADAM_CLASSES, NO_AMSGRAD, ADAM, COUPLED, twin="adamw"),
        RuleCase("adam_amsgrad", *ADAM_CLASSES, AMSGRAD, ADAM, COUPLED, twin="adamw_amsgrad"),
        RuleCase("sgd", *SGD_CLASSES, NO_MOMENTUM, PLAIN, twin="sgd_momentum"),
        RuleCase("sgd_momentum", *SGD_CLASSES, {"dampening": 0.3, "nesterov": False}, BUFFERED, twin="sgd_nesterov"),
        RuleCase("sgd_nesterov", *SGD_CLASSES, {"dampening": 0.0, "nesterov": True}, BUFFERED, twin="sgd_momentum"),
    )
}

# torch has no twin of these: each is held to an oracle in tests/rules/test_<name>.py.
WITH_TESTS_OF_THEIR_OWN = {"lion", "lars", "lars_nesterov", "lamb", "ademamix"}
