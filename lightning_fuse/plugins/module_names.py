"""Names of a module's parameters that follow the module: a layer that is added or replaced in training counts, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module


class ModuleNames(Mapping[Tensor, str]):
    """Names of a module's parameters, as the module has them when they are asked for.

    Args:
        module: Not kept alive.
    """

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self._names: dict[Tensor, str] = {}

    def __getitem__(self, p: Tensor) -> str:
        name = self._names.get(p)
        if name is None or not self._is_current(p, name):
            name = self._refreshed()[p]
        return name

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._refreshed())

    def __len__(self) -> int:
        return len(self._refreshed())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def _refreshed(self) -> dict[Tensor, str]:
        module = self._module()
        if module is not None:
            self._names = {p: name.replace("_orig_mod.", "") for name, p in module.named_parameters()}
        return self._names

    def _is_current(self, p: Tensor, name: str) -> bool:
        found: Any = self._module()
        if found is None:
            return True
        for part in name.split("."):
            found = getattr(getattr(found, "_orig_mod", found), part, None)
        return found is p
