"""Case 25 over the whole registered table: train 8 = train 4, save, a fresh process, train 4; bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fuse.rules import RULES
from tests.optim.every_kind import WITHOUT_TWIN, build, kinds, packed, train
from tests.optim.models import same_bits
from tests.rules.rule_table import CASES


def flat(value: Any, path: str = "") -> dict[str, Tensor]:
    """Every tensor and number of nested plain data, by its path."""
    if isinstance(value, dict):
        return {key: leaf for k, v in value.items() for key, leaf in flat(v, f"{path}/{k}").items()}
    if isinstance(value, (list, tuple)):
        return flat(dict(enumerate(value)), path)
    return {path: value if isinstance(value, Tensor) else torch.tensor(hash(value) if value is not None else 0)}


def test_the_table_is_the_registry() -> None:
    assert {kind[0] for kind in kinds()} == set(RULES) == {*CASES, *WITHOUT_TWIN}
    assert len(list(kinds())) == (len(RULES) - 1) * 4 * 7 + 7


@pytest.mark.slow
def test_every_kind_goes_on_in_a_fresh_process(run_python: Any, tmp_path: Path) -> None:
    halves, wholes = [], []
    for kind in kinds():
        optimizer, params = build(kind)
        train(optimizer, params, range(4))
        halves.append(packed(optimizer, params))
        train(optimizer, params, range(4, 8))
        wholes.append(packed(optimizer, params))
    torch.save(halves, tmp_path / "saved.pt")
    done = run_python("-m", "tests.optim.every_kind", "saved.pt", "result.pt")
    assert done.returncode == 0, done.stderr
    resumed = torch.load(tmp_path / "result.pt", weights_only=True)
    wrong = [
        kind
        for kind, whole, rest in zip(kinds(), wholes, resumed, strict=True)
        if not same_bits(flat(whole["weights"]), flat(rest["weights"]))
        or not same_bits(flat(whole["optimizer"]["state"]), flat(rest["optimizer"]["state"]))
        or whole["optimizer"]["lightning_fuse"] != rest["optimizer"]["lightning_fuse"]
    ]
    assert wrong == []
    # The control: half a training is another state, for every kind.
    assert not any(
        same_bits(flat(whole["weights"]), flat(half["weights"])) for whole, half in zip(wholes, halves, strict=True)
    )


@pytest.mark.parametrize("rule", [rule for rule in RULES if RULES[rule].moments])
def test_a_state_that_is_not_loaded_is_seen(rule: str) -> None:
    """The other control: weights alone do not do, for any rule that keeps state."""
    kind = (rule, "int8", torch.bfloat16, "split")
    optimizer, params = build(kind)
    train(optimizer, params, range(4))
    fresh, weights = build(kind, {name: p.detach() for name, p in params.items()})
    train(optimizer, params, range(4, 8))
    train(fresh, weights, range(4, 8))
    assert not same_bits(flat(packed(optimizer, params)["weights"]), flat(packed(fresh, weights)["weights"]))
