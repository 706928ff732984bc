"""Signatures see every change of kind that a kernel's tables follow from, by torch's checks and by Python's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse.kernels import ParamUpdate, batch
from lightning_fuse.kernels.batch import TensorSignature, UpdateBatch
from tests.kernels import native_harness
from tests.kernels.native_harness import F32, Case

PLAIN = Case("adamw", "int8", F32, "none", F32, "contiguous", "contiguous", "baseline", 1)


@pytest.fixture(params=["torch's checks", "Python's"])
def _checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python's":
        monkeypatch.setattr(batch, "_GUARDS", None)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: t.view(6, 4),
    "strides": lambda t: t.t().contiguous().t(),
    "dtype": lambda t: t.to(torch.bfloat16),
    "a lazy negation": lambda t: torch._neg_view(t),
    "layout": lambda t: t.to_sparse(),
    "device": lambda t: t.to("meta"),
    "class": lambda t: Parameter(t, requires_grad=False),
}


@pytest.mark.usefixtures("_checks")
@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.parametrize("place", [0, 2])
def test_a_change_of_one_tensor_is_seen(what: str, place: int) -> None:
    tensors = [torch.ones(4, 6) for _ in range(3)]
    signature = TensorSignature(tensors)
    assert signature.matches([t.clone() + 1 for t in tensors])
    assert not signature.matches(tensors[:2])
    tensors[place] = CHANGED[what](tensors[place])
    assert not signature.matches(tensors)


@pytest.mark.usefixtures("_checks")
def test_one_object_in_two_places_matches_its_like_or_is_looked_at_anew() -> None:
    shared = torch.ones(3)
    assert TensorSignature([shared, shared]).matches([torch.ones(3), torch.ones(3)])
    assert TensorSignature([]).matches([])


def test_columns_are_the_updates_that_they_were_made_of() -> None:
    hypers = [{**native_harness.GROUP, "lr": lr} for lr in (0.1, 0.2)]
    states = [native_harness.make_state(torch.ones(2, 3), PLAIN) for _ in range(3)]
    updates = [ParamUpdate(s, torch.ones(2, 3), hypers[i]) for s, i in zip(states, (0, 1, 0), strict=True)]
    columns = UpdateBatch.of(updates)
    assert columns.groups == (0, 1, 0)
    assert [(u.state, u.grad, u.hyper) for u in columns] == [(u.state, u.grad, u.hyper) for u in updates]
    assert [u.state for u in columns[1:]] == states[1:]
    assert UpdateBatch.of(columns) is columns
    assert len(UpdateBatch.of([])) == 0
