"""Tensors of a mapped checkpoint file whose memory is given back one by one.

``torch.load(mmap=True)`` maps a file once, and every page that was read counts as memory of the process until the last
tensor of the file is gone: while an optimizer copies its state there would be two of it, and one small tensor that
somebody keeps would hold all of it for the whole run. Here every large tensor gets a mapping of its own, so that
letting go of a tensor gives its pages back, and small ones are copied. The state of an optimizer goes further: its
dicts map a tensor when it is asked for, so that one who looks at all of them never holds more than one.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL = 1 << 16  # bytes; below it a mapping costs more than it saves
MOST = 16_384  # mappings; a system allows a process some 65,000
LOCAL_HEADER = 30  # bytes of a member's own header before its name


def own_mappings(path: Path, contents: dict[str, Any]) -> int:
    """Exchanges the tensors in a checkpoint for equal ones, each with memory of its own.

    Args:
        path: The file that ``torch.load(mmap=True)`` has read.
        contents: What it returned; dicts and lists in it are changed in place.

    Returns:
        How many large ones there are; 0 where tensors do not lie in the file as expected, and are left as they are.
    """
    storages = {storage.data_ptr(): storage.size() for storage in (t.untyped_storage() for t in _tensors(contents))}
    base = _base(storages, _storage_records(path))
    if base is None:
        return 0
    exchange = _Exchange(_File(path), base)
    for optimizer in contents.get("optimizer_states") or ():
        if isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict):
            optimizer["state"] = {key: exchange.lazily(held) for key, held in optimizer["state"].items()}
    exchange.inside(contents)
    return exchange.large


class LazyState(dict[Any, Any]):
    """A dict that maps its large tensors when they are asked for, and keeps none of them."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        return value.mapped() if isinstance(value, _Record) else value

    def __iter__(self) -> Iterator[Any]:  # so that {**state} asks, too
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        """As of a dict, one by one."""
        return (self[key] for key in self)

    def items(self) -> Any:
        """As of a dict, one by one."""
        return ((key, self[key]) for key in self)

    def copy(self) -> dict[Any, Any]:
        """A dict with all tensors mapped."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class _File:
    """An open file, closed when nobody needs it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Record(NamedTuple):
    """Where a tensor lies in a file."""

    file: _File
    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    def mapped(self) -> Tensor:
        """The tensor; private, so that writing to it leaves the file alone."""
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        inside = self.offset - begin
        pages = mmap.mmap(self.file.descriptor, inside + self.nbytes, access=mmap.ACCESS_COPY, offset=begin)
        raw = torch.frombuffer(pages, dtype=torch.uint8, count=self.nbytes, offset=inside)
        return raw.view(self.dtype).as_strided(self.size, self.stride, self.storage_offset)


class _Exchange:
    def __init__(self, file: _File, base: int) -> None:
        self.file, self.base, self.large, self.mappings = file, base, 0, 0

    def lazily(self, held: Any) -> Any:
        """One parameter's state as a dict that maps when it is asked."""
        if not isinstance(held, dict):
            return held
        return LazyState({key: self._of(value, lazy=True) for key, value in held.items()})

    def inside(self, value: Any) -> Any:
        """The same value with other tensors."""
        if _is_mapped(value):
            return self._of(value)
        if isinstance(value, LazyState):
            return value
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.inside(item)
        elif isinstance(value, list):
            value[:] = [self.inside(item) for item in value]
        elif type(value) is tuple:
            return tuple(self.inside(item) for item in value)
        return value

    def _of(self, value: Any, lazy: bool = False) -> Any:
        if not _is_mapped(value):
            return self.inside(value)
        storage = value.untyped_storage()
        if storage.size() < SMALL:
            return value.clone()
        self.large += 1
        self.mappings += not lazy
        if self.mappings > MOST:
            return value
        place = storage.data_ptr() - self.base, storage.size()
        record = _Record(self.file, *place, value.dtype, value.size(), value.stride(), value.storage_offset())
        return record if lazy else record.mapped()


def _base(storages: dict[int, int], records: dict[int, int]) -> int | None:
    """Where in memory the file begins, if the storages are exactly its records.

    Both are sets of places with sizes, and only one shift lays a finite set onto itself: there is nothing to guess.

    Args:
        storages: Address -> bytes of every storage that was read.
        records: Offset in the file -> bytes of every storage that it holds.

    Returns:
        The address of the file's first byte; None where a storage is no record, or a record was not read.
    """
    if not storages or not records:
        return None
    base = min(storages) - min(records)
    moved = {base + offset: nbytes for offset, nbytes in records.items()}
    return base if base % mmap.PAGESIZE == 0 and moved == storages else None


def _storage_records(path: Path) -> dict[int, int]:
    """Where in an archive of torch's the bytes of its storages begin, and how many they are."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            if not member.filename.partition("/")[2].startswith("data/"):
                continue  # the pickle, the version: no tensor lies there
            file.seek(member.header_offset)
            header = file.read(LOCAL_HEADER)
            name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            if member.compress_type == zipfile.ZIP_STORED and member.file_size:
                found[member.header_offset + LOCAL_HEADER + name + extra] = member.file_size
    return found


def _is_mapped(value: Any) -> bool:
    """Whether this is a tensor with plain memory of its own in the file; an empty one has none."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.untyped_storage().size() > 0
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if _is_mapped(value):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
