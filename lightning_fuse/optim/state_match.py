"""Which of a checkpoint's parameters belong to which here: by name where both sides have names, else by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_fuse.optim.load_options import LoadOptions

if TYPE_CHECKING:
    from lightning_fuse.optim.fused import FusedOptimizer


class Incoming(NamedTuple):
    """One parameter of an optimizer beside what a checkpoint holds for it.

    Attributes:
        group: The parameter's group.
        name: Its name here.
        param: The parameter.
        index: Its index in the checkpoint; None where the checkpoint does not hold it.
        state: What the checkpoint holds; empty where it was never stepped.
    """

    group: Mapping[str, Any]
    name: str
    param: Tensor
    index: int | None  # type: ignore[assignment]  # a tuple has a method of that name
    state: Mapping[str, Any]


class Matching(NamedTuple):
    """All parameters of an optimizer, matched.

    Attributes:
        incoming: One entry for each parameter, in the optimizer's order.
        left_out: Names of what only the checkpoint holds.
        by_name: Whether names decided.
    """

    incoming: list[Incoming]
    left_out: list[str]
    by_name: bool


def match(optimizer: FusedOptimizer, state_dict: Mapping[str, Any], options: LoadOptions) -> Matching:
    """Finds for every parameter its index in the checkpoint.

    Args:
        optimizer: The optimizer to load into.
        state_dict: The checkpoint.
        options: What to do with parameters that are on one side only, and new names.

    Returns:
        The matching.

    Raises:
        ValueError: The two do not hold the same parameters, and the options allow no other.
    """
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in saved_groups for index in group["params"]]
    if _twice(indices):
        raise ValueError("checkpoint lists a parameter twice in its groups: it is damaged; load another one")
    # torch keeps what belongs to no parameter under keys that are no numbers.
    listed = set(indices)
    lost = [repr(index) for index in state if index not in listed and str(index).isdigit()]
    if lost:
        raise ValueError(
            f"checkpoint holds state {shorten(lost)}, which no group lists: it is damaged; load another one"
        )
    torn = [repr(index) for index in indices if not isinstance(state.get(index, {}), Mapping)]
    if torn:
        raise ValueError(f"checkpoint holds no mapping as state {shorten(torn)}: it is damaged; load another one")
    members = [(spec.group, spec.name, spec.param) for spec in optimizer.specs()]
    by_name = all("param_names" in group for group in [*saved_groups, *optimizer.param_groups])
    order: list[int | None]
    left_out: list[str] = []
    if by_name:
        saved_names = [name for group in saved_groups for name in group["param_names"]]
        if _twice(saved_names):
            raise ValueError("checkpoint calls two parameters by one name: it is damaged; load another one")
        by_new_name = _renamed(dict(zip(saved_names, indices, strict=True)), [n for _, n, _ in members], options)
        left_out = _check_names(by_new_name, [name for _, name, _ in members], options)
        order = [by_new_name.get(name) for _, name, _ in members]
    else:
        _check_sizes([len(g["params"]) for g in saved_groups], optimizer, options)
        order = list(indices)
    incoming = [
        Incoming(group, name, p, index, {} if index is None else state.get(index, {}))
        for (group, name, p), index in zip(members, order, strict=True)
    ]
    return Matching(incoming, left_out, by_name)


def outline(value: Any) -> str:
    """What a value that is no state dict looks like, in a few words."""
    return f"the keys {shorten([str(key) for key in value])}" if isinstance(value, Mapping) else type(value).__name__


def shorten(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:5]) or "none"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _twice(names: Sequence[Any]) -> bool:
    return len(set(names)) != len(names)


def _renamed(by_name: Mapping[str, int], here: Sequence[str], options: LoadOptions) -> dict[str, int]:
    """The checkpoint's indices by the names that parameters have here."""
    unused = options.unused(list(by_name))
    if unused:
        close = get_close_matches(unused[0].rstrip("*"), list(by_name), n=3, cutoff=0.4) or list(by_name)[:3]
        raise ValueError(
            f"rename: the checkpoint holds no parameter {unused[0]!r}; closest: {', '.join(close)}; "
            "give the names of the checkpoint on the left"
        )
    renamed: dict[str, int] = {}
    for name, index in by_name.items():
        new = options.renamed(name)
        if new in renamed:
            raise ValueError(
                f"rename: two parameters of the checkpoint are called {new!r} then; give each a name of its own"
            )
        if new != name and new not in here:
            close = get_close_matches(new, here, n=3, cutoff=0.4) or list(here)[:3]
            raise ValueError(
                f"rename: {name!r} becomes {new!r}, and no parameter here is called so; closest: {', '.join(close)}"
            )
        renamed[new] = index
    return renamed


def _check_names(saved: Mapping[str, int], here: Sequence[str], options: LoadOptions) -> list[str]:
    """Refuses parameters on one side only, unless the options let them be; returns what is left out."""
    extra, missing = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    if (extra and options.extra == "refuse") or (missing and options.missing == "refuse"):
        ways = [f'extra="leave_out" to drop {shorten(extra)}'] if extra and options.extra == "refuse" else []
        ways += [f'missing="fresh" to start {shorten(missing)} anew'] if missing and options.missing == "refuse" else []
        ways += ["rename={...} where they have other names"] if extra and missing else []
        raise ValueError(
            f"checkpoint and optimizer hold different parameters: only in the checkpoint: {shorten(extra)}; "
            f"only in this optimizer: {shorten(missing)}; build the optimizer for the model that was saved, or set "
            f"load_options: {', '.join(ways)}"
        )
    return extra


def _check_sizes(saved: list[int], optimizer: FusedOptimizer, options: LoadOptions) -> None:
    """Refuses what cannot be matched by order."""
    if options.rename:
        raise ValueError(
            "rename has no effect: the checkpoint or this optimizer has no parameter names; "
            "pass model.named_parameters(), or leave rename out"
        )
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise ValueError(
            f"checkpoint holds groups of {saved} parameters, this optimizer has {here}: build it with the same "
            "groups, or pass named parameters on both sides so that they are matched by name"
        )
