"""How an optimizer's own ``step`` is called when the loss is known already.

The contract runs the closure first, checks the gradients, and steps then. Most optimizers take no closure, or one if
they are given it: they get none. An optimizer that must have one gets a closure that returns the known loss. One that
evaluates the model again at other weights (SAM, LBFGS) would be wrong with that, and is refused before training.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_fuse.optim import FusedOptimizer


def check_closure(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose step evaluates the model more than once.

    Args:
        optimizer: Any torch optimizer; not changed.

    Raises:
        ValueError: It is one.
    """
    if isinstance(optimizer, FusedOptimizer):
        return
    if isinstance(optimizer, LBFGS) or (needs_closure(type(optimizer)) and _evaluates_again(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the model several times in one step, which the step contract does "
            "not do; train without Fuse, or with another optimizer"
        )


def step_call(optimizer: Optimizer, loss: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of an optimizer's own step.

    Args:
        optimizer: Whose step.
        loss: What the closure has returned.
        arguments: Keyword arguments that the caller gave to ``step``.

    Returns:
        The call, without arguments.
    """
    if not isinstance(optimizer, FusedOptimizer) and needs_closure(type(optimizer)):
        return partial(optimizer.step, lambda: loss, **arguments)
    return partial(optimizer.step, **arguments) if arguments else optimizer.step


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether a class of optimizers refuses a step without a closure, by its signature or by its first lines."""
    return _step_needs_closure(inspect.unwrap(cls.step))


@cache
def _step_needs_closure(step: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(step).parameters.get("closure")
        if parameter is None:
            return False
        if parameter.default is inspect.Parameter.empty:
            return True
        body = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (TypeError, ValueError, OSError, SyntaxError):
        return False
    return any(_insists(node) for node in ast.walk(body))


def _insists(node: ast.AST) -> bool:
    """``assert closure is not None``, or ``if closure is None: raise ...``."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) in ("closure is not None", "closure")
    if isinstance(node, ast.If):
        refused = ast.unparse(node.test) in ("closure is None", "not closure")
        return refused and any(isinstance(inner, ast.Raise) for inner in node.body)
    return False


def _evaluates_again(optimizer: Optimizer) -> bool:
    """Whether a step asks for the loss at other weights or gradients, or twice; tried on a copy."""
    try:
        probe = _copy_of(optimizer)
    except Exception:  # an attribute that cannot be copied: the step itself will tell
        return False
    params: list[Tensor] = [p for group in probe.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    changed: list[bool] = []

    def closure() -> Tensor:
        moved = any(not torch.equal(p, was) for p, was in zip(params, before, strict=True))
        cleared = any(p.grad is None or not bool((p.grad == 1).all()) for p in params)
        changed.append(moved or cleared or bool(changed))
        return torch.zeros(())

    try:
        inspect.unwrap(type(probe).step)(probe, closure)
    except Exception:  # what counts is what it had asked for by then
        return any(changed)
    return any(changed)


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """A copy with parameters of its own and every attribute; torch's own copies keep state and groups only."""
    held = {name: value for name, value in vars(optimizer).items() if name != "step"}
    for name in [name for name in held if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        held[name] = OrderedDict()
    probe = object.__new__(type(optimizer))
    vars(probe).update(copy.deepcopy(held))
    return probe
