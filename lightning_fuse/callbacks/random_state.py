"""The random streams of a process as plain data: Python's, NumPy's, torch's on the CPU and on every GPU.

Plain means tuples, integers and tensors: ``torch.load(weights_only=True)`` reads them. NumPy's own arrays it does not.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

try:
    import numpy
except ImportError:  # torch does not need it
    numpy = None  # type: ignore[assignment]


def capture_random_state(*, gpus: bool = True) -> dict[str, Any]:
    """Copies the state of every random stream.

    Args:
        gpus: With those of the GPUs. A data loader's worker must leave them alone.

    Returns:
        ``python``, ``torch`` and, where they exist, ``numpy``, ``cuda`` (one per device) and ``mps``.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy is not None:
        stream: Any = numpy.random.get_state()
        name, keys, position, has_gauss, gauss = stream
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss))
    # A device that nothing was drawn on yet has no stream of its own to keep.
    if gpus and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if gpus and torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Puts every random stream back to where it was.

    Args:
        state: What ``capture_random_state`` returned. Streams that this process lacks are left out; a device more than
            were saved keeps its own.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))
    if torch.cuda.is_available():
        for device, one in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one.cpu(), device)
    if torch.backends.mps.is_available() and "mps" in state:
        torch.mps.set_rng_state(state["mps"].cpu())


@contextlib.contextmanager
def kept_random_state(*, gpus: bool = True) -> Iterator[None]:
    """What is drawn inside leaves no trace in any stream."""
    state = capture_random_state(gpus=gpus)
    try:
        yield
    finally:
        restore_random_state(state)
