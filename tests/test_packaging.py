"""What people install: the pinned set against the ranges, the wheel's contents, the two make commands."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What a GPU build of torch brings with it; torch pins these itself.
TORCH_OWN = re.compile(r"nvidia-|cuda-|triton$|pytorch-triton")


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins(repo_root: Path) -> dict[str, str]:
    """Canonical name -> pinned version, for the interpreter that runs the tests."""
    found: dict[str, str] = {}
    for line in (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        assert [part.operator for part in requirement.specifier] == ["=="], f"{line}: one exact version, please"
        if requirement.marker is None or requirement.marker.evaluate():
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{line}: pinned twice"
            found[name] = next(iter(requirement.specifier)).version
    return found


def _direct(project: dict) -> Iterator[Requirement]:
    for line in [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement


def test_every_direct_requirement_is_pinned_inside_its_range(project: dict, pins: dict[str, str]) -> None:
    for requirement in _direct(project):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned, prereleases=True), f"{requirement} against {pinned}"
        assert {part.operator for part in requirement.specifier} & {">=", "=="}, f"{requirement} has no lower end"


def test_pins_are_what_the_extras_reach_and_nothing_else(project: dict, pins: dict[str, str]) -> None:
    reached, missing = _closure(list(_direct(project)))
    if missing:
        pytest.skip(f"the dev extra is not installed completely here: {', '.join(sorted(missing))}")
    assert sorted(name for name in reached - pins.keys() if not TORCH_OWN.match(name)) == []
    assert sorted(pins.keys() - reached) == []


def _closure(todo: list[Requirement]) -> tuple[set[str], set[str]]:
    """Names of all installed packages that these requirements lead to, and of those that are not installed."""
    reached: set[str] = set()
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                wanted = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                missing.add(name)
                break
            reached.add(name)
            nested = [Requirement(line) for line in wanted]
            todo += [item for item in nested if item.marker is None or item.marker.evaluate({"extra": extra})]
    return reached, missing


def test_the_core_needs_only_torch_lightning_and_filelock(project: dict) -> None:
    assert sorted(Requirement(line).name for line in project["dependencies"]) == ["filelock", "lightning", "torch"]


@pytest.fixture
def source_tree(repo_root: Path, tmp_path: Path) -> Path:
    """A copy of what a build reads, so that a test may change it."""
    tree = tmp_path / "source"
    shutil.copytree(repo_root / "lightning_fuse", tree / "lightning_fuse", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        if (repo_root / name).exists():
            shutil.copy(repo_root / name, tree / name)
    return tree


def _build_wheel(tree: Path, **variables: str) -> zipfile.ZipFile:
    """Build as pip does, without the network."""
    pytest.importorskip("scikit_build_core")
    code = "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1]))"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tree.parent)],
        cwd=tree,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return zipfile.ZipFile(tree.parent / process.stdout.splitlines()[-1])


def _files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}


def test_the_wheel_holds_the_package_and_no_more(source_tree: Path, repo_root: Path) -> None:
    import lightning_fuse

    with _build_wheel(source_tree, SKBUILD_WHEEL_CMAKE="false") as wheel:
        files = _files(wheel)
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        text = wheel.read(metadata).decode()
        licenses = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    modules = {path.relative_to(repo_root).as_posix() for path in (repo_root / "lightning_fuse").rglob("*.py")}
    conf = {path.relative_to(repo_root).as_posix() for path in (repo_root / "lightning_fuse").rglob("*.yaml")}
    assert len(conf) > 40
    page = {f"lightning_fuse/reports/template/page.{kind}" for kind in ("html", "css", "js")}
    assert files == modules | conf | page | {"lightning_fuse/py.typed"}
    assert f"\nVersion: {lightning_fuse.__version__}\n" in text
    assert "\nRequires-Python: <3.14,>=3.10\n" in text
    assert licenses


# pip fetches cmake for a real build; these two do not.
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on the path")


@needs_cmake
def test_without_a_compiler_the_python_part_installs_alone(source_tree: Path) -> None:
    with _build_wheel(source_tree, CC="/nonexistent/cc", CXX="/nonexistent/c++") as wheel:
        assert wheel.filename.endswith("-py3-none-any.whl")
        assert "lightning_fuse/__init__.py" in wheel.namelist()
        assert not [name for name in wheel.namelist() if name.endswith(".so")]


@needs_cmake
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_with_a_compiler_the_native_library_is_inside(source_tree: Path) -> None:
    with _build_wheel(source_tree) as wheel:
        assert "-py3-none-" in wheel.filename
        assert not wheel.filename.endswith("-any.whl")
        assert "lightning_fuse/kernels/cpu/lightning_fuse_cpu.so" in wheel.namelist()


@pytest.fixture
def dry_make(repo_root: Path, tmp_path: Path) -> Callable[..., str]:
    """What a make command would do, with an environment folder of the test's own."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")

    def run(*arguments: str) -> str:
        command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", *arguments]
        # A test run that was itself started by make must not hand its flags on.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            command, cwd=repo_root, env=environment, capture_output=True, text=True, check=True
        ).stdout

    return run


def test_make_sets_up_a_bare_machine(dry_make: Callable[..., str]) -> None:
    train = dry_make("train", "PYTHON=python3.12", "ARGS=model=small")
    assert "python3.12 -m venv" in train
    assert "-c constraints.txt -e '.[train]'" in train
    assert "train.py optimizer=adamw_fused state=int8 model=small" in train
    test = dry_make("test")
    for step in ("-e '.[dev]'", "ruff check .", "ruff format --check .", "-m mypy", "-m pytest"):
        assert step in test


def test_make_installs_again_only_when_its_inputs_change(dry_make: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / ".installed-dev").touch()
    (folder / ".installed-train").touch()
    assert "pip install" not in dry_make("train")
    assert "pip install" not in dry_make("test")
    os.utime(folder / ".installed-dev", (0, 0))
    assert "pip install" in dry_make("test")
    assert " -m venv" not in dry_make("test")


def test_continuous_integration_runs_make_test(repo_root: Path) -> None:
    script = repo_root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make test" in text
