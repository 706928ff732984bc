"""The table of optimizers is whole: every rule has each of its pieces, and every piece belongs to a row."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import lightning_fuse
from lightning_fuse import optim
from lightning_fuse.kernels.cpu.tables import RULE_IDS
from lightning_fuse.optim.catalog import CATALOG, CatalogEntry, entry_of
from lightning_fuse.optim.checkpoint.export import torch_class
from lightning_fuse.optim.checkpoint.rebuild import CLASSES
from lightning_fuse.rules import RULES

PACKAGE = Path(lightning_fuse.__file__).parent
EVERY_ROW = pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)


def test_every_rule_stands_in_one_row_and_has_a_native_kernel() -> None:
    rows = [rule for entry in CATALOG for rule in entry.rules]
    assert sorted(rows) == sorted(RULES)
    assert set(rows) == set(RULE_IDS)


def test_every_public_class_has_a_row() -> None:
    public = {getattr(optim, name) for name in optim.__all__ if name.startswith("Fused")} - {optim.FusedOptimizer}
    assert {entry.cls for entry in CATALOG} == public
    assert set(CLASSES.values()) == public


@EVERY_ROW
def test_a_row_has_all_of_its_files(entry: CatalogEntry) -> None:
    for path in (f"rules/{entry.name}.py", f"optim/{entry.name}.py", f"conf/optimizer/{entry.word}.yaml"):
        assert (PACKAGE / path).is_file(), path
    assert entry.cls.__name__ in (PACKAGE / f"conf/optimizer/{entry.word}.yaml").read_text()
    assert entry.cls.__name__ in lightning_fuse.__all__


@EVERY_ROW
def test_a_row_names_rules_and_settings_that_its_class_has(entry: CatalogEntry) -> None:
    optimizer = entry.cls([Parameter(torch.ones(2, 2))], lr=0.1)  # type: ignore[call-arg]
    assert {spec.rule.name for spec in optimizer.specs()} <= set(entry.rules)
    assert entry.settings <= set(inspect.signature(entry.cls).parameters)
    assert entry_of(type("Derived", (entry.cls,), {})) is entry
    if entry.torch_twin is not None:
        assert torch_class(optimizer) is entry.torch_twin


def test_a_class_of_another_package_has_no_row() -> None:
    assert entry_of(torch.optim.Adagrad) is None
