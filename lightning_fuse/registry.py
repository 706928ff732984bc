"""Named tables: what the user can ask for by a word, without doubles and with errors that list what is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Protocol, TypeVar


class Named(Protocol):
    """Anything that carries the word it is found by."""

    @property
    def name(self) -> str:
        """The word the user types."""
        ...


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T]):
    """A mapping from name to entry; entries are added, never replaced or removed.

    Args:
        kind: What the entries are, as it reads in an error ("state format").
        entries: The entries; each is found by its ``name``.

    Raises:
        ValueError: Two entries have one name, or (on lookup) the name is unknown.
    """

    def __init__(self, kind: str, entries: Iterable[T]) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        for entry in entries:
            self.register(entry)

    def register(self, entry: T) -> T:
        """Adds an entry, from outside of this package, too.

        Args:
            entry: Found by its ``name`` from now on.

        Returns:
            The entry.

        Raises:
            ValueError: There is one of that name.
        """
        if entry.name in self._entries:
            raise ValueError(f"{self.kind} {entry.name!r} is registered twice; give one of them another name")
        self._entries[entry.name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise ValueError(unknown_name(self.kind, name, self._entries)) from None

    def __contains__(self, name: object) -> bool:
        # Mapping's own __contains__ waits for a KeyError, and ours raises ValueError.
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Words the error for a name that no table holds: what was given, what is possible, what comes close.

    Args:
        kind: What was looked for ("state format").
        name: What the user gave.
        known: The names that exist.

    Returns:
        One line of text.
    """
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}; known: {', '.join(names)}{hint}"
