"""The native kernel: one call into C++ steps all parameters of an optimizer, with the bits of the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fuse.kernels.batch import UpdateBatch
from lightning_fuse.kernels.cpu.plan import THREAD_GRAIN, Plan, SumPlan
from lightning_fuse.kernels.cpu.shared_library import Library, load
from lightning_fuse.kernels.cpu.tables import CODEC_IDS, DTYPE_IDS, MASTER_IDS, MAX_DIMS, RULE_IDS
from lightning_fuse.kernels.kernel import (
    ParamSpec,
    ParamUpdate,
    StepKernel,
    Support,
    is_wrapped,
    overlaps,
    shows_no_memory,
)
from lightning_fuse.kernels.reference import ReferenceKernel

HUGE_REGION = 1 << 22  # bytes from which a region is worth a request for huge pages, of 2 MiB each


class NativeKernel(StepKernel):
    """The word ``native``: C++ on the CPU, see ``src/level.cpp``."""

    name = "native"

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._sums = SumPlan()

    def clone(self) -> NativeKernel:
        """See ``StepKernel.clone``: a plan belongs to one optimizer's parameters."""
        return NativeKernel()

    def supports(self, spec: ParamSpec) -> Support:
        """See ``StepKernel.supports``."""
        p = spec.local
        reasons = (
            (p.device.type != "cpu", f"it runs on the CPU, the parameter is on {p.device}"),
            (p.dtype not in DTYPE_IDS, f"parameters must be float32, bfloat16 or float16, not {p.dtype}"),
            (is_wrapped(p), f"a {type(p).__name__} does not show its memory"),
            (p.dim() > MAX_DIMS, f"the parameter has {p.dim()} dimensions, {MAX_DIMS} are the most"),
            (overlaps(p), "elements of the parameter may share memory"),
            (p.is_neg(), "the parameter is a view that negates its memory"),
            (spec.rule.name not in RULE_IDS, f"the rule {spec.rule.name} has no C++ twin"),
            (spec.master.name not in MASTER_IDS, f"the master weight {spec.master.name} has no C++ twin"),
            *((codec.name not in CODEC_IDS, f"the codec {codec.name} has no C++ twin") for codec in spec.codecs),
        )
        for applies, why in reasons:
            if applies:
                return Support(False, why)
        why = self.unavailable_reason()
        return Support(not why, why)

    def description(self) -> str:
        """See ``StepKernel.description``."""
        return describe()

    def unavailable_reason(self) -> str:
        """See ``StepKernel.unavailable_reason``."""
        library = load()
        return library if isinstance(library, str) else ""

    @torch.no_grad()
    def step(self, updates: Sequence[ParamUpdate], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """See ``StepKernel.step``."""
        if not updates:
            return
        batch = UpdateBatch.of(updates)
        if batch.signature.negated:
            batch = UpdateBatch.of([each._replace(grad=each.grad.resolve_neg()) for each in batch])
        if self._plan is None or not self._plan.fits(batch):
            self._plan = Plan(batch)
        plan = self._plan
        factor, found_inf = _host_float(factor), _host_float(found_inf)
        changed = _library().step(
            plan.refresh(batch),
            None if factor is None else factor.data_ptr(),
            None if found_inf is None else found_inf.data_ptr(),
            plan.threads(torch.get_num_threads()),
        )
        if changed:
            # Autograd tells by the version that a tensor it saved was written to.
            torch.autograd.graph.increment_version(plan.params)

    def supports_reduction(self, device: torch.device) -> bool:
        """See ``StepKernel.supports_reduction``: the CPU, where the library was built."""
        return device.type == "cpu" and not self.unavailable_reason()

    @torch.no_grad()
    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """See ``StepKernel.sum_of_squares``."""
        kinds = set(map(type, grads))  # a few, of many gradients
        if any(map(shows_no_memory, kinds)) or max(map(torch.Tensor.dim, grads), default=0) > MAX_DIMS:
            return ReferenceKernel().sum_of_squares(grads)
        rows, layouts = self._sums.rows(grads)
        chunks, partial = self._sums.chunks, self._sums.partial
        threads = max(1, min(torch.get_num_threads(), self._sums.cost // THREAD_GRAIN))
        total = _library().sum_of_squares(
            rows.buffer_info()[0], chunks.buffer_info()[0], len(chunks) // 3, partial.buffer_info()[0], threads
        )
        del layouts  # alive until here: the rows point into it
        return torch.tensor(total, dtype=torch.float64)


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """A vector of zeros on huge pages, where the system gives them: a step reads state faster by a sixth then.

    Args:
        size: Elements.
        dtype: Their dtype.

    Returns:
        ``dtype``, shape [size].
    """
    region = torch.empty(size, dtype=dtype)
    library = load() if region.nbytes >= HUGE_REGION else ""
    if isinstance(library, Library):
        library.prefer_huge_pages(region.data_ptr(), region.nbytes)
    return region.zero_()


def describe() -> str:
    """What runs, in a few words: level and threads, or why there is nothing to run."""
    library = load()
    if isinstance(library, str):
        return f"not available because {library}"
    threads = torch.get_num_threads() if library.openmp else 1
    return f"{library.level}, {threads} thread{'s' if threads > 1 else ''}"


def _library() -> Library:
    library = load()
    if isinstance(library, str):
        raise RuntimeError(f"the native kernel cannot run because {library}; use kernel=auto or kernel=reference")
    return library


def _host_float(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to("cpu", torch.float32).contiguous()


if sys.maxsize < 2**63 - 1:  # pragma: no cover
    raise ImportError("the native kernel needs a 64-bit Python; use kernel=reference")
