"""The ledger: what a training run will keep in memory, counted from shapes alone, before anything is allocated.

Arithmetic on whole numbers; neither torch nor a GPU is needed. State bytes are exact: they are what
``optimizer.state_bytes()`` will say after the first step, and what its tensors take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from lightning_fuse.registry import unknown_name
from lightning_fuse.reports.ledger_kinds import (
    AMSGRAD,
    BNB_SMALLEST,
    BNB_TABLE,
    FORMATS,
    MASTERS,
    MASTERS_FIT,
    OPTIMIZERS,
    PRECISIONS,
    WIDTH,
    MomentKind,
    OptimizerKind,
    Piece,
    Shape,
    bnb_pieces,
    moment_pieces,
    numel,
)

NOT_COUNTED = (
    "activations and the workspace of forward and backward",
    "communication buckets, gathered parameters and other buffers of a strategy",
    "memory that the allocator keeps or cannot use (fragmentation), and the device's own context",
    "Python, libraries, data and loaders",
)

# How regions lie in memory; see optim/regions.py.
ALIGNMENT = 128  # bytes to which every tensor of a region is rounded up
STAGGER = 256  # bytes by which each region of a CPU starts later than the one before, modulo 8


@dataclass(frozen=True)
class Counted:
    """One tensor of a model.

    Attributes:
        name: Its name; state patterns are matched against it.
        shape: Its shape, whole, not a shard's.
        trained: Whether the optimizer steps it.
        parameter: False for a buffer.
        floating: Whether the precision decides its dtype.
        width: Bytes of one element where it does not.
        optimizer: Which of several optimizers steps it.
    """

    name: str
    shape: Shape
    trained: bool = True
    parameter: bool = True
    floating: bool = True
    width: int = 4
    optimizer: int = 0


@dataclass(frozen=True)
class Setup:
    """The choices that decide bytes, as the user types them.

    Attributes:
        optimizer: The word.
        state: The word of the default state format.
        patterns: (name pattern, word) pairs; the first match wins.
        master: The word.
        precision: Lightning's word.
        shards: Devices over which parameters, gradients and state are cut along dimension 0.
        amsgrad: Keep the largest second moment.
        momentum: Of SGD; 0 keeps no buffer.
        min_8bit_size: Elements below which bitsandbytes keeps float32.

    Raises:
        ValueError: A word is unknown, or a choice would be ignored or cannot work.
    """

    optimizer: str = "adamw_fused"
    state: str = "fp32"
    patterns: tuple[tuple[str, str], ...] = ()
    master: str = "none"
    precision: str = "32-true"
    shards: int = 1
    amsgrad: bool = False
    momentum: float = 0.9
    min_8bit_size: int = BNB_SMALLEST

    def __post_init__(self) -> None:
        words: list[tuple[str, str, Iterable[str]]] = [
            ("optimizer", self.optimizer, list(OPTIMIZERS)),
            ("precision", self.precision, list(PRECISIONS)),
            ("master weight format", self.master, list(MASTERS)),
        ]
        words += [("state format", word, list(FORMATS)) for word in (self.state, *(word for _, word in self.patterns))]
        for kind, word, known in words:
            if word not in known:
                raise ValueError(unknown_name(kind, word, known))
        if self.shards < 1:
            raise ValueError(f"shards={self.shards}: give the number of devices that share the state, from 1")
        if self.amsgrad and "amsgrad" not in self.kind.options:
            raise ValueError(f"amsgrad=true has no effect on {self.optimizer}; leave it out, or use adamw_fused")
        self._check_combination()

    def _check_combination(self) -> None:
        kept, family = PRECISIONS[self.precision], self.kind.family
        if kept not in MASTERS_FIT[self.master]:
            fitting = ", ".join(word for word, able in MASTERS_FIT.items() if kept in able)
            raise ValueError(
                f"master={self.master} does not fit the {kept} parameters of precision={self.precision}; "
                f"use master={fitting}, or precision=bf16-true"
            )
        if family == "fused":
            return
        if self.master != "none" or self.patterns:
            given = "state.patterns" if self.patterns else f"master={self.master}"
            raise ValueError(f"optimizer={self.optimizer} has no {given}; use optimizer=adamw_fused, or leave it out")
        possible = ("fp32", "int8") if family == "bnb" else (kept,)
        if self.state not in possible:
            raise ValueError(
                f"optimizer={self.optimizer} precision={self.precision} cannot keep state={self.state}; "
                f"use state={' or '.join(possible)}, or optimizer=adamw_fused"
            )

    @property
    def kind(self) -> OptimizerKind:
        """What the optimizer's word stands for."""
        return OPTIMIZERS[self.optimizer]

    @property
    def moments(self) -> tuple[MomentKind, ...]:
        """What the optimizer keeps per element."""
        if "momentum" in self.kind.options and self.momentum == 0:
            return ()
        return (*self.kind.moments, AMSGRAD) if self.amsgrad else self.kind.moments

    def format_of(self, tensor: Counted) -> str:
        """The state format of one parameter: vectors and scalars stay fp32 under a format with scales."""
        for pattern, word in self.patterns:
            if fnmatchcase(tensor.name, pattern):
                return word
        return "fp32" if "int8" in FORMATS[self.state] and len(tensor.shape) <= 1 else self.state


