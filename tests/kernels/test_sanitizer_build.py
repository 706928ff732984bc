"""The sanitized library is built with the flags that decide the bits of the real one, and run by `.ci/run`."""

from __future__ import annotations

import re
from pathlib import Path


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<=\s)-[fW][\w=-]+", text))


def test_it_has_the_flags_of_the_real_library(repo_root: Path) -> None:
    cmake = (repo_root / "CMakeLists.txt").read_text(encoding="utf-8")
    real = flags(re.search(r"set\(LF_FLAGS (.*?)\)", cmake).expand(r" \1"))
    makefile = (repo_root / "Makefile").read_text(encoding="utf-8")
    ours = flags(re.search(r"SANITIZE_FLAGS := ((?:.*\\\n)*.*)", makefile).expand(r" \1"))
    assert "-ffp-contract=off" in real
    assert real <= ours


def test_continuous_integration_runs_it(repo_root: Path) -> None:
    lines = (repo_root / ".ci/run").read_text(encoding="utf-8").splitlines()
    commands = [line.split(" #")[0].strip() for line in lines if line.startswith("make ")]
    assert commands[-2:] == ["make test </dev/null", "make sanitize </dev/null"]
