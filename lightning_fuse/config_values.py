"""Types and ranges of every value in a composed configuration, checked before anything is built.

A value that goes to a constructor (everything beside a ``_target_``) has the type that the constructor's signature
says, with the range that ``Annotated[int, Field(ge=1)]`` adds there; ``RANGES`` adds those of keys that have none.
pydantic decides, strictly: no text for a number, no true or false for one, no fraction for a whole number.
"""

from __future__ import annotations

import inspect
import json
import math
import types
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from lightning_fuse.registry import unknown_name

MOST = 2**53  # a whole number that every counter, float64 included, holds
Count = Annotated[int, Field(ge=1, le=MOST)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Batches = Annotated[int, Field(ge=0, le=MOST)] | Annotated[float, Field(ge=0, le=1)] | None

# Keys that have no constructor, or whose constructor says less than is possible here.
RANGES: dict[str, Any] = {
    "seed": Annotated[int, Field(ge=0, le=2**32 - 1)],
    "ledger": bool,
    "keep_last": Count,
    "keep_best": Count,
    "resume": Text | None,
    "run_folder": Text,
    "restore.override": list[str],
    "restore.mode": Literal["full", "weights_only"],
    "restore.formats": Literal["refuse", "convert"],
    **dict.fromkeys(("recipe.name", "recipe.monitor", "optimizer.name"), Text),
    **dict.fromkeys(("recipe.max_steps", "recipe.val_every"), Count),
    "recipe.mode": Literal["min", "max"],
    "recipe.target": Number,
    "state.patterns": dict[str, str] | None,
    "optimizer.lr": NotNegative,
    "optimizer.betas": list[Decay],
    **dict.fromkeys(("optimizer.eps", "optimizer.weight_decay", "optimizer.momentum"), NotNegative),
    **dict.fromkeys(("trainer.max_steps", "trainer.accumulate_grad_batches", "trainer.log_every_n_steps"), Count),
    "trainer.max_epochs": Literal[-1] | Count | None,
    "trainer.val_check_interval": Count | Annotated[float, Field(gt=0, le=1)] | None,
    "trainer.check_val_every_n_epoch": Count | None,
    "trainer.num_sanity_val_steps": Annotated[int, Field(ge=-1, le=MOST)],
    "trainer.gradient_clip_val": NotNegative | None,
    "trainer.devices": Literal["auto", -1]
    | Annotated[int, Field(ge=1, le=4096)]
    | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    | Annotated[str, Field(pattern=r"^\d+(,\d+)*,?$")],
    "trainer.num_nodes": Count,
    **dict.fromkeys([f"trainer.limit_{part}_batches" for part in ("train", "val", "test", "predict")], Batches),
    "callbacks.target.target": Number,
    "callbacks.target.targets": list[Number] | None,
    "callbacks.target.mode": Literal["min", "max"],
    **dict.fromkeys(("callbacks.last.every", "callbacks.memory.every", "callbacks.profile.active"), Count),
    "callbacks.profile.warmup": Annotated[int, Field(ge=0, le=MOST)],
    **dict.fromkeys(("callbacks.fuse.max_updates", "callbacks.fuse.max_consecutive_skips"), Count | None),
    "callbacks.fuse.growth_interval": Count | None,
    **dict.fromkeys(("callbacks.fuse.min_loss_scale", "callbacks.fuse.init_loss_scale"), Positive | None),
}
# Keys that hold a table of settings; the groups of these two, which may be null, hold tables.
TABLES = ("model", "data", "optimizer", "state", "schedule", "trainer", "callbacks", "recipe", "recipe.module")
OF_TABLES = ("callbacks", "logger")

NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "text": "words"}
KINDS = {bool: "true or false", int: "a whole number", str: "text", list: "a list", dict: "a table", type(None): "null"}


def check_values(cfg: DictConfig) -> None:
    """Refuses values of a wrong type or outside of their range, and arguments that a constructor does not have.

    Args:
        cfg: Composed.

    Raises:
        ValueError: With key, value, what is possible, and the closest known word.
    """
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}") from error
    entries = list(_entries(plain, "", None))
    # What the user typed comes before what only follows from it: recipe.val_every before trainer.val_check_interval.
    for key, value, kind in sorted(entries, key=lambda entry: _is_interpolation(cfg, entry[0])):
        _check_value(key, value, kind)


def _entries(table: dict[str, Any], prefix: str, parameters: dict[str, Any] | None) -> Iterator[tuple[str, Any, Any]]:
    """Every (key, value, type) below a table; Any where nothing is known of the type."""
    for name, value in table.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if str(name).startswith("_") and parameters is not None:
            continue  # Hydra's own: _target_, _partial_
        if key in RANGES:
            yield key, value, RANGES[key]
        elif key in TABLES or prefix in OF_TABLES:
            if not isinstance(value, dict) and not (value is None and prefix in OF_TABLES):
                raise ValueError(f"{key}={_shown(value)} is {_kind(value)}; give a table of settings, or leave it out")
            if value is not None:
                yield from _entries(value, key, _parameters(key, value))
        elif isinstance(value, dict):
            yield from _entries(value, key, _parameters(key, value))
        elif parameters is not None and name not in parameters and "**" not in parameters and prefix != "optimizer":
            fault = unknown_name(f"argument of {table['_target_']}", name, parameters)
            raise ValueError(f"{key}={_shown(value)}: {fault}")
        else:
            yield key, value, (parameters or {}).get(name, Any)


