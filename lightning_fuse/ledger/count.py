"""Bytes of a training run, from optimizers that are built over parameters without memory.

Ours say their bytes in their specs; torch's take one step on the meta device, where state has shapes and no memory.
State bytes are exact: they are what the tensors of the state take after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.optim.regions import Request, region_bytes

NOT_COUNTED = (
    "activations and the workspace of forward and backward",
    "communication buckets, gathered parameters and other buffers of a strategy",
    "memory that the allocator keeps or cannot use (fragmentation), and the device's own context",
    "Python, libraries, data and loaders",
)
CASTS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}  # the other precisions cast no parameter
BNB_BLOCK = 256  # codes of bitsandbytes per scale
BNB_TABLES = 2 * 256 * 4  # bytes of its two code tables, which all tensors share

Groups = Sequence[dict[str, Any]]
Factory = Callable[[Any], Optimizer]


@dataclass
class Ledger:
    """The bytes of a run on one device: of several shards, the one that holds most.

    Attributes:
        shards: Devices over which parameters, gradients and state are cut along dimension 0.
        elements: Elements of parameters on this device, frozen ones included.
        sizes: Elements of every tensor that an optimizer steps.
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        gradients: Bytes of gradients, once all of them are there.
        state: Bytes of state by kind, as ``optimizer.state_bytes()`` names them.
        allocated: Bytes of the memory that the state lies in, alignment included.
        widths: Bytes per element of a large matrix: of "p" (parameter and gradient), of every moment, of a master.
        optimizers: What steps, by its class.
        notes: What was assumed.
    """

    shards: int = 1
    elements: int = 0
    sizes: list[int] = field(default_factory=list)
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    state: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    widths: dict[str, float] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Elements that an optimizer steps."""
        return sum(self.sizes)

    @property
    def state_total(self) -> int:
        """Bytes of all state: moments, scales, master weights, step counters."""
        return sum(self.state.values())

    @property
    def total(self) -> int:
        """Bytes of everything counted."""
        return self.parameters + self.buffers + self.gradients + self.state_total

    @property
    def checkpoint(self) -> int:
        """Bytes of tensors in a checkpoint: parameters, buffers and the memory of the state."""
        return self.parameters + self.buffers + self.allocated

    def peak(self, transient: int) -> int:
        """The most memory of a training step, from what one step was seen to need.

        Args:
            transient: Bytes that a forward and backward pass held at most beside parameters, buffers and state:
                activations, their gradients, and the parameters' gradients as far as they were there.

        Returns:
            Bytes. At the step itself all gradients are there and the activations are gone, so the larger one counts.
        """
        return self.parameters + self.buffers + self.state_total + max(transient, self.gradients)


def count_module(
    module: torch.nn.Module,
    factory: Factory,
    precision: str = "32-true",
    *,
    optimizers: Sequence[Groups] | None = None,
    shards: int = 1,
) -> Ledger:
    """Counts a model.

    Args:
        module: On the meta device or any other; only names, shapes and dtypes are read.
        factory: Builds an optimizer from parameter groups, as the run will.
        precision: Lightning's word; the 16-bit ones cast floating parameters and buffers.
        optimizers: Of every optimizer its parameter groups with (name, parameter) pairs; None stands for one that has
            all trainable parameters in the module's order.
        shards: Devices that share parameters, gradients and state.

    Returns:
        The ledger of the device that holds most.

    Raises:
        ValueError: The optimizer refuses a setting, or a pattern matches no parameter.
        TypeError: It refuses a parameter.
    """
    named = list(module.named_parameters())
    if optimizers is None:
        optimizers = [[{"params": [(name, p) for name, p in named if p.requires_grad]}]]
    return _count(named, list(module.buffers()), optimizers, factory, precision, shards)


