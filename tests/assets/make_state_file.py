"""Writes a file of optimizer state as the package that is imported writes it; made once for every format version.

    PYTHONPATH=CHECKOUT python tests/assets/make_state_file.py OUT && gzip -9 -n OUT

state_v1.pt.gz was written by the last commit before format version 2, the others by a commit of their version. Every
later version reads them (tests/optim/checkpoint/test_schema.py); when the format version goes up, another file joins
them, and none is ever written again. Beside weights and state a file holds what its own package read back of them:
float32 moments in the rule's order, then the weight, stacked.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.formats.format import state_tensors

SHAPES = {"wide": (2, 150), "bias": (7,)}
ADAM = {"lr": 0.01, "betas": (0.8, 0.98), "eps": 0.02, "weight_decay": 0.2}
KINDS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "fp32": (FusedAdamW, {**ADAM, "state": "fp32"}, torch.float32),
    "bf16": (FusedAdamW, {**ADAM, "state": "bf16"}, torch.float32),
    "int8": (FusedAdamW, {**ADAM, "state": "int8"}, torch.float32),
    "amsgrad": (FusedAdamW, {**ADAM, "state": "int8", "amsgrad": True}, torch.float32),
    "momentum": (FusedSGD, {"lr": 0.1, "momentum": 0.8, "state": "int8_bf16"}, torch.float32),
    "copy": (FusedAdamW, {**ADAM, "state": "fp32", "master": "fp32"}, torch.bfloat16),
    "split": (FusedAdamW, {**ADAM, "state": "int8", "master": "split"}, torch.bfloat16),
    "split8": (FusedAdamW, {**ADAM, "state": "bf16", "master": "split8"}, torch.bfloat16),
}


def decoded(optimizer: Any, group: Any, name: str, p: torch.Tensor) -> list[torch.Tensor]:
    """The moments of one parameter as this package reads them."""
    if hasattr(optimizer, "specs"):
        rule = next(spec.rule for spec in optimizer.specs() if spec.param is p)
    else:  # up to version 3
        rule = optimizer._rule(group)
    fmt = STATE_FORMATS[optimizer.formats()[name]]
    codecs = [fmt.codec(moment) for moment in rule.moments]
    kept = [state_tensors(m, c, optimizer.state[p], tuple(p.shape)) for m, c in zip(rule.moments, codecs, strict=True)]
    try:
        from lightning_fuse.formats.format import decode_moments

        return list(decode_moments(rule.moments, codecs, kept))
    except ImportError:  # version 1
        return [codec.decode(parts) for codec, parts in zip(codecs, kept, strict=True)]


def one(make: Any, settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A short training, and all there is to know of it."""
    generator = torch.Generator().manual_seed(11)
    params = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }
    optimizer = make(params.items(), **settings)
    for _ in range(5):
        for p in params.values():
            p.grad = (torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator)).to(dtype)
        optimizer.step()
    group, result = optimizer.param_groups[0], {}
    for name, p in params.items():
        master = MASTERS[settings.get("master", "none")]
        parts = tuple(optimizer.state[p][part.suffix] for part in master.parts(tuple(p.shape)))
        result[name] = torch.stack([*decoded(optimizer, group, name, p), master.join(p.detach(), parts)])
    weights = {name: p.detach().clone() for name, p in params.items()}
    return {"weights": weights, "optimizer": optimizer.state_dict(), "decoded": result}


if __name__ == "__main__":
    torch.save({word: one(*kind) for word, kind in KINDS.items()}, sys.argv[1])
