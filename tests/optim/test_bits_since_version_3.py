"""Fifty steps of everything that can be built give the bits that format version 3 gave.

``python -m tests.optim.test_bits_since_version_3`` writes the digests anew: only a change of the format version may.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedLion, FusedSGD
from lightning_fuse.formats import MASTERS, STATE_FORMATS

DIGESTS = Path(__file__).parent.parent / "assets" / "bits_of_version_3.json"
STEPS = 50
SHAPES = ((3, 131), (5,), (2, 3, 43))
NOT_HASHED = {"step", "format"}  # their dtype and their text may change with the version; the counts are compared

ADAM: dict[str, Any] = {"lr": 0.013, "betas": (0.83, 0.957), "eps": 1e-3, "weight_decay": 0.07}
BUFFER: dict[str, Any] = {"lr": 0.02, "momentum": 0.87, "weight_decay": 0.07}
RULES: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **kw: FusedAdamW(p, **ADAM, **kw),
    "adamw_amsgrad": lambda p, **kw: FusedAdamW(p, **ADAM, amsgrad=True, **kw),
    "adam": lambda p, **kw: FusedAdam(p, **ADAM, **kw),
    "adam_amsgrad": lambda p, **kw: FusedAdam(p, **ADAM, amsgrad=True, maximize=True, **kw),
    "sgd": lambda p, **kw: FusedSGD(p, lr=0.02, weight_decay=0.07, **kw),
    "sgd_momentum": lambda p, **kw: FusedSGD(p, **BUFFER, dampening=0.15, **kw),
    "sgd_nesterov": lambda p, **kw: FusedSGD(p, **BUFFER, nesterov=True, **kw),
    "lion": lambda p, **kw: FusedLion(p, lr=0.003, betas=(0.83, 0.957), weight_decay=0.07, **kw),
    "lars": lambda p, **kw: FusedLARS(p, **BUFFER, trust_coefficient=0.23, **kw),
    "lars_nesterov": lambda p, **kw: FusedLARS(p, **BUFFER, trust_coefficient=0.23, nesterov=True, **kw),
    "lamb": lambda p, **kw: FusedLAMB(p, **ADAM, **kw),
}


class Kind(NamedTuple):
    """One combination."""

    rule: str
    state: str
    dtype: torch.dtype
    master: str

    @property
    def key(self) -> str:
        return f"{self.rule} {self.state} {str(self.dtype).removeprefix('torch.')} {self.master}"


def kinds() -> Iterator[Kind]:
    for rule in RULES:
        for state in STATE_FORMATS if rule != "sgd" else ("fp32",):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for name, master in MASTERS.items():
                    if dtype in master.dtypes:
                        yield Kind(rule, state, dtype, name)


def values(shape: tuple[int, ...], salt: int) -> Tensor:
    """Numbers from integer arithmetic alone, the same on every machine: of several sizes, some of them zero."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    word = (index * 2654435761 + salt * 40503 + 12345) % 4294967296
    word = (word * 1103515245 + 12345) % 2147483648
    size = torch.tensor([1.0, 0.25, 2.0**-7, 0.0])[(word >> 7) % 4]
    return (((word >> 11) % 4001 - 2000).to(torch.float32) * 2.0**-10 * size).view(shape)


def digest(kind: Kind, kernel: str) -> str:
    """The digest of weights and state after ``STEPS`` steps; the bias has no gradient in every third."""
    params = [Parameter((values(shape, 7 + i) + 0.125).to(kind.dtype)) for i, shape in enumerate(SHAPES)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = RULES[kind.rule](named, state=kind.state, master=kind.master, kernel=kernel)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = None if i == 1 and step % 3 == 2 else values(SHAPES[i], 100 * step + i).to(kind.dtype)
        optimizer.found_inf = torch.tensor(float(step == 20))
        optimizer.step()
    sha = hashlib.sha256()
    for i, p in enumerate(params):
        held = optimizer.state[p]
        assert int(held["step"]) == (34 if i == 1 else STEPS - 1)  # step 20 is skipped, and has no gradient there
        for key, tensor in [("", p.detach()), *sorted(held.items())]:
            if key not in NOT_HASHED:
                sha.update(key.encode() + bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return sha.hexdigest()[:24]


KNOWN: dict[str, str] = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}


def test_every_combination_has_a_digest() -> None:
    assert set(KNOWN) == {kind.key for kind in kinds()}
    assert len(set(KNOWN.values())) > 0.8 * len(KNOWN)  # they tell kinds apart


@pytest.mark.parametrize("rule", RULES)
def test_the_native_kernel_gives_the_bits_of_version_3(rule: str) -> None:
    found = {kind.key: digest(kind, "auto") for kind in kinds() if kind.rule == rule}
    assert found == {key: KNOWN[key] for key in found}


@pytest.mark.parametrize("rule", ["adamw", "lars_nesterov", "lamb"])
def test_the_reference_gives_the_bits_of_version_3(rule: str) -> None:
    some = [
        kind
        for kind in kinds()
        if kind.rule == rule and (kind.state, kind.master) in {("int8", "split8"), ("bf16", "none")}
    ]
    assert {kind.key: digest(kind, "reference") for kind in some} == {kind.key: KNOWN[kind.key] for kind in some}


if __name__ == "__main__":
    DIGESTS.write_text(
        json.dumps({kind.key: digest(kind, "auto") for kind in kinds()}, indent=0) + "\n", encoding="utf-8"
    )
