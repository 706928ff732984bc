"""Which combinations of optimizer, state, master, kernel and precision train, and what to use in place of others.

The alternatives are searched for, not written down, so they are never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from typing import Any

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import AUTO, KERNELS

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
BNB_BITS = {"fp32": 32, "int8": 8}
MOST_ALTERNATIVES = 4  # in one message


@dataclass(frozen=True)
class RunOptions:
    """What decides whether a combination can train.

    Attributes:
        optimizer: The word.
        state: The word of the default state format.
        precision: Lightning's word.
        master: The word.
        kernel: The word.
        patterns: Whether formats are chosen by parameter name.
        momentum: Of SGD; None for other rules.
        family: "fused", "torch" or "bnb".
    """

    optimizer: str
    state: str
    precision: str
    master: str
    kernel: str
    patterns: bool
    momentum: float | None
    family: str

    @property
    def parameters(self) -> str:
        """The dtype of the parameters, as a word: fp32, bf16 or fp16."""
        return {"bf16-true": "bf16", "16-true": "fp16"}.get(self.precision, "fp32")


@dataclass(frozen=True)
class Conflict:
    """Why a combination cannot train.

    Attributes:
        reason: In words, without what was given and without what works.
        involved: The fields of the combination that contradict each other.
    """

    reason: str
    involved: tuple[str, ...]


def find_conflict(options: RunOptions) -> Conflict | None:
    """Why a combination cannot train as asked, or None where it can.

    Args:
        options: The combination.

    Returns:
        The first conflict.
    """
    if options.family == "fused":
        return _conflict_of_fused(options)
    found = _conflict_of_torch(options) if options.family == "torch" else _conflict_of_bnb(options)
    if found is not None:
        return found
    if options.patterns:
        return Conflict("only fused optimizers choose formats by name", ("optimizer", "patterns"))
    if options.master != "none":
        return Conflict("only fused optimizers keep master weights", ("optimizer", "master"))
    if options.kernel != AUTO:
        return Conflict("the kernel is a choice of fused optimizers only", ("optimizer", "kernel"))
    return None


def alternatives(options: RunOptions) -> list[str]:
    """What works in place of a combination: as few changes as possible.

    Args:
        options: One that cannot train.

    Returns:
        Overrides as typed on the command line, those that keep most first, at most ``MOST_ALTERNATIVES``.
    """
    values = _values(options)
    for count in range(1, len(values) + 1):
        found = [
            " ".join(f"{KEYS[name]}={as_typed(getattr(other, name))}" for name in names)
            for names in combinations(values, count)
            for other in _changed(options, values, names)
            if find_conflict(other) is None
        ]
        if found:
            return found[:MOST_ALTERNATIVES]
    return []


# The name under which the user changes each field of a combination.
KEYS = {
    "optimizer": "optimizer",
    "state": "state",
    "precision": "precision",
    "master": "master",
    "kernel": "kernel",
    "patterns": "state.patterns",
    "momentum": "optimizer.momentum",
}


def _conflict_of_fused(options: RunOptions) -> Conflict | None:
    if options.momentum == 0 and (options.state != "fp32" or options.patterns):
        return Conflict("SGD without momentum keeps no state", ("optimizer", "momentum", "state"))
    if options.master != "none" and options.parameters == "fp32":
        return Conflict("float32 parameters are their own master weights", ("precision", "master"))
    if options.master in ("split", "split8") and options.parameters == "fp16":
        return Conflict("only a bfloat16 parameter is the upper half of a float32 weight", ("precision", "master"))
    return None


def _conflict_of_torch(options: RunOptions) -> Conflict | None:
    if options.parameters == "fp16":
        reason = "torch keeps state in the parameter's dtype, and in float16 small moments become 0"
        return Conflict(reason, ("optimizer", "precision"))
    if options.state != options.parameters:
        reason = f"torch keeps state in the parameter's dtype, {options.parameters} here"
        return Conflict(reason, ("optimizer", "state", "precision"))
    return None


def _conflict_of_bnb(options: RunOptions) -> Conflict | None:
    if find_spec("bitsandbytes") is None:
        return Conflict("bitsandbytes is not installed (pip install bitsandbytes)", ("optimizer",))
    if options.state not in BNB_BITS:
        return Conflict("bitsandbytes keeps fp32 or its own int8 state", ("optimizer", "state"))
    return None


def _values(options: RunOptions) -> dict[str, tuple[Any, ...]]:
    """Other values for every field that the user could change, in the order in which they are proposed."""
    rule = options.optimizer.split("_")[0]
    optimizers = [(f"{rule}_fused", "fused")]
    if rule == "adamw":
        optimizers.append(("adamw_bnb", "bnb"))
    return {
        "optimizer": tuple(pair for pair in optimizers if pair[0] != options.optimizer),
        "state": tuple(word for word in STATE_FORMATS if word != options.state),
        "master": tuple(word for word in MASTERS if word != options.master),
        "kernel": tuple(word for word in (AUTO, *KERNELS) if word != options.kernel),
        "precision": tuple(word for word in PRECISIONS if word != options.precision),
        "patterns": (False,) if options.patterns else (),
        "momentum": (0.9,) if options.momentum == 0 else (),
    }


def _changed(options: RunOptions, values: dict[str, tuple[Any, ...]], names: tuple[str, ...]) -> Iterator[RunOptions]:
    """The combination with every set of other values in the given fields."""
    for chosen in product(*(values[name] for name in names)):
        changes = dict(zip(names, chosen, strict=True))
        if "optimizer" in changes:
            changes["optimizer"], changes["family"] = changes["optimizer"]
        yield replace(options, **changes)


def as_typed(value: Any) -> str:
    """A value of ``RunOptions`` as it is typed; True and False stand for a table of patterns and none."""
    if value is False:
        return "null"
    return "{…}" if value is True else str(value)
