"""Lightning's own precision plugins: one for each word, the loss scale it needs, and what ours leaves to it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch.nn import Module

from lightning_fuse.registry import unknown_name
from lightning_fuse.step import LossScale

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def stock_precision(word: str, device: str) -> Precision:
    """Lightning's own plugin for a precision.

    Args:
        word: One of ``PRECISIONS``.
        device: Device type of autocast; float16 on a CPU is real float16 here.

    Returns:
        The plugin. Its scaler, if any, only carries settings: the contract scales.

    Raises:
        ValueError: The word is unknown.
    """
    if word == "32-true":
        return Precision()
    if word == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device)
    if word == "16-mixed":
        return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device))
    if word in ("bf16-true", "16-true"):
        return HalfPrecision(cast(Any, word))
    raise ValueError(unknown_name("precision", word, PRECISIONS))


def loss_scale_for(plugin: Precision, floor: float | None = None, **settings: Any) -> LossScale | None:
    """The loss scale that a precision needs: float16, mixed or true, and no other.

    Args:
        plugin: A stock plugin; a scaler of its own gives settings and state.
        floor: The smallest loss scale; None for 1, or the first scale where that is smaller.
        **settings: ``init_scale`` and ``growth_interval`` override the scaler's; None does not.

    Returns:
        The loss scale, or None.
    """
    scaler = getattr(plugin, "scaler", None)
    if str(plugin.precision) not in ("16-mixed", "16-true") or (scaler is not None and not scaler.is_enabled()):
        return None
    chosen = {key: value for key, value in settings.items() if value is not None}
    if scaler is None:
        return LossScale(floor=1.0 if floor is None else floor, **chosen)
    return LossScale.from_grad_scaler(scaler, floor, **chosen)


class WrappedPrecision(Precision):
    """Hands on what belongs to the compute precision.

    Attributes:
        inner: The stock plugin.
    """

    inner: Precision

    @property
    def precision(self) -> Any:  # type: ignore[override]
        """Lightning's word for the compute precision."""
        return self.inner.precision

    def convert_module(self, module: Module) -> Module:
        """See the stock plugin."""
        return self.inner.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """See the stock plugin."""
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """See the stock plugin."""
        return self.inner.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """See the stock plugin."""
        return self.inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """See the stock plugin."""
        return self.inner.module_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """See the stock plugin."""
        with self.inner.forward_context():
            yield
