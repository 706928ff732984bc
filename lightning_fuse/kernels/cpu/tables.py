"""The rows that Python writes and C++ reads: 64-bit integers in ``array`` tables, laid out as in ``src/tables.h``."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_fuse.formats.blocks import row_length
from lightning_fuse.kernels.chunks import CHUNK, chunk_ends
from lightning_fuse.kernels.kernel import ParamState, overlaps

# Numbers of the enumerations in src/tables.h, by name.
RULE_IDS = {
    name: number
    for number, name in enumerate(
        (
            "adamw",
            "adamw_amsgrad",
            "adam",
            "adam_amsgrad",
            "sgd",
            "sgd_momentum",
            "sgd_nesterov",
            "lion",
            "lars",
            "lars_nesterov",
            "lamb",
            "ademamix",
        )
    )
}
CODEC_IDS = {
    name: number for number, name in enumerate(("fp32", "bf16_signed", "bf16_unsigned", "int8_signed", "int8_unsigned"))
}
MASTER_IDS = {"none": 0, "fp32": 1, "split": 2, "split8": 3}
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

MAX_DIMS = 16  # kMaxDims in src/layout.h
MAX_MOMENTS = 3
SLOT_COLUMNS = 11 + 3 * MAX_MOMENTS
GRADIENT_COLUMNS = 3  # data, dtype, layout
GROUP_COLUMNS = 13
SCALARS_BYTES = 56

MEASURE, STEP = 0, 1  # of a ``Task``
TASK_COLUMNS, WAVE_COLUMNS = 4, 5
WAVE = 1 << 18  # elements of whole parameters that are measured, then stepped while a cache still holds them
CHUNK_OVERHEAD = 256  # what a chunk costs besides its elements, in elements


class Layouts:
    """The sizes and strides of all tensors of a plan that are not contiguous, in one table."""

    def __init__(self) -> None:
        self._table = array("q")
        self._places: list[int] = []

    def add(self, tensor: Tensor) -> int:
        """Adds a tensor; returns its number from 1, or 0 where it is contiguous."""
        if tensor.is_contiguous():
            return 0
        self._places.append(len(self._table))
        self._table.extend((tensor.dim(), *tensor.shape, *tensor.stride()))
        return len(self._places)

    def address(self, number: int) -> int:
        """Where the layout of the given number lies, once all are added; 0, a null pointer, for contiguous."""
        return self._table.buffer_info()[0] + 8 * self._places[number - 1] if number else 0


def slot_row(state: ParamState, group: int, layout: int) -> list[int]:
    """One ``Slot``.

    Args:
        state: The parameter and its state.
        group: Its row in the table of groups.
        layout: Address of its layout, or 0.

    Returns:
        ``SLOT_COLUMNS`` integers.
    """
    spec, p = state.spec, state.spec.local
    kept = state.master[0].data_ptr() if state.master else 0
    row = [RULE_IDS[spec.rule.name], DTYPE_IDS[p.dtype], MASTER_IDS[spec.master.name], group]
    row += [p.data_ptr(), layout, kept, state.step.data_ptr(), p.numel(), row_length(p.shape), spec.first_index]
    for codec, tensors in zip(spec.codecs, state.moments, strict=True):
        parts = [tensor.data_ptr() for tensor in tensors]
        row += [CODEC_IDS[codec.name], *parts, *[0] * (2 - len(parts))]
    return row + [0] * (SLOT_COLUMNS - len(row))


def check_state(state: ParamState) -> None:
    """Refuses what does not lie in memory as its format says: the kernel would write out of bounds.

    Args:
        state: The parameter and its state.

    Raises:
        RuntimeError: A tensor of the state has another shape, dtype or layout, or lives elsewhere, or the parameter
            has left the CPU, changed its dtype or got memory that its elements share.
    """
    spec, p = state.spec, state.spec.local
    if p.device.type != "cpu" or p.dtype not in spec.master.dtypes:
        raise RuntimeError(
            f"{spec.name} became {p.dtype} on {p.device} after its state was made, with master={spec.master.name!r}: "
            "move and convert the model first, then build the optimizer"
        )
    if overlaps(p) or p.is_neg():
        raise RuntimeError(
            f"the data of {spec.name} was replaced by a view whose elements share memory or are negated (shape "
            f"{tuple(p.shape)}, strides {p.stride()}): give it memory of its own, for instance with .clone()"
        )
    found = [state.step, *chain.from_iterable(state.moments), *state.master]
    for (key, wanted), tensor in zip(replace(spec).tensors.items(), found, strict=True):
        fits = tuple(tensor.shape) == wanted.shape and tensor.dtype == wanted.dtype
        if not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise RuntimeError(
                f"state {key} of {spec.name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected "
                f"contiguous {wanted.dtype} {wanted.shape} on the CPU: replace state through load_state_dict"
            )


def group_row(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One ``Group``: hyperparameters as float64, 0 where a rule has none of that name."""
    beta1, beta2, beta3 = (*group.get("betas", (0.0, 0.0)), 0.0)[:3]
    read = group.get
    return (
        read("lr", 0.0),
        read("weight_decay", 0.0),
        beta1,
        beta2,
        read("eps", 0.0),
        read("momentum", 0.0),
        read("dampening", 0.0),
        float(bool(read("maximize", False))),
        read("trust_coefficient", 0.0),
        beta3,
        read("alpha", 0.0),
        read("t_alpha") or 0.0,
        read("t_beta3") or 0.0,
    )


