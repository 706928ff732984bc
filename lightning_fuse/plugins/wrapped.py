"""What a precision plugin of ours leaves to the stock one inside it: modules, inputs, outputs and autocast."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.nn import Module


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