def _parameters(key: str, table: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords of a table's ``_target_`` with their types, ``**`` for any more; None where there is no target."""
    if "_target_" not in table:
        return None
    target = table["_target_"]
    try:
        return _signature(_located(str(target)))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        if key == "optimizer":
            return None  # a package that is not there is named with what can be used instead
        raise ValueError(
            f"{key}._target_={_shown(target)} cannot be used: {error}; name a class or function"
        ) from error


def _located(path: str) -> Callable[..., Any]:
    """The class or function of a dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ImportError("it is no dotted path, such as package.module.Class")
    found = getattr(import_module(module), name)
    if not callable(found):
        raise TypeError("it cannot be called")
    return found


@cache
def _signature(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of C code
        return {"**": Any}
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except (NameError, TypeError, AttributeError):  # imported for type checkers alone
        hints = {}
    kinds = {name: p.kind for name, p in parameters.items()}
    found = {name: hints.get(name, Any) for name, kind in kinds.items() if kind not in (kind.VAR_KEYWORD,)}
    return {**found, "**": Any} if any(kind is kind.VAR_KEYWORD for kind in kinds.values()) else found


def _is_interpolation(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and OmegaConf.is_interpolation(node, name)


def _check_value(key: str, value: Any, kind: Any) -> None:
    """Refuses one value."""
    fault = _not_finite(value)
    if not fault and kind is not Any:
        fault = not _fits(value, kind)
    if not fault:
        return
    words = [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
    if words and isinstance(value, str):
        raise ValueError(unknown_name(f"{key}=", value, words).replace("unknown ", "", 1).replace("= ", "=", 1))
    possible = " or ".join(dict.fromkeys(_described(kind))) or "a finite number"
    own = {NAMES.get(type(value), "?"), _kind(value), *(["a number"] if type(value) is int else [])}
    is_of_kind = any(name in possible for name in own)
    raise ValueError(f"{key}={_shown(value)} is {'out of range' if is_of_kind else _kind(value)}; give {possible}")


def _not_finite(value: Any) -> bool:
    if isinstance(value, list):
        return any(_not_finite(inner) for inner in value)
    return isinstance(value, float) and not math.isfinite(value)


def _fits(value: Any, kind: Any) -> bool:
    try:
        adapter = TypeAdapter(kind, config={"arbitrary_types_allowed": True})
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        try:
            adapter = TypeAdapter(kind)
        except Exception:  # a type that pydantic knows nothing of
            return True
    try:
        adapter.validate_json(json.dumps(value), strict=True)  # as JSON, a list may be a tuple and text a path
    except ValidationError as error:
        # An instance of a class cannot come from a configuration, so such a type says nothing about this value.
        return all(fault["type"] in ("is_instance_of", "needs_python_object") for fault in error.errors())
    return True


def _described(kind: Any) -> Iterator[str]:
    """What a type allows, in words; a class of objects, which no word can name, is left out."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in NAMES:
        yield NAMES[kind]
    elif origin is Annotated:
        base = " or ".join(_described(inner[0]))
        yield f"{base}{_range(inner[1:])}" if base else ""
    elif origin is Literal:
        yield from (str(word) for word in inner)
    elif origin in (Union, types.UnionType):
        # The most special first, null last.
        for part in sorted(inner, key=lambda part: part is type(None)):
            yield from _described(part)
    elif origin is tuple and Ellipsis not in inner:
        yield f"a list of {len(inner)}, {' and '.join(' or '.join(_described(part)) for part in inner)}"
    elif origin is not None and issubclass(origin, dict):
        yield "a table {name: value}"
    elif origin is not None and inner:
        each = " or ".join(_described(inner[0]))
        base = next((name for name in PLURALS if each.startswith(name)), "")
        yield f"a list of {PLURALS.get(base, 'values:')}{each.removeprefix(base)}"


def _range(metadata: tuple[Any, ...]) -> str:
    limits: dict[str, Any] = {}
    for entry in metadata:
        for limit in getattr(entry, "metadata", [entry]):
            for name in ("ge", "gt", "le", "lt", "min_length", "pattern"):
                if getattr(limit, name, None) is not None:
                    limits[name] = getattr(limit, name)
    if "pattern" in limits:
        return " such as '0,1'" if r"\d" in limits["pattern"] else f" like {limits['pattern']}"
    if "min_length" in limits:
        return " (not empty)"
    low = f" from {limits['ge']:,}" if "ge" in limits else f" above {limits['gt']:,}" if "gt" in limits else ""
    if limits.get("le") == MOST:
        return low
    high = f" to {limits['le']:,}" if "le" in limits else f" below {limits['lt']:,}" if "lt" in limits else ""
    return low + (" and" + high if low and "lt" in limits else high)


def _kind(value: Any) -> str:
    if isinstance(value, float):
        return "a number with a point" if math.isfinite(value) else "not finite"
    return KINDS.get(type(value), "something else")


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return f"{text[:80]}…" if len(text) > 80 else text or "''"
