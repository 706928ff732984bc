"""What the tests of the native kernel share."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_fuse.kernels.cpu import native, plan


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[plan.Plan]:
    """Every plan that is built while the test runs."""
    found: list[plan.Plan] = []

    class Watched(plan.Plan):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(native, "Plan", Watched)
    return found
