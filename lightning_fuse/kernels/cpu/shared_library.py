"""Finds and loads the compiled library, and says which of its CPU levels runs.

The levels are the objects of one source: ``baseline`` (any CPU of this architecture), ``x86-64-v3`` (AVX2) and
``x86-64-v4`` (AVX-512). They give the same bits. The highest that this CPU has is used, unless the environment variable
``LIGHTNING_FUSE_CPU_LEVEL`` or ``set_level`` names another. ``LIGHTNING_FUSE_CPU_LIBRARY`` names another library file,
for instance one with sanitizers.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_fuse.registry import unknown_name

ABI = 6  # kAbi in src/tables.h
FILE_NAME = "lightning_fuse_cpu.so"
FILE_VARIABLE = "LIGHTNING_FUSE_CPU_LIBRARY"
LEVEL_VARIABLE = "LIGHTNING_FUSE_CPU_LEVEL"


class Library:
    """A loaded library.

    Args:
        path: Its file.

    Attributes:
        path: Its file.
        levels: Every level that was built, lowest first.
        runnable: Those that this CPU can run.
        level: The one that runs.
        openmp: Whether it was built with OpenMP; without, it runs one thread.

    Raises:
        OSError: The file is no library for this machine.
        ValueError: The environment asks for a level that cannot run here.
        RuntimeError: The library belongs to another version of this package.
    """

    def __init__(self, path: Path) -> None:
        import ctypes  # here, so that importing the package loads nothing

        self.path = path
        functions: Any = ctypes.CDLL(str(path))
        functions.lightning_fuse_abi.restype = ctypes.c_int64
        if functions.lightning_fuse_abi() != ABI:
            raise RuntimeError(
                f"{path} has interface version {functions.lightning_fuse_abi()}, this package needs {ABI}: "
                "install lightning_fuse again"
            )
        functions.lightning_fuse_level_name.restype = ctypes.c_char_p
        count = functions.lightning_fuse_levels()
        self.levels = tuple(functions.lightning_fuse_level_name(index).decode() for index in range(count))
        self.runnable = tuple(
            name for index, name in enumerate(self.levels) if functions.lightning_fuse_level_runs_here(index)
        )
        self.openmp = bool(functions.lightning_fuse_has_openmp())
        self._step = functions.lightning_fuse_step
        self._step.argtypes = (ctypes.c_int, *3 * (ctypes.c_void_p,), ctypes.c_int)
        self._sum = functions.lightning_fuse_sum_of_squares
        self._sum.argtypes = (ctypes.c_int, *2 * (ctypes.c_void_p,), ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        self._sum.restype = ctypes.c_double
        self._prefer_huge_pages = functions.lightning_fuse_prefer_huge_pages
        self._prefer_huge_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._prefer_huge_pages.restype = None
        self.set_level(os.environ.get(LEVEL_VARIABLE) or self.runnable[-1])

    def set_level(self, name: str) -> None:
        """Chooses the level that runs from now on.

        Args:
            name: One of ``runnable``.

        Raises:
            ValueError: It is unknown, or this CPU cannot run it.
        """
        if name not in self.levels:
            raise ValueError(unknown_name("CPU level", name, self.levels))
        if name not in self.runnable:
            raise ValueError(f"CPU level {name!r} does not run on this CPU; possible: {', '.join(self.runnable)}")
        self.level = name
        self._index = self.levels.index(name)

    def step(self, plan: int, factor: int | None, found_inf: int | None, threads: int) -> bool:
        """Steps all slots of a plan.

        Args:
            plan: Address of a ``Plan`` (src/tables.h).
            factor: Address of a float32, or None for 1.
            found_inf: Address of a float32, or None for 0.
            threads: How many threads may work.

        Returns:
            Whether anything was changed.
        """
        return bool(self._step(self._index, plan, factor, found_inf, threads))

    def sum_of_squares(self, grads: int, chunks: int, count: int, partial: int, threads: int) -> float:
        """The sum of all squares.

        Args:
            grads: Address of ``Gradient`` rows.
            chunks: Address of ``Chunk`` rows.
            count: How many chunks.
            partial: Address of room for ``count`` float64 numbers.
            threads: How many threads may work.

        Returns:
            The sum, the same at any number of threads and any level.
        """
        return float(self._sum(self._index, grads, chunks, count, partial, threads))

    def prefer_huge_pages(self, address: int, nbytes: int) -> None:
        """Asks the system for huge pages under memory that has not been written yet."""
        self._prefer_huge_pages(address, nbytes)


@lru_cache(maxsize=1)
def load() -> Library | str:
    """The library, or why there is none, as it reads after "because". Looked for once.

    Raises:
        ValueError: The environment asks for a level that cannot run here.
    """
    path = next((path for path in candidates() if path.is_file()), None)
    if path is None:
        return "its library was not built: install lightning_fuse where a C++ compiler is found"
    try:
        return Library(path)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"its library cannot be used: {error}"


def candidates() -> Iterator[Path]:
    """Where the library may lie: where the environment says, beside this file, or where pip installs."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        yield Path(named)
        return
    package = import_module("lightning_fuse.kernels.cpu")
    # An editable install keeps the sources in one folder and the library in another.
    folders = [*package.__path__]
    for key in ("platlib", "purelib"):
        folders.append(os.path.join(sysconfig.get_path(key), "lightning_fuse", "kernels", "cpu"))
    yield from (Path(folder) / FILE_NAME for folder in dict.fromkeys(folders))
