"""Memory traffic and launches of one optimizer step, by the path that executes it.

Traffic is derived, not measured: a path is a list of passes over memory, a pass reads and writes operands, and an
operand has bytes per element. What a cache keeps between two passes is not taken off, so small models see less.

Launches are what a step costs before it moves a byte. On a CPU, calls of an operator; on a GPU, kernels, for torch's
multi-tensor paths by the limits of its launcher (``MultiTensorApply.cuh``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

MASTERS = ("master", "remainder")  # keys of a master weight

# Tensors per launch of torch's multi-tensor kernels, by the number of tensor lists that a kernel walks.
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
TENSORS_WITH_SCALARS = 96  # one list, and a number for each tensor
BLOCKS_PER_LAUNCH = 320
CHUNK = 65536  # elements per block

GPU_LAUNCHES = 4  # of our kernel for GPUs at most, however many parameters there are


@dataclass(frozen=True)
class Pass:
    """One pass over memory.

    Attributes:
        what: In a few words.
        reads: Operands read, by name.
        writes: Operands written.
    """

    what: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def nbytes(self, widths: Mapping[str, float]) -> float:
        """Bytes per element that it moves."""
        return sum(widths[name] for name in (*self.reads, *self.writes))


@dataclass(frozen=True)
class Path:
    """One way to execute the step.

    Attributes:
        name: What the table calls it.
        passes: In order.
        widths: Operand to bytes per element.
    """

    name: str
    passes: tuple[Pass, ...]
    widths: Mapping[str, float]

    @property
    def bytes_per_element(self) -> float:
        """Bytes read and written per element."""
        return sum(one.nbytes(self.widths) for one in self.passes)


@dataclass(frozen=True)
class Launches:
    """Launches of one step.

    Attributes:
        path: Its name.
        cpu: Operator calls on a CPU.
        cuda: Kernels on a GPU; None where nobody has counted them.
    """

    path: str
    cpu: int
    cuda: int | None


# torch's AdamW, operation by operation, for one tensor (without amsgrad, capturable or maximize).
TORCH_ADAMW = (
    Pass("p *= 1 - lr * decay", ("p",), ("p",)),
    Pass("m = lerp(m, g)", ("m", "g"), ("m",)),
    Pass("v *= beta2", ("v",), ("v",)),
    Pass("v += (1 - beta2) * g * g", ("v", "g"), ("v",)),
    Pass("d = sqrt(v)", ("v",), ("d",)),
    Pass("d / correction", ("d",), ("d",)),
    Pass("d += eps", ("d",), ("d",)),
    Pass("p -= step_size * m / d", ("p", "m", "d"), ("p",)),
)
# Most tensors per launch of each of them as a foreach kernel: it walks its inputs and, where not in place, the output.
TORCH_ADAMW_LIMITS = (*(TENSORS_PER_LAUNCH[lists] for lists in (1, 2, 1, 3, 2)), TENSORS_WITH_SCALARS, 110, 48)

# The acts of a step before the update, as separate passes over the gradients and as ours.
SEPARATE_ACTS = (
    Pass("unscale and check", ("g",), ("g",)),
    Pass("norm", ("g",), ()),
    Pass("clip", ("g",), ("g",)),
)
OUR_ACTS = (Pass("verdict: norm and finiteness", ("g",), ()),)


def separate_loops(moments: Sequence[str]) -> tuple[Pass, ...]:
    """A step as a textbook writes it: one loop per moment, then one over the parameters."""
    of_moments = (Pass(f"update {m}", (m, "g"), (m,)) for m in moments)
    return (*of_moments, Pass("update p", ("p", *(moments or ("g",))), ("p",)))


def one_pass(moments: Sequence[str], extra: Sequence[str] = ()) -> tuple[Pass, ...]:
    """A fused step: everything is read once and written once; gradients are only read."""
    kept = (*moments, *extra)
    return (Pass("read, update, write", ("p", "g", *kept), ("p", *kept)),)


def update_paths(widths: Mapping[str, float], adamw: bool = True) -> list[Path]:
    """The ways to execute an update.

    Args:
        widths: Bytes per element of a matrix with long rows: "p" for parameter and gradient, and what is kept, in the
            order in which the optimizer has it.
        adamw: Whether it is AdamW, whose operations in torch are known.

    Returns:
        Separate loops and one pass with float32 state, the same with what is really kept, and for AdamW torch's
        operations one by one.
    """
    masters = [name for name in widths if name in MASTERS]
    moments = [name for name in widths if name not in ("p", *masters)]
    width = widths["p"]
    plain = {"p": width, "g": width, **dict.fromkeys(moments, 4.0)}
    paths = [
        Path("separate loops, fp32 state", separate_loops(moments), plain),
        Path("one fused pass, fp32 state", one_pass(moments), plain),
    ]
    if adamw and len(moments) == 2:
        paths.insert(0, Path("torch's operations one by one", TORCH_ADAMW, dict.fromkeys("pgdmv", width)))
    if masters or any(widths[name] != 4 for name in moments):
        paths.append(Path("one fused pass, this state", one_pass(moments, masters), {**widths, "g": width}))
    return paths


def step_paths(widths: Mapping[str, float]) -> list[Path]:
    """The whole step, unscaling, check and clipping included: as separate acts, and as the step contract.

    Args:
        widths: As in ``update_paths``.

    Returns:
        Two paths, both with the last, fused update of ``update_paths``.
    """
    update = update_paths(widths)[-1]
    return [
        Path("separate acts, fused update", (*SEPARATE_ACTS, *update.passes), update.widths),
        Path("the step contract", (*OUR_ACTS, *update.passes), update.widths),
    ]


def launches(sizes: Sequence[int], gpu_kernel: bool) -> list[Launches]:
    """Launches of one AdamW step.

    Args:
        sizes: Elements of each tensor.
        gpu_kernel: Whether this version has a kernel of ours for GPUs; without it the reference kernel runs there,
            plain operations of torch for every parameter.

    Returns:
        torch's loop, foreach and fused, bitsandbytes, ours. On a CPU torch's foreach is a loop inside, and the counter
        of each tensor is one more operation, for its fused step, too; on a GPU the counters of the first two stay on
        the CPU and are no kernels.
    """
    tensors, operations = len(sizes), len(TORCH_ADAMW)
    foreach = sum(multi_tensor_launches(sizes, limit) for limit in TORCH_ADAMW_LIMITS)
    return [
        Launches("torch, loop", cpu=tensors * (operations + 1), cuda=tensors * operations),
        Launches("torch, foreach", cpu=tensors * (operations + 1), cuda=foreach),
        Launches(
            "torch, fused",
            cpu=tensors + 1,
            cuda=multi_tensor_launches([1] * tensors, TENSORS_PER_LAUNCH[1])
            + multi_tensor_launches(sizes, TENSORS_PER_LAUNCH[4]),
        ),
        Launches("bitsandbytes", cpu=tensors, cuda=tensors),
        Launches("ours", cpu=1, cuda=GPU_LAUNCHES if gpu_kernel else None),
    ]


def multi_tensor_launches(sizes: Sequence[int], limit: int) -> int:
    """Kernels that torch's multi-tensor launcher needs.

    Args:
        sizes: Elements of each tensor; empty ones are left out.
        limit: Most tensors per launch.

    Returns:
        Launches: a new one starts where the tensors or the blocks of one are used up.
    """
    count = held = blocks = 0
    for size in (size for size in sizes if size):
        held += 1
        chunks = ceil(size / CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            full = held == limit and last
            if full or blocks == BLOCKS_PER_LAUNCH:
                count += 1
                blocks = 0
                held = 0 if last else 1
    return count + (1 if blocks else 0)