@dataclass
class Ledger:
    """The bytes of a run on one device: of several shards, the one that holds most.

    Attributes:
        setup: The choices.
        elements: Elements of parameters on this device, frozen ones included.
        trained: Those that the optimizer steps.
        tensors: Tensors that the optimizer steps.
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        gradients: Bytes of gradients, once all of them are there.
        state: Bytes of state by kind, as ``optimizer.state_bytes()`` names them.
        allocated: Bytes of the regions that the state lies in, alignment included.
        notes: What was assumed.
    """

    setup: Setup
    elements: int = 0
    trained: int = 0
    tensors: int = 0
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    state: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    notes: list[str] = field(default_factory=list)

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
        """Bytes of tensors in a checkpoint: parameters, buffers and the regions of the state."""
        return self.parameters + self.buffers + self.allocated

    def of_moment(self, name: str) -> tuple[int, int]:
        """Bytes of one moment: values or codes, and scales."""
        scales = self.state.get(f"{name}.scale", 0) + self.state.get(f"absmax{name.removeprefix('state')}", 0)
        return self.state.get(name, 0) + self.state.get(f"{name}.codes", 0), scales

    def peak(self, transient: int) -> int:
        """The most memory of a training step, from what one step was seen to need.

        Args:
            transient: Bytes that a forward and backward pass held at most beside parameters, buffers and state:
                activations, their gradients, and the parameters' gradients as far as they were there.

        Returns:
            Bytes. At the step itself all gradients are there and the activations are gone, so the larger one counts.
        """
        return self.parameters + self.buffers + self.state_total + max(transient, self.gradients)


def ledger_of(tensors: Iterable[Counted], setup: Setup) -> Ledger:
    """Counts a model.

    Args:
        tensors: Parameters in the order in which the optimizer has them, and buffers.
        setup: The choices.

    Returns:
        The ledger of the device that holds most.

    Raises:
        ValueError: A pattern matches no parameter, or a choice finds nothing to act on.
    """
    tensors = list(tensors)
    _check_patterns(tensors, setup)
    ledger = Ledger(setup)
    cast = WIDTH[PRECISIONS[setup.precision]] if setup.precision.endswith("-true") else WIDTH["fp32"]
    layout = _Regions()
    for tensor in tensors:
        # Only the 16-bit precisions cast a module; the others train it in the dtypes that it has.
        width = cast if tensor.floating and cast < WIDTH["fp32"] else tensor.width
        _check_dtype(tensor, width, setup)
        shape = sharded(tensor.shape, setup.shards)
        nbytes = numel(shape) * width
        if not tensor.parameter:
            ledger.buffers += numel(tensor.shape) * width
            continue
        ledger.parameters += nbytes
        ledger.elements += numel(shape)
        if not tensor.trained:
            continue
        ledger.trained += numel(shape)
        ledger.tensors += 1
        ledger.gradients += nbytes
        for piece in pieces(tensor, shape, setup):
            ledger.state[piece.key] = ledger.state.get(piece.key, 0) + piece.nbytes
            layout.add(piece, tensor.optimizer)
    if setup.kind.family == "bnb" and (users := layout.optimizers_with("absmax1")):
        ledger.state["qmap"] = users * 2 * BNB_TABLE * WIDTH["fp32"]
    ledger.allocated = layout.nbytes if setup.kind.family == "fused" else ledger.state_total
    if setup.shards > 1:
        ledger.notes.append(f"bytes of the first of {setup.shards} shards, which holds most; buffers are not cut")
    return ledger


def pieces(tensor: Counted, shape: Shape, setup: Setup) -> list[Piece]:
    """The tensors of state of one parameter, in the order in which the optimizer asks for them.

    Args:
        tensor: The whole parameter, which decides its format.
        shape: Of it, or of its shard.
        setup: The choices.

    Returns:
        Step counter, moments, master weight.
    """
    if setup.kind.family == "bnb":
        return [piece for m in setup.moments for piece in bnb_pieces(m.name, shape, setup.state, setup.min_8bit_size)]
    if setup.kind.family == "torch":
        counter = [Piece("step", "fp32", 1, scalar=True)] if setup.optimizer.startswith("adam") else []
        return [*counter, *(Piece(m.name, PRECISIONS[setup.precision], numel(shape)) for m in setup.moments)]
    found, word = [Piece("step", "int64", 1, scalar=True)], setup.format_of(tensor)
    for moment in setup.moments:
        found += moment_pieces(FORMATS[word][0 if moment.signed else 1], moment.name, shape)
    master = MASTERS[setup.master]
    return found if master is None else [*found, Piece(*master, numel(shape), scalar=not shape)]


