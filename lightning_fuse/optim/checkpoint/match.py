"""Which of a checkpoint's parameters belong to which here: by name where both sides have names, else by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.optim.checkpoint.options import LoadOptions

NAMES = "param_names"
_NAME, _is_named = attrgetter("name"), methodcaller("__contains__", NAMES)


class Matching(NamedTuple):
    """All parameters of an optimizer, matched.

    Attributes:
        indices: For each parameter its index in the checkpoint, None where the checkpoint does not hold it.
        listed: All of the checkpoint's indices.
        left_out: Names of what only the checkpoint holds.
        names: The checkpoint's names of each group here, where the group has none of its own.
    """

    indices: list[Any]
    listed: set[Any]
    left_out: list[str]
    names: list[list[str] | None]


def match(
    specs: Sequence[ParamSpec], groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], options: LoadOptions
) -> Matching:
    """Finds for every parameter its index in the checkpoint.

    Args:
        specs: The parameters here, in the order of the groups.
        groups: The groups here.
        state_dict: The checkpoint.
        options: What to do with parameters that are on one side only, and new names.

    Returns:
        The matching.

    Raises:
        ValueError: The two do not hold the same parameters, and the options allow no other.
    """
    saved_groups = state_dict["param_groups"]
    indices = _checked_indices(saved_groups, state_dict["state"])
    listed, numbered = set(indices), not all(map(isinstance, indices, repeat(str)))
    saved_names = _saved_names(saved_groups, indices, numbered)
    if saved_names is not None and all(map(_is_named, groups)):
        by_name = dict(zip(saved_names, indices, strict=True))
        if len(by_name) != len(saved_names):
            raise ValueError("checkpoint calls two parameters by one name: it is damaged; load another one")
        here = list(map(_NAME, specs))
        # Names that torch's state-dict functions gave need not be those of the optimizer; its order then is.
        if numbered or options.rename or not by_name.keys().isdisjoint(here):
            if options.rename:
                by_name = _renamed(by_name, here, options)
            left_out = [] if by_name.keys() == set(here) else _check_names(by_name, here, options)
            return Matching(list(map(by_name.get, here)), listed, left_out, [None] * len(groups))
    _check_sizes([len(group["params"]) for group in saved_groups], groups, options)
    return Matching(indices, listed, [], _names_to_take(groups, saved_groups, saved_names))


def outline(value: Any) -> str:
    """What a value that is no state dict looks like, in a few words."""
    return f"the keys {shorten([str(key) for key in value])}" if isinstance(value, Mapping) else type(value).__name__


def shorten(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:5]) or "none"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _checked_indices(saved_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> list[Any]:
    """The indices that the groups list, each once and none of the state's missing."""
    indices: list[Any] = []
    for group in saved_groups:
        indices += group["params"]
    listed, lost, torn = set(indices), [], []
    if len(listed) != len(indices):
        raise ValueError("checkpoint lists a parameter twice in its groups: it is damaged; load another one")
    for index, held in state.items():
        # torch keeps what belongs to no parameter under keys that are no numbers.
        if index not in listed and str(index).isdigit():
            lost.append(repr(index))
        if index in listed and not isinstance(held, Mapping):
            torn.append(repr(index))
    if lost:
        raise ValueError(
            f"checkpoint holds state {shorten(lost)}, which no group lists: it is damaged; load another one"
        )
    if torn:
        raise ValueError(f"checkpoint holds no mapping as state {shorten(torn)}: it is damaged; load another one")
    return indices


def _saved_names(saved_groups: Sequence[Mapping[str, Any]], indices: Sequence[Any], numbered: bool) -> list[str] | None:
    """The checkpoint's names of its parameters, in the order of ``indices``; None where it has none.

    torch.distributed's functions call parameters by name instead of numbering them; ``set_state_dict`` may have put
    them in another order than ``param_names``.
    """
    if not numbered and indices:
        return list(indices)
    names: list[str] = []
    for group in saved_groups:
        if NAMES not in group:
            return None
        names += group[NAMES]
    if len(names) != len(indices):
        raise ValueError(f"checkpoint names {len(names)} parameters and lists {len(indices)}: it is damaged")
    return names


def _names_to_take(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]], saved_names: Sequence[str] | None
) -> list[list[str] | None]:
    """The names that groups without any take over, as torch's do."""
    taken: list[list[str] | None] = []
    for group, saved in zip(groups, saved_groups, strict=True):
        fitting = NAMES in saved and NAMES not in group and len(saved[NAMES]) == len(group["params"])
        taken.append([str(name) for name in saved[NAMES]] if fitting else None)
    if saved_names is not None and all(names is not None for names in taken):
        names = iter(saved_names)
        taken = [[next(names) for _ in group["params"]] for group in groups]
    every = [name for names in taken for name in names or ()]
    every += [name for group in groups for name in group.get(NAMES, ())]
    return taken if len(set(every)) == len(every) else [None] * len(groups)


def _renamed(by_name: Mapping[str, Any], here: Sequence[str], options: LoadOptions) -> dict[str, Any]:
    """The checkpoint's indices by the names that parameters have here."""
    unused = options.unused(list(by_name))
    if unused:
        close = get_close_matches(unused[0].rstrip("*"), list(by_name), n=3, cutoff=0.4) or list(by_name)[:3]
        raise ValueError(
            f"rename: the checkpoint holds no parameter {unused[0]!r}; closest: {', '.join(close)}; "
            "give the names of the checkpoint on the left"
        )
    renamed: dict[str, Any] = {}
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


def _check_names(saved: Mapping[str, Any], here: Sequence[str], options: LoadOptions) -> list[str]:
    """Refuses parameters on one side only, unless the options let them be; returns what is left out."""
    unexpected, missing = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    ways = []
    if unexpected and options.unexpected == "refuse":
        ways.append(f'unexpected="leave_out" to drop {shorten(unexpected)}')
    if missing and options.missing == "refuse":
        ways.append(f'missing="fresh" to start {shorten(missing)} anew')
    if ways:
        ways += ["rename={...} where they have other names"] if unexpected and missing else []
        raise ValueError(
            f"checkpoint and optimizer hold different parameters: only in the checkpoint: {shorten(unexpected)}; "
            f"only in this optimizer: {shorten(missing)}; build the optimizer for the model that was saved, or set "
            f"load_options: {', '.join(ways)}"
        )
    return unexpected


def _check_sizes(saved: list[int], groups: Sequence[Mapping[str, Any]], options: LoadOptions) -> None:
    """Refuses what cannot be matched by order."""
    if options.rename:
        raise ValueError(
            "rename has no effect: the checkpoint or this optimizer has no parameter names; "
            "pass model.named_parameters(), or leave rename out"
        )
    here = [len(group["params"]) for group in groups]
    if saved != here:
        raise ValueError(
            f"checkpoint holds groups of {saved} parameters, this optimizer has {here}: build it with the same "
            "groups, or pass named parameters on both sides so that they are matched by name"
        )
