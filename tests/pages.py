"""What the documentation shows: fenced blocks and the commands in them, for the tests that run them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(?P<language>[a-z]+)\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python (?:train\.py|scripts/)|lightning-fuse train )[^`…]*)`")
LABEL = re.compile(r"# (?P<path>[\w./-]+/[\w.-]+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: The word behind the fence.
        text: What is inside.
        label: The path in a first line ``# folder/file``, or None.
    """

    language: str
    text: str

    @property
    def label(self) -> str | None:
        found = LABEL.match(self.text)
        return None if found is None else found["path"]


@dataclass(frozen=True)
class Command:
    """One command line of a page.

    Attributes:
        page: Where it stands.
        words: As a shell would split it, without the comment.
    """

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[Block]:
    """The fenced blocks of the given languages, in order."""
    found = [Block(match["language"], match["text"]) for match in FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def commands(page: str) -> list[Command]:
    """Every command line in a page's sh blocks, and those of ours that stand inside a sentence."""
    text = text_of(page)
    lines = [line for block in blocks(text, "sh") for line in block.text.splitlines()]
    found = [Command(page, tuple(words)) for line in [*lines, *INLINE.findall(text)] if (words := _split(line))]
    return list(dict.fromkeys(found))


def _split(line: str) -> list[str]:
    return shlex.split(line, comments=True)
