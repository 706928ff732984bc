"""The house rules that a machine can check: sizes, docstrings, names, and nothing of one person's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE_LINES = 400
FUNCTION_LINES = 60

# A word that says nothing about what is inside.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

# What tools and runs leave in a checkout; git knows from .gitignore, an unpacked archive does not.
LEFT_BEHIND = {
    *(".venv", ".git", "__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *("build", "dist", "runs", "outputs", "multirun", "wandb", "lightning_logs"),
}

# Written so that this file does not match itself.
MACHINE = {
    "a path of one machine": re.compile(r"(?<![\w./<>-])/(?:work|root|home|opt|Users|mnt)/\w"),
    "a package registry's host": re.compile(
        r"pypi\.org|python[h]osted\.org|download\.pytorch\.org|npm[j]s\.(?:org|com)"
    ),
    "a mark of a merge": re.compile(r"^(?:<{7}|>{7}) "),
    "an index address": re.compile(r"--(?:extra-)?index[-]url|--find[-]links"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tracked(root: Path) -> list[Path]:
    """Files of the repository, those not yet added included; in an unpacked archive, every file."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0:
        return sorted(path for line in listing.stdout.splitlines() if (path := root / line).is_file())
    inside = ((path, path.relative_to(root).parts) for path in root.rglob("*") if path.is_file())
    return sorted(path for path, parts in inside if not LEFT_BEHIND & set(parts))


def python_files(root: Path) -> list[Path]:
    return [path for path in tracked(root) if path.suffix == ".py"]


def length_faults(source: str) -> Iterator[str]:
    """Files and functions that are too long; a function is counted without its docstring."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{lines} lines, {FILE_LINES} are the most"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            counted = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            if counted > FUNCTION_LINES:
                yield f"{node.name} has {counted} lines, {FUNCTION_LINES} are the most"


def _docstring_lines(node: Function) -> int:
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def docstring_faults(source: str) -> Iterator[str]:
    """The module and every public class and function of it that say nothing about themselves."""
    module = ast.parse(source)
    if not ast.get_docstring(module) and module.body:
        yield "the module has no docstring"
    for node in module.body:
        public = isinstance(node, (*Function.__args__, ast.ClassDef)) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            yield f"{node.name} has no docstring"


def machine_faults(text: str) -> Iterator[str]:
    """Traces of the machine that a file was written on."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from (f"line {number}: {what}" for what, pattern in MACHINE.items() if pattern.search(line))


def test_files_and_functions_stay_short(repo_root: Path) -> None:
    faults = [
        f"{path.relative_to(repo_root)}: {fault}"
        for path in python_files(repo_root)
        for fault in length_faults(path.read_text(encoding="utf-8"))
    ]
    assert faults == []


def test_public_names_have_docstrings(repo_root: Path) -> None:
    documented = [path for path in python_files(repo_root) if "tests" not in path.relative_to(repo_root).parts]
    faults = [
        f"{path.relative_to(repo_root)}: {fault}"
        for path in documented
        for fault in docstring_faults(path.read_text(encoding="utf-8"))
    ]
    assert faults == []


def test_no_module_has_an_empty_name(repo_root: Path) -> None:
    names = {path: set(path.relative_to(repo_root).with_suffix("").parts) for path in python_files(repo_root)}
    assert [str(path) for path, parts in names.items() if parts & EMPTY_NAMES] == []


def test_nothing_of_one_machine_is_tracked(repo_root: Path) -> None:
    faults = []
    for path in tracked(repo_root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # data
        faults += [f"{path.relative_to(repo_root)}: {fault}" for fault in machine_faults(text)]
    assert faults == []


def test_the_checks_see_what_they_are_for() -> None:
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    assert len(list(length_faults(long_function))) == 1
    documented = 'def f():\n    """Words.\n' + "    more\n" * 80 + '    """\n' + "    x = 1\n" * (FUNCTION_LINES - 1)
    assert list(length_faults(documented)) == []
    assert len(list(length_faults("x = 1\n" * (FILE_LINES + 1)))) == 1
    assert list(docstring_faults('"""A module."""\nclass A:\n    pass\ndef _b(): ...\n')) == ["A has no docstring"]


@pytest.mark.parametrize(
    "text",
    [
        "open('/" + "home/me/text.txt')",
        "see /" + "work/notes",
        "pip --index" + "-url x",
        "<" * 7 + " HEAD",
        "https://py" + "pi.org/simple",
    ],
)
def test_traces_of_a_machine_are_seen(text: str) -> None:
    assert len(list(machine_faults(text))) == 1


def test_ordinary_paths_are_no_traces() -> None:
    assert list(machine_faults("runs/home/x  #!/usr/bin/env bash  path/to/working/x  https://example.org/home/a")) == []
