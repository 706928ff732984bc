"""Every registered rule × state format × parameter dtype × master weight, trained and saved; also run as a program.

python -m tests.optim.every_kind SAVED RESULT     in a fresh process: loads all of SAVED, trains on, writes RESULT
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.optim import FusedAdEMAMix, FusedLAMB, FusedLARS, FusedLion, FusedOptimizer
from lightning_fuse.rules import RULES
from tests.rules.rule_table import ADAM, BUFFERED, CASES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {"wide": (2, 150), "bias": (5,)}

# The rules that torch has no twin of, away from neutral.
WITHOUT_TWIN: dict[str, Callable[..., FusedOptimizer]] = {
    "lion": lambda params, **kw: FusedLion(params, lr=0.01, betas=(0.8, 0.95), weight_decay=0.2, **kw),
    "lars": lambda params, **kw: FusedLARS(params, **BUFFERED, trust_coefficient=0.02, **kw),
    "lars_nesterov": lambda params, **kw: FusedLARS(params, **BUFFERED, trust_coefficient=0.02, nesterov=True, **kw),
    "lamb": lambda params, **kw: FusedLAMB(params, **ADAM, **kw),
    "ademamix": lambda params, **kw: FusedAdEMAMix(
        params, **{**ADAM, "betas": (0.8, 0.98, 0.99)}, alpha=3.0, t_alpha=5, t_beta3=6, **kw
    ),
}

Kind = tuple[str, str, torch.dtype, str]


def kinds() -> Iterator[Kind]:
    """(rule, state format, dtype, master) of everything that can be built."""
    for rule in RULES:
        for state in STATE_FORMATS if RULES[rule].moments else ("fp32",):
            for dtype in DTYPES:
                for name, master in MASTERS.items():
                    if dtype in master.dtypes:
                        yield rule, state, dtype, name


def build(kind: Kind, weights: dict[str, Tensor] | None = None) -> tuple[FusedOptimizer, dict[str, Parameter]]:
    """An optimizer of one kind over two parameters, with given weights or those of a seed."""
    rule, state, dtype, master = kind
    generator = torch.Generator().manual_seed(7)
    fresh = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    params = {name: Parameter(value.clone()) for name, value in (weights or fresh).items()}
    make = CASES[rule].make if rule in CASES else WITHOUT_TWIN[rule]
    return make(params.items(), state=state, master=master), params


def train(optimizer: FusedOptimizer, params: dict[str, Parameter], steps: Iterable[int]) -> None:
    """Steps with gradients that depend on the step and the name alone; the vector has none in every third."""
    for step in steps:
        for number, p in enumerate(params.values()):
            grad = torch.sin(torch.arange(p.numel()) * (0.37 + number) + 1.3 * step).view(p.shape)
            p.grad = None if number and step % 3 == 0 else grad.to(p.dtype)
        optimizer.step()


def packed(optimizer: FusedOptimizer, params: dict[str, Parameter]) -> dict[str, Any]:
    """Weights and state, as plain data that training on does not change."""
    return copy.deepcopy({"weights": {n: p.detach() for n, p in params.items()}, "optimizer": optimizer.state_dict()})


def main() -> None:
    """Goes on with every saved run from step 4 to step 8."""
    torch.manual_seed(123)  # global random state must not matter
    torch.set_num_threads(2)  # nor may the number of threads
    saved, results = torch.load(sys.argv[1], weights_only=True), []
    for kind, held in zip(kinds(), saved, strict=True):
        optimizer, params = build(kind, held["weights"])
        optimizer.load_state_dict(held["optimizer"])
        train(optimizer, params, range(4, 8))
        results.append(packed(optimizer, params))
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
