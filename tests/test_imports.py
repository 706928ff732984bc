"""The import direction: a floor imports only floors below it, and outside packages only where they belong.

The checker is plain functions over source text, so that the controls below can show it a tree with planted faults.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "lightning_fuse"

# From the ground up; the same table in words is in CONTRIBUTING.md. Two names on one floor: the later one may use the
# earlier one (Fuse installs the precision plugin, run reads config), never the other way round.
FLOORS = (
    ("registry",),
    ("rules",),
    ("formats",),
    ("kernels",),
    ("optim",),
    ("distributed",),
    ("step",),
    ("records",),
    ("plugins", "callbacks"),
    ("recipes",),
    ("combinations", "config_values", "config", "run_place", "trusted_targets", "resume", "run"),
    ("reports", "ledger"),
    ("cli",),
)
HEIGHT = {name: height for height, name in enumerate(name for floor in FLOORS for name in floor)}

# Runs are read where nothing is installed, so these two see less than everything below them.
ONLY_ABOVE = {"records": {"registry"}, "reports": {"registry", "records"}}

# Packages beside the standard library; a floor that is missing here may use what its extras name.
OUTSIDE = {
    "registry": set(),
    "rules": {"torch"},
    "formats": {"torch"},
    "kernels": {"torch", "triton"},
    "optim": {"torch", "bitsandbytes"},
    "distributed": {"torch"},
    "step": {"torch"},
    "records": {"filelock"},
    "plugins": {"torch", "lightning", "wandb"},
    "callbacks": {"torch", "lightning", "matplotlib", "numpy", "rich", "torchdata", "torchmetrics"},
    "recipes": {"torch", "lightning", "pydantic", "sklearn", "torchdata", "torchmetrics"},
    "ledger": {"torch", "rich"},
    "reports": {"altair", "jinja2", "numpy", "pandas", "rich", "vl_convert", "wandb"},
}
ONLY_IN = {"triton": "kernels/gpu", "ctypes": "kernels/cpu"}


class Import(NamedTuple):
    """One imported module: where it is written and its absolute dotted name."""

    line: int
    module: str


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in a file, those inside functions and `import_module("…")` included.

    `from lightning_fuse import optim` is reported as `lightning_fuse.optim`, and so is any other name taken from the
    package's root: a name that is no floor is reported by the rules below.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            if base == PACKAGE:
                yield from (Import(node.lineno, f"{PACKAGE}.{alias.name}") for alias in node.names)
            else:
                yield Import(node.lineno, base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def faults_of(package: Path) -> list[str]:
    """What breaks the table under a package folder, one line each: `file:line: what and why`."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        parts = inside.with_suffix("").parts
        if parts == ("__init__",):
            continue  # the root hands out names lazily; test_importing_the_package_loads_nothing holds it
        if parts[0] not in HEIGHT:
            faults.append(f"{inside}: {parts[0]!r} has no floor; add it to FLOORS and to CONTRIBUTING.md")
            continue
        is_package = parts[-1] == "__init__"
        module = ".".join([PACKAGE, *(parts[:-1] if is_package else parts)])
        for found in imports_of(path.read_text(encoding="utf-8"), module, is_package):
            why = _inside_fault(parts[0], found.module) or _outside_fault(parts[0], inside, found.module)
            if why:
                faults.append(f"{inside}:{found.line}: {why}")
    return faults


def _inside_fault(floor: str, target: str) -> str | None:
    root, _, rest = target.partition(".")
    if root != PACKAGE or rest == "__version__":
        return None
    other = rest.split(".")[0]
    if other not in HEIGHT:
        return f"imports {target}, which is no floor; import a public name from the module that defines it"
    if other == floor:
        return None
    if HEIGHT[other] > HEIGHT[floor]:
        return f"{floor} imports {target}, which is on a higher floor"
    if floor in ONLY_ABOVE and other not in ONLY_ABOVE[floor]:
        return f"{floor} imports {target}; it may use only {', '.join(sorted(ONLY_ABOVE[floor]))}"
    return None


def _outside_fault(floor: str, inside: Path, target: str) -> str | None:
    root = target.split(".")[0]
    if root == PACKAGE:
        return None
    if root in ONLY_IN and not inside.as_posix().startswith(ONLY_IN[root] + "/"):
        return f"imports {root}, which belongs in {ONLY_IN[root]}/ alone"
    if root in sys.stdlib_module_names or floor not in OUTSIDE or root in OUTSIDE[floor]:
        return None
    allowed = ", ".join(sorted(OUTSIDE[floor])) or "nothing but the standard library"
    return f"{floor} imports {root}; it may use {allowed}"


def test_every_import_points_down(repo_root: Path) -> None:
    assert faults_of(repo_root / PACKAGE) == []