def cut(sizes: Sequence[tuple[int, int]]) -> array[int]:
    """Cuts tensors into ``Chunk`` rows of about equal length that cut no block.

    Args:
        sizes: (elements, elements of a row in which blocks lie without a cut) of each tensor.

    Returns:
        Rows (tensor, begin, end), flattened; none for empty tensors.
    """
    chunks = array("q")
    for index, (numel, row) in enumerate(sizes):
        begin = 0
        for end in chunk_ends(numel, row):
            chunks.extend((index, begin, end))
            begin = end
    return chunks


def tasks_of(chunks: array[int], measured: bool) -> tuple[array[int], array[int], int]:
    """Joins chunks to tasks, what one thread takes at a time: many for balance, not so many that taking costs.

    Args:
        chunks: Rows (tensor, begin, end), flattened.
        measured: Whether norms must be known before a step: tensors are then measured wave by wave, each one ahead of
            the steps of the wave before it, so that threads need not wait for one another.

    Returns:
        ``Task`` rows and ``Wave`` rows, flattened; and the cost of all, in elements.
    """
    costs = [end - begin + CHUNK_OVERHEAD for begin, end in zip(chunks[1::3], chunks[2::3], strict=True)]
    total = sum(costs)
    target = min(CHUNK, max(4096, (min(total, WAVE) if measured else total) // 32))
    waves: list[list[tuple[int, int]]] = [[]]
    first, running, in_wave = 0, 0, 0
    for number, (cost, begin) in enumerate(zip(costs, chunks[1::3], strict=True)):
        ends = measured and in_wave >= WAVE and begin == 0
        if running and (ends or running + cost > target):
            waves[-1].append((first, number))
            first, running = number, 0
        if ends:
            waves.append([])
            in_wave = 0
        running += cost
        in_wave += cost
    if running:
        waves[-1].append((first, len(costs)))
    if not measured:
        return array("q", chain.from_iterable((STEP, *task, -1) for task in waves[0])), array("q"), total
    tasks, rows = array("q"), array("q")
    for index, (ahead, behind) in enumerate(zip([*waves, []], [[], *waves], strict=True)):
        tasks.extend(chain.from_iterable((MEASURE, *task, index) for task in ahead))
        tasks.extend(chain.from_iterable((STEP, *task, index - 1) for task in behind))
        rows.extend((ahead[0][0], ahead[-1][1], len(ahead), 0, 0) if ahead else ())
    return tasks, rows, total
