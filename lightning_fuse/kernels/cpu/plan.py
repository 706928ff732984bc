"""Pointer and chunk tables of one set of parameters, built once and built again when, and only when, something changed.

What counts is everything that a table was written from: which slots and in which groups, and of every tensor where it
lies (address, shape, strides, dtype). An address alone would not do: memory is used again, and ``p.data = other``
leaves the parameter the same object. Gradients come and go, so only their addresses are written anew at every step.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.blocks import row_length
from lightning_fuse.kernels.batch import UpdateBatch
from lightning_fuse.kernels.cpu.tables import (
    DTYPE_IDS,
    GRADIENT_COLUMNS,
    GROUP_COLUMNS,
    SCALARS_BYTES,
    TASK_COLUMNS,
    WAVE_COLUMNS,
    Layouts,
    check_state,
    cut,
    group_row,
    slot_row,
    tasks_of,
)
from lightning_fuse.kernels.kernel import ParamState, check_fits
from lightning_fuse.rules.rule import LayerwiseRule

THREAD_GRAIN = 1 << 14  # elements below which another thread costs more than it brings

_addresses, _count, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous
_DTYPE = attrgetter("dtype")


class Plan:
    """The tables of one set of parameters.

    Args:
        batch: The parameters with their state, gradients and hyperparameters.

    Attributes:
        params: The parameters, in order.

    Raises:
        RuntimeError: A tensor of the state is not what its format says, or a gradient has not its parameter's shape.
    """

    def __init__(self, batch: UpdateBatch) -> None:
        for state, grad in zip(batch.states, batch.grads, strict=True):
            check_state(state)
            check_fits(state.spec, grad)
        self.states = batch.states
        self.params = [state.spec.local for state in self.states]
        self._state = list(chain.from_iterable(map(_state_tensors, self.states)))
        self._group_numbers, self._group_count = batch.groups, len(batch.hypers)
        self._signature = batch.signature
        self._state_seen = list(map(_addresses, self._state))
        self._write(batch)

    def fits(self, batch: UpdateBatch) -> bool:
        """Whether the tables still say the truth about these updates; gradients may have moved."""
        return (
            (batch.states is self.states or _same(batch.states, self.states))
            and (batch.groups is self._group_numbers or batch.groups == self._group_numbers)
            and len(batch.hypers) == self._group_count
            and (batch.signature is self._signature or self._signature.matches([*self.params, *batch.grads]))
            and list(map(_addresses, self.params)) == self._params_at
            and list(map(_addresses, self._state)) == self._state_seen
        )

    def refresh(self, batch: UpdateBatch) -> int:
        """Writes what changes from step to step: where gradients lie, and hyperparameters.

        Args:
            batch: Updates that the plan fits.

        Returns:
            Address of the ``Plan`` that C++ reads.
        """
        self._grads[0::GRADIENT_COLUMNS] = array("q", map(_addresses, batch.grads))
        self._groups[:] = array("d", chain.from_iterable(map(group_row, batch.hypers)))
        return self._address

    def threads(self, allowed: int) -> int:
        """How many threads are worth starting."""
        return max(1, min(allowed, self._cost // THREAD_GRAIN))

    def _write(self, batch: UpdateBatch) -> None:
        grads = batch.grads
        self._params_at = list(map(_addresses, self.params))
        layouts = Layouts()
        of_params = [layouts.add(p) for p in self.params]
        of_grads = [layouts.add(g) for g in grads]
        self._layouts = layouts
        self._slots_table, self._grads = array("q"), array("q")
        for state, group, mine, grad, its in zip(
            self.states, self._group_numbers, of_params, grads, of_grads, strict=True
        ):
            self._slots_table.extend(slot_row(state, group, layouts.address(mine)))
            self._grads.extend((grad.data_ptr(), DTYPE_IDS[grad.dtype], layouts.address(its)))
        self._chunks = cut([(p.numel(), row_length(p.shape)) for p in self.params])
        measures = any(isinstance(state.spec.rule, LayerwiseRule) for state in self.states)
        self._tasks, self._waves, self._cost = tasks_of(self._chunks, measures)
        self._norms = array("d", bytes(16 * (len(self._chunks) // 3) if measures else 0))
        self._groups = array("d", bytes(8 * GROUP_COLUMNS * len(batch.hypers)))
        self._scalars = array("b", bytes(SCALARS_BYTES * len(self.states)))
        self._header = array("q", [len(self.states), _at(self._slots_table), _at(self._grads), _at(self._chunks)])
        self._header.extend([len(self._tasks) // TASK_COLUMNS, _at(self._tasks), _at(self._groups), _at(self._scalars)])
        self._header.extend([len(self._waves) // WAVE_COLUMNS, _at(self._waves), _at(self._norms)])
        self._address = _at(self._header)


class SumPlan(threading.local):
    """The tables of looks at gradients, kept while sizes and dtypes stay and all of them are contiguous.

    Each thread has its own: the library runs without Python's lock, and reads them while another thread writes its.

    Attributes:
        chunks: ``Chunk`` rows of the gradients last seen.
        partial: One float64 per chunk, for its sum.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._rows: array[int] | None = None  # None where they point to a layout
        self.chunks = array("q")
        self.partial = array("d")

    def rows(self, grads: Sequence[Tensor]) -> tuple[array[int], Layouts | None]:
        """``Gradient`` rows, and what they point to; cuts chunks anew where the sizes changed.

        Args:
            grads: float32, bfloat16 or float16, any layout.

        Returns:
            The rows, flattened, and the layouts; None where no row needs one.
        """
        sizes, dtypes, dense = list(map(_count, grads)), list(map(_DTYPE, grads)), all(map(_is_contiguous, grads))
        if dense and self._rows is not None and sizes == self._sizes and dtypes == self._dtypes:
            self._rows[0::GRADIENT_COLUMNS] = array("q", map(_addresses, grads))
            return self._rows, None
        if sizes != self._sizes:
            self._sizes, self.chunks = sizes, cut([(size, size) for size in sizes])
            self.partial = array("d", bytes(8 * (len(self.chunks) // 3)))
        layouts = Layouts()
        # Squares may be added in any fixed order, so a dense tensor is read as it lies.
        numbers = [0 if grad.is_contiguous() else layouts.add(_as_it_lies(grad)) for grad in grads]
        rows = array("q")
        for grad, number in zip(grads, numbers, strict=True):
            rows.extend((grad.data_ptr(), DTYPE_IDS[grad.dtype], layouts.address(number)))
        self._dtypes, self._rows = dtypes, rows if dense else None
        return rows, layouts

    @property
    def cost(self) -> int:
        """Elements to look at."""
        return sum(self._sizes)


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The same elements with dimensions in the order of memory: contiguous where the tensor is dense."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))


def _same(states: Sequence[ParamState], others: Sequence[ParamState]) -> bool:
    return len(states) == len(others) and all(map(is_, states, others))


def _state_tensors(state: ParamState) -> list[Tensor]:
    return [state.step, *state.master, *chain.from_iterable(state.moments)]


def _at(table: array[Any]) -> int:
    return table.buffer_info()[0]