PLANTED = [
    ("rules/adamw.py", "import lightning_fuse.formats", "higher floor"),
    ("formats/int8.py", "from lightning_fuse import kernels", "higher floor"),
    ("optim/adamw.py", "from ..step import contract", "higher floor"),
    ("optim/__init__.py", "from ..callbacks import Fuse", "higher floor"),
    ("optim/adamw.py", "from lightning_fuse import Fuse", "no floor"),
    ("optim/adamw.py", "def f():\n    from lightning_fuse.run import train", "higher floor"),
    ("kernels/dispatch.py", "import importlib\nimportlib.import_module('lightning_fuse.optim')", "higher floor"),
    ("plugins/precision.py", "from lightning_fuse.callbacks.fuse import Fuse", "higher floor"),
    ("step/contract.py", "from lightning.pytorch import Trainer", "step imports lightning"),
    ("step/contract.py", "import lightning", "step imports lightning"),
    ("records/manifest.py", "import torch", "records imports torch"),
    ("records/manifest.py", "from lightning_fuse.step import outcome", "may use only registry"),
    ("reports/page.py", "import torch", "reports imports torch"),
    ("reports/page.py", "from lightning_fuse.step import outcome", "may use only records, registry"),
    ("kernels/dispatch.py", "import triton.language as tl", "kernels/gpu/ alone"),
    ("kernels/gpu/adamw.py", "import ctypes", "kernels/cpu/ alone"),
    ("callbacks/fuse.py", "from omegaconf import OmegaConf", "callbacks imports omegaconf"),
    ("helpers.py", "import math", "has no floor"),
]


@pytest.mark.parametrize(("file", "source", "expected"), PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    _plant(tmp_path, file, source)
    faults = faults_of(tmp_path)
    assert len(faults) == 1
    assert file in faults[0]
    assert expected in faults[0]


SOUND = [
    ("registry.py", "from collections.abc import Mapping"),
    ("rules/adamw.py", "import torch\nfrom lightning_fuse.registry import Registry\nfrom .rule import UpdateRule"),
    ("rules/__init__.py", "from . import adamw\nfrom .adamw import AdamW"),
    ("kernels/gpu/adamw.py", "import triton\nfrom ...formats import int8"),
    ("kernels/cpu/native.py", "import ctypes"),
    ("step/contract.py", "import torch\nfrom lightning_fuse.optim import FusedAdamW"),
    ("records/manifest.py", "import json\nfrom lightning_fuse import __version__"),
    ("callbacks/fuse.py", "from lightning_fuse.plugins import FusePrecision\nimport lightning.pytorch as pl"),
    ("run.py", "import hydra\nfrom lightning_fuse import config"),
]


@pytest.mark.parametrize(("file", "source"), SOUND)
def test_a_sound_import_is_let_through(tmp_path: Path, file: str, source: str) -> None:
    _plant(tmp_path, file, source)
    assert faults_of(tmp_path) == []


def _plant(package: Path, file: str, source: str) -> None:
    path = package / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


# An audit hook sees what a look at sys.modules cannot: a process started (a compiler), a library opened.
WATCH = """
import sys
events = []
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.dlopen"):
        events.append(event)
sys.addaudithook(watch)
"""


def test_importing_the_package_loads_nothing(run_python: Callable) -> None:
    code = WATCH + textwrap.dedent("""
        import lightning_fuse
        heavy = {"torch", "lightning", "pytorch_lightning", "triton", "hydra", "omegaconf", "ctypes"}
        print(sorted(heavy & {name.split(".")[0] for name in sys.modules}), events)
        print([name for name in sys.modules if name.startswith("lightning_fuse.")])
        print(lightning_fuse.__version__, "FusedAdamW" in dir(lightning_fuse))
    """)
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr
    loaded, floors, version = process.stdout.splitlines()
    assert loaded == "[] []"
    assert floors == "[]"
    assert version.endswith("True")


def test_an_optimizer_needs_neither_lightning_nor_a_compiler(run_python: Callable) -> None:
    code = (
        "import torch\n"
        + WATCH
        + textwrap.dedent("""
        before = {name.split(".")[0] for name in sys.modules}
        from lightning_fuse import FusedAdam, FusedAdamW, FusedSGD, param_groups
        new = {name.split(".")[0] for name in sys.modules} - before
        print(sorted({"lightning", "pytorch_lightning", "triton", "hydra", "omegaconf", "bitsandbytes"} & new), events)
    """)
    )
    process = run_python("-c", code)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[] []"


def test_fuse_is_found_at_the_root() -> None:
    import lightning_fuse
    from lightning_fuse.callbacks import Fuse

    assert lightning_fuse.Fuse is Fuse


def test_an_unknown_public_name_lists_the_known_ones() -> None:
    import lightning_fuse

    with pytest.raises(AttributeError, match=r"no attribute 'FusedNothing'; public names: .*FusedAdamW"):
        lightning_fuse.FusedNothing  # noqa: B018


def test_no_module_imports_itself_by_way_of_others(repo_root: Path) -> None:
    """A circle makes two modules one; an import for type checkers alone counts, too."""
    assert circles(repo_root / "lightning_fuse") == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "lightning_fuse"
    package.mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / f"{name}.py").write_text(f"def late():\n    from lightning_fuse import {other}\n", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    assert circles(package) == [["lightning_fuse.a", "lightning_fuse.b", "lightning_fuse.c"]]


def circles(package: Path) -> list[list[str]]:
    """Groups of modules that reach each other by imports, wherever in a file those stand."""
    files = {_module_name(path, package): path for path in package.rglob("*.py")}
    targets = {name: _targets(path, files) - {name} for name, path in files.items()}
    reached = {name: _reach(name, targets) for name in targets}
    groups = {tuple(sorted({name, *(o for o in reached[name] if name in reached[o])})) for name in targets}
    return sorted(list(group) for group in groups if len(group) > 1)


def _module_name(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _targets(path: Path, files: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in files else node.module for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & files.keys()


def _reach(name: str, targets: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(targets[name])
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += targets[one]
    return reached
