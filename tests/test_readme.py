"""README.md and docs/ hold together: the targets, pages and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import FENCE, PAGES, ROOT, blocks, text_of

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        commands = "".join(block.text for block in blocks(text_of(page), "sh"))
        named = set(re.findall(r"^make ([a-z-]+)", commands, flags=re.MULTILINE))
        assert named
        assert named <= targets


def test_the_index_knows_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page for page in DOCS if page != "docs/index.md" and Path(page).name not in index] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)\)", FENCE.sub("", text_of(page)))
    assert [link for link in links if not (path.parent / link).exists()] == []
