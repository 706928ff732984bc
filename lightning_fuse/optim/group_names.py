"""Names of the parameters of a group, and of one that is added in training without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def name_added_group(
    group: dict[str, Any], known: Mapping[Tensor, str] | None, groups: Sequence[dict[str, Any]]
) -> None:
    """Gives a group's parameters the names by which they are known, where it brings none.

    A parameter that was replaced may hold a name which now belongs to its successor; it makes way.

    Args:
        group: As the user passed it: ``params`` is one parameter or any ordered collection; changed in place.
        known: Names of parameters; None leaves the group unnamed.
        groups: The groups that are there. Their number names a parameter that is not known.
    """
    params = group.get("params")
    if known is None or "param_names" in group or params is None or isinstance(params, (set, frozenset)):
        return  # torch says what is wrong with it, or takes it as it is
    listed: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if all(isinstance(p, Tensor) for p in listed):
        listed = [(known.get(p, f"{len(groups)}.{place}"), p) for place, p in enumerate(listed)]
        _make_way({name for name, _ in listed}, known, groups)
    group["params"] = listed


def _make_way(wanted: set[str], known: Mapping[Tensor, str], groups: Sequence[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        names = group.get("param_names", ())
        if wanted.isdisjoint(names):
            continue
        group["param_names"] = [
            known.get(p, f"{name} (replaced, {index}.{place})") if name in wanted else name
            for place, (name, p) in enumerate(zip(names, group["params"], strict=True))
        ]


def parameter_names(group: Mapping[str, Any], index: int) -> Sequence[str]:
    """Names of a group's parameters, for messages: those it was given, or ``group.position``.

    Args:
        group: A parameter group of any torch optimizer.
        index: The group's place among the groups.

    Returns:
        One name per parameter.
    """
    return group.get("param_names") or [f"{index}.{i}" for i in range(len(group["params"]))]
