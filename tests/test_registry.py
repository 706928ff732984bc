"""F0: named tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import KERNELS
from lightning_fuse.registry import Registry, unknown_name
from lightning_fuse.rules import RULES


@dataclass(frozen=True)
class Entry:
    name: str


@pytest.fixture
def pets() -> Registry[Entry]:
    return Registry("pet", [Entry("dog"), Entry("cat")])


def test_it_is_a_mapping_in_the_order_of_its_entries(pets: Registry[Entry]) -> None:
    assert list(pets) == ["dog", "cat"]
    assert len(pets) == 2
    assert pets["cat"] == Entry("cat")
    assert dict(pets) == {"dog": Entry("dog"), "cat": Entry("cat")}


def test_a_double_name_is_refused() -> None:
    with pytest.raises(ValueError, match="pet 'dog' is registered twice; give one of them another name"):
        Registry("pet", [Entry("dog"), Entry("dog")])


def test_an_unknown_name_is_answered_with_the_known_ones(pets: Registry[Entry]) -> None:
    with pytest.raises(ValueError, match=r"^unknown pet 'cot'; known: cat, dog; did you mean 'cat'\?$"):
        pets["cot"]
    with pytest.raises(ValueError, match=r"^unknown pet 'zebra'; known: cat, dog$"):
        pets["zebra"]


@pytest.mark.parametrize("key", [None, 3, ["dog"], {"a": 1}])
def test_a_key_of_another_kind_is_unknown_too(pets: Registry[Entry], key: object) -> None:
    with pytest.raises(ValueError, match="unknown pet"):
        pets[key]


def test_contains_does_not_raise(pets: Registry[Entry]) -> None:
    assert "dog" in pets
    assert "cot" not in pets


def test_the_error_text_is_usable_without_a_registry() -> None:
    assert unknown_name("kernel", "nativ", ["auto", "native"]) == (
        "unknown kernel 'nativ'; known: auto, native; did you mean 'native'?"
    )


@pytest.mark.parametrize("table", [RULES, STATE_FORMATS, MASTERS, KERNELS], ids=lambda table: table.kind)
def test_every_table_finds_its_entries_by_their_own_names(table: Registry) -> None:
    assert len(table) > 0
    for name, entry in table.items():
        assert entry.name == name
        assert name == name.lower()


def test_the_words_that_users_type_are_these() -> None:
    assert set(STATE_FORMATS) == {"fp32", "bf16", "int8", "int8_bf16"}
    assert set(MASTERS) == {"none", "fp32", "split", "split8"}
    assert "reference" in KERNELS


def test_an_entry_from_outside_is_added_once(pets: Registry[Entry]) -> None:
    assert pets.register(Entry("newt")) == Entry("newt")
    assert list(pets) == ["dog", "cat", "newt"]
    with pytest.raises(ValueError, match="pet 'cat' is registered twice"):
        pets.register(Entry("cat"))
    assert len(pets) == 3
