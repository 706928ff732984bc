"""One line says what runs: rule, format, masters, kernel, CPU level and threads; Fuse says it once."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import Fuse, FusedAdamW, FusedLARS
from lightning_fuse.kernels import KERNELS
from tests.cases import Four, batches, train


def params(dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter]]:
    return [
        ("w", Parameter(torch.ones(248, 128, dtype=dtype))),
        ("b", Parameter(torch.ones(256, dtype=dtype))),
    ]


def test_the_reference() -> None:
    said = FusedAdamW(params(), state="int8", kernel="reference").describe()
    assert said == "adamw, int8 state (0.8 % fp32), reference kernel"
    said = FusedLARS(params(torch.bfloat16), master="split", state="bf16", kernel="reference").describe()
    assert said == "lars+sgd_momentum, bf16 state, split masters, reference kernel"


@pytest.mark.skipif(bool(KERNELS["native"].unavailable_reason()), reason=KERNELS["native"].unavailable_reason())
def test_the_native_kernel_says_level_and_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        said = FusedAdamW(params(), state="int8").describe()
    finally:
        torch.set_num_threads(before)
    assert re.fullmatch(r"adamw, int8 state \(0\.8 % fp32\), native kernel \([\w-]+, [12] threads?\)", said)


def test_fuse_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.fabric"):
        train(Four(), batches(1, 1, 1), Fuse(optimizer="adamw_fused"))
    said = [record.getMessage() for record in caplog.records if "lightning_fuse:" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("lightning_fuse: adamw, fp32 state, ")