def sharded(shape: Shape, shards: int) -> Shape:
    """The first, largest shard of a tensor that is cut along dimension 0; a scalar is not cut."""
    return (ceil(shape[0] / shards), *shape[1:]) if shape else shape


def bare(parameters: int, setup: Setup, tensors: int = 1) -> Ledger:
    """Counts a number of parameters whose shapes are not known.

    Args:
        parameters: Trainable elements, of all shards together.
        setup: The choices.
        tensors: Tensors that they are spread over.

    Returns:
        The ledger; its notes say what was assumed.

    Raises:
        ValueError: There are no parameters, fewer than tensors, or patterns without names to match.
    """
    if parameters < 1 or not 1 <= tensors <= parameters:
        raise ValueError(f"params={parameters} tensors={tensors}: give at least 1 tensor and 1 parameter in each")
    if setup.patterns:
        raise ValueError("patterns need names: give recipe=NAME or module=PACKAGE.MODULE:FACTORY instead of params")
    mine = ceil(parameters / setup.shards)
    sizes = [mine // tensors + (1 if index < mine % tensors else 0) for index in range(tensors)]
    whole = Setup(**{**vars(setup), "shards": 1})
    ledger = ledger_of([Counted(f"tensor{index}", (1, size)) for index, size in enumerate(sizes)], whole)
    ledger.setup = setup
    many = "one matrix" if tensors == 1 else f"{tensors:,} matrices of equal size"
    ledger.notes.append(f"shapes unknown: counted as {many} with rows of a multiple of 128 elements")
    if setup.shards > 1:
        ledger.notes.append(f"bytes of one of {setup.shards} equal shards")
    return ledger


def counted(module: Any, optimizers: Sequence[Sequence[dict[str, Any]]] | None = None) -> list[Counted]:
    """The tensors of a torch module, on the meta device or any other; only names, shapes and dtypes are read.

    Args:
        module: The module.
        optimizers: Of every optimizer its parameter groups with (name, parameter) pairs, in whose order it has them;
            None stands for one that has all trainable parameters in the module's order.

    Returns:
        Parameters, trained ones first, and buffers.
    """
    named = list(module.named_parameters())
    if optimizers is None:
        optimizers = [[{"params": [(name, p) for name, p in named if p.requires_grad]}]]
    trained = [
        (index, name, p) for index, groups in enumerate(optimizers) for group in groups for name, p in group["params"]
    ]
    stepped = {name for _, name, _ in trained}
    return [
        *(_count(name, p, optimizer=index) for index, name, p in trained),
        *(_count(name, p, trained=False) for name, p in named if name not in stepped),
        *(_count(name, b, trained=False, parameter=False) for name, b in module.named_buffers()),
    ]


class _Regions:
    """Adds up what ``optim.regions.allocate`` takes for the pieces of each optimizer's first step."""

    def __init__(self) -> None:
        self.sizes: dict[int, dict[tuple[str, str], int]] = {}

    def add(self, piece: Piece, optimizer: int) -> None:
        per_line = ALIGNMENT // WIDTH[piece.dtype]
        taken = 1 if piece.scalar else ceil(piece.count / per_line) * per_line
        region, sizes = (piece.key, piece.dtype), self.sizes.setdefault(optimizer, {})
        sizes[region] = sizes.get(region, 0) + taken

    def optimizers_with(self, key: str) -> int:
        return sum(any(name == key for name, _ in sizes) for sizes in self.sizes.values())

    @property
    def nbytes(self) -> int:
        return sum(
            elements * WIDTH[dtype] + STAGGER * (number % 8)
            for sizes in self.sizes.values()
            for number, ((_, dtype), elements) in enumerate(sizes.items())
        )


def _count(name: str, tensor: Any, trained: bool = True, parameter: bool = True, optimizer: int = 0) -> Counted:
    if hasattr(tensor, "materialize"):  # torch's lazy modules
        raise ValueError(f"{name} has no shape yet (a lazy module); run one batch through it before it is counted")
    floating = bool(tensor.is_floating_point())
    return Counted(name, tuple(tensor.shape), trained, parameter, floating, int(tensor.element_size()), optimizer)


def _check_dtype(tensor: Counted, width: int, setup: Setup) -> None:
    """Refuses what the optimizers refuse, so that nothing is counted that cannot be trained."""
    if not (tensor.trained and tensor.parameter):
        return
    if not tensor.floating or (width > WIDTH["fp32"] and setup.kind.family == "fused"):
        kind = f"{8 * width}-bit" if tensor.floating else "complex or of whole numbers"
        raise ValueError(
            f"parameter {tensor.name} is {kind}: {setup.optimizer} is counted for float32, bfloat16 and float16; "
            "freeze it (requires_grad=False) or make it one of these"
        )


def _check_patterns(tensors: Sequence[Counted], setup: Setup) -> None:
    names = [tensor.name for tensor in tensors if tensor.trained and tensor.parameter]
    if not names:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on some of them")
    for pattern, _ in setup.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(unknown_name("parameter pattern", pattern, names[:20]))