def estimate_params(number: int, factory: Factory, precision: str, tensors: int = 1, shards: int = 1) -> Ledger:
    """Counts a number of parameters whose shapes are not known.

    Args:
        number: Trainable elements, of all shards together.
        factory: As in ``count_module``.
        precision: As in ``count_module``.
        tensors: Tensors that they are spread over.
        shards: Devices that share them.

    Returns:
        The ledger; its notes say what was assumed.

    Raises:
        ValueError: There are no parameters, or fewer than tensors.
    """
    if number < 1 or not 1 <= tensors <= number:
        raise ValueError(f"params={number} tensors={tensors}: give at least 1 tensor and 1 parameter in each")
    mine = ceil(number / shards)
    sizes = [mine // tensors + (1 if index < mine % tensors else 0) for index in range(tensors)]
    named = [(f"tensor{i}", torch.empty(1, size, device="meta", requires_grad=True)) for i, size in enumerate(sizes)]
    ledger = _count(named, [], [[{"params": named}]], factory, precision, 1)
    many = "one matrix" if tensors == 1 else f"{tensors:,} matrices of equal size"
    ledger.notes.append(f"shapes unknown: counted as {many} with rows of a multiple of 128 elements")
    if shards > 1:
        ledger.shards = shards
        ledger.notes.append(f"bytes of one of {shards} equal shards")
    return ledger


def sharded(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """The first, largest shard of a tensor that is cut along dimension 0; a scalar is not cut."""
    return (ceil(shape[0] / shards), *shape[1:]) if shape else ()


def _count(
    named: Iterable[tuple[str, Tensor]],
    buffers: Iterable[Tensor],
    optimizers: Sequence[Groups],
    factory: Factory,
    precision: str,
    shards: int,
) -> Ledger:
    ledger = Ledger(shards=shards)
    cast = CASTS.get(precision)
    local = {name: _local(name, p, cast, shards) for name, p in named}
    ledger.parameters = sum(p.nbytes for p in local.values())
    ledger.elements = sum(p.numel() for p in local.values())
    ledger.buffers = sum(b.numel() * (cast if cast and b.is_floating_point() else b.dtype).itemsize for b in buffers)
    for groups in optimizers:
        cut = [{**group, "params": [(name, local[name]) for name, _ in group["params"]]} for group in groups]
        stepped = [p for group in cut for _, p in group["params"]]
        ledger.sizes += [p.numel() for p in stepped]
        ledger.gradients += sum(p.nbytes for p in stepped)
        state, allocated, name = _state(factory, cut)
        ledger.allocated += allocated
        ledger.optimizers.append(name)
        for key, nbytes in state.items():
            ledger.state[key] = ledger.state.get(key, 0) + nbytes
    ledger.widths = _widths(factory, cast or torch.float32)
    if shards > 1:
        ledger.notes.append(f"bytes of the first of {shards} shards, which holds most; buffers are not cut")
    return ledger


def _local(name: str, p: Tensor, cast: torch.dtype | None, shards: int) -> Tensor:
    """One device's part of a parameter, without memory."""
    if is_lazy(p):
        raise ValueError(f"parameter {name} has no shape yet; give a module whose layers know their sizes")
    dtype = cast if cast is not None and p.is_floating_point() else p.dtype
    return torch.empty(sharded(p.shape, shards), dtype=dtype, device="meta", requires_grad=p.requires_grad)


def _state(factory: Factory, groups: Groups) -> tuple[dict[str, int], int, str]:
    """Bytes of an optimizer's state by kind, bytes of the memory that it takes, and the optimizer's name."""
    keywords = getattr(factory, "keywords", {})
    # torch's fused and foreach kernels keep what its loop keeps, and only the loop runs without memory.
    plain = {word: False for word in ("fused", "foreach") if keywords.get(word)}
    optimizer = factory(groups, **plain) if plain else factory(groups)
    name = type(optimizer).__name__
    if isinstance(optimizer, FusedOptimizer):
        cpu = torch.device("cpu")
        wanted = [
            Request(key, part.shape, part.dtype, cpu)
            for spec in optimizer.specs_with_state()
            for key, part in spec.tensors.items()
        ]
        return optimizer.state_bytes(), region_bytes(wanted), name
    if type(optimizer).__module__.startswith("bitsandbytes"):
        state = _bitsandbytes(optimizer)
    else:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        optimizer.step()
        state = {}
        for held in optimizer.state.values():
            for key, value in held.items():
                if isinstance(value, Tensor):
                    state[key] = state.get(key, 0) + value.nbytes
    return state, sum(state.values()), name


def _bitsandbytes(optimizer: Any) -> dict[str, int]:
    """Its state, by its own rules: it takes no step without memory."""
    bits, smallest, state = optimizer.args.optim_bits, optimizer.args.min_8bit_size, dict[str, int]()
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        small = bits == 32 or p.numel() < smallest
        for number in (1, 2):
            sizes = {f"state{number}": p.numel() * (4 if small else 1)}
            if not small:
                sizes |= {f"absmax{number}": 4 * ceil(p.numel() / BNB_BLOCK), "qmap": BNB_TABLES}
            for key, nbytes in sizes.items():
                state[key] = nbytes if key == "qmap" else state.get(key, 0) + nbytes
    return state


def _widths(factory: Factory, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per element of a large matrix: parameter, each moment with its scales, master weight."""
    probe = torch.empty(1, 2**20, dtype=dtype, device="meta", requires_grad=True)
    patterns = getattr(factory, "keywords", {}).get("state")
    if isinstance(patterns, list):  # a pattern that matches nothing is refused, and the probe is nobody's
        factory = _with_state(factory, patterns[-1])
    state, _, _ = _state(factory, [{"params": [("probe", probe)]}])
    found: dict[str, float] = {"p": float(dtype.itemsize)}
    for key, nbytes in state.items():
        if key in ("step", "qmap"):
            continue
        moment = key.removesuffix(".codes").removesuffix(".scale").replace("absmax", "state")
        found[moment] = found.get(moment, 0.0) + nbytes / probe.numel()
    return found


def _with_state(factory: Any, word: Any) -> Factory:
    from functools import partial

    return partial(factory.func, *factory.args, **{**factory.keywords, "state": word})
