"""Every private name of Lightning that the package uses is there, or the test says what breaks without it."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from lightning_fuse.plugins.lightning_compat import PRIVATE_NAMES, Overrides

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
MADE = {
    "trainer": cache(lambda: Trainer(accelerator="cpu", **QUIET)),
    "callbacks.ModelCheckpoint": ModelCheckpoint,
    "callbacks.WeightAveraging": WeightAveraging,
}
# Modules that have not been moved to lightning_compat yet; the list only shrinks.
PENDING = {"stop_signals.py"}


def find(path: str) -> Any:
    """What a path of the table leads to; AttributeError where a part of it is missing."""
    for start, make in MADE.items():
        if path.startswith(f"{start}."):
            found, rest = make(), path.removeprefix(f"{start}.").split(".")
            break
    else:
        module, *rest = path.rsplit(".", 2) if path.split(".")[-2][0].isupper() else path.rsplit(".", 1)
        found = importlib.import_module(f"lightning.pytorch.{module}")
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_a_private_name_is_where_it_was(path: str) -> None:
    try:
        find(path)
    except AttributeError as error:
        pytest.fail(f"lightning {lightning.__version__} has moved {path}, needed for: {PRIVATE_NAMES[path]} ({error})")


def test_a_name_that_is_missing_is_seen() -> None:
    with pytest.raises(AttributeError, match="_should_dream"):
        find("trainer.fit_loop.epoch_loop._should_dream")


def test_no_other_module_touches_a_private_name_of_the_table(repo_root: Path) -> None:
    """Attributes of that name on anything but ``self``, outside the one module."""
    last = {path.rsplit(".", 1)[1] for path in PRIVATE_NAMES} - {"cluster_environment", "_results"}
    faults = []
    for file in sorted((repo_root / "lightning_fuse").rglob("*.py")):
        if file.name in PENDING or file.name == "lightning_compat.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in last:
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not of_self:
                    faults.append(f"{file.relative_to(repo_root)}:{node.lineno}: {node.attr}")
    assert faults == []


def test_overrides_leave_an_object_as_it_was() -> None:
    first, second, overrides = ModelCheckpoint(), ModelCheckpoint(), Overrides()
    overrides.put(first, "on_train_batch_end", lambda *_: "ours")
    assert first.on_train_batch_end() == "ours"
    assert "on_train_batch_end" not in vars(second)
    overrides.undo()
    overrides.undo()
    assert "on_train_batch_end" not in vars(first)
    assert first.on_train_batch_end.__func__ is ModelCheckpoint.on_train_batch_end


def test_overrides_leave_alone_what_somebody_else_has_replaced() -> None:
    callback, overrides = ModelCheckpoint(), Overrides()
    mine = callback.on_train_batch_end = lambda *_: "mine"
    overrides.put(callback, "on_train_batch_end", lambda *_: "ours")
    overrides.undo()
    assert callback.on_train_batch_end is mine
