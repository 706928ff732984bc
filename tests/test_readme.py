"""What README.md and docs/ show works: their Python examples run as they are, commands and pages exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
PYTHON = {
    f"{page}:{number}": example
    for page in PAGES
    for number, example in enumerate(blocks((ROOT / page).read_text(encoding="utf-8"), "python"))
}


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 5


@pytest.mark.parametrize("name", PYTHON)
def test_an_example_runs_as_it_is(name: str, run_python: Callable, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(PYTHON[name], encoding="utf-8")
    process = run_python(str(example))
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        commands = "".join(blocks(text, "sh"))
        named = set(re.findall(r"^make ([a-z-]+)", commands, flags=re.MULTILINE))
        assert named
        assert named <= targets


def test_the_index_knows_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page for page in DOCS if page != "docs/index.md" and Path(page).name not in index] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
