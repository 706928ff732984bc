"""One of our optimizers and a float64 oracle, update by update, each from our float32 state.

Rules with a sign or a norm in them amplify what went before, so a bound on a long path says little. Here every update
of a long run is compared by itself, weights and moments, and the largest error is given in units of the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_fuse.optim import FusedOptimizer
from tests.oracles import Array, Oracle, Track
from tests.tolerances import one_update_bound

SHAPES = ((7, 5), (11,), (), (2, 3, 4), (3, 130))
STEPS = 150
# Our names of moments, and the oracles' (SGD's and LARS's differ).
NAMES = {
    "exp_avg": ("m", "buffer"),
    "exp_avg_slow": ("slow",),
    "exp_avg_sq": ("v",),
    "momentum_buffer": ("v", "buffer"),
}


@dataclass(frozen=True)
class Update:
    """One parameter in one step.

    Attributes:
        number: Which update of this parameter it is, from 1.
        group: Settings of its group that differ from the optimizer's.
        grad: Its gradient.
        before: Weight and moments before.
        after: Weight and moments after.
    """

    number: int
    group: dict[str, Any]
    grad: Array
    before: dict[str, Array]
    after: dict[str, Array]


def second_group(settings: dict[str, Any]) -> dict[str, Any]:
    return {"lr": settings["lr"] * 1.5, "weight_decay": settings["weight_decay"] / 4}


def gradients(steps: int) -> list[tuple[bool, list[Array | None]]]:
    """Whether a step is applied, and gradients of which some are missing, zero, tiny or huge."""
    noise = np.random.default_rng(2)
    rows = []
    for _ in range(steps):
        row: list[Array | None] = []
        for shape in SHAPES:
            g = noise.normal(0.0, 1.0, shape) * noise.choice([1e-3, 1.0, 1.0, 30.0])
            chance = noise.random()
            row.append(None if chance < 0.1 else np.zeros(shape) if chance < 0.2 else np.asarray(g, dtype=np.float32))
        rows.append((noise.random() > 0.1, row))
    return rows


def record(make: Callable[[Any], FusedOptimizer], settings: dict[str, Any], steps: int = STEPS) -> list[Update]:
    """Runs our optimizer, two groups, and keeps every update; a skipped or missing one must change no bit."""
    noise = np.random.default_rng(1)
    params = [torch.nn.Parameter(torch.tensor(noise.uniform(-2, 2, s), dtype=torch.float32)) for s in SHAPES]
    optimizer = make([{"params": params[:2]}, {"params": params[2:], **second_group(settings)}])
    found, counts = [], [0] * len(params)
    for applied, row in gradients(steps):
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else torch.tensor(g, dtype=torch.float32)
        before = [_snapshot(optimizer, p) for p in params]
        optimizer.found_inf = torch.tensor(0.0 if applied else 1.0)
        optimizer.step()
        after = [_snapshot(optimizer, p) for p in params]
        for i, g in enumerate(row):
            if not applied or g is None:
                assert all(np.array_equal(after[i][key], value) for key, value in before[i].items())
                continue
            counts[i] += 1
            assert int(optimizer.state[params[i]]["step"]) == counts[i]
            group = second_group(settings) if i >= 2 else {}
            found.append(Update(counts[i], group, np.asarray(g, dtype=np.float64), before[i], after[i]))
    assert max(abs(u.after["theta"]).max() for u in found) < 1e3
    return found


def excess(updates: list[Update], oracle: type[Oracle], settings: dict[str, Any]) -> float:
    """The largest error of all updates, weights and moments, in units of the bound.

    Args:
        updates: From ``record``.
        oracle: What they are held to.
        settings: Its hyperparameters, those of the first group.
    """
    worst = 0.0
    for update in updates:
        one = oracle([update.before["theta"]], **{**settings, **update.group})
        track = one.tracks[0]
        track.t = update.number - 1
        track.averages = {key: update.before[name] for name, key in _shared(update.before)}
        one.step([update.grad])
        size = max(float(np.abs(update.before["theta"]).max()), float(np.abs(track.theta).max()))
        lr = {**settings, **update.group}["lr"]
        reach = max(getattr(one, "reach", 0.0), lr)
        worst = max(worst, _off(update.after["theta"], track.theta, one_update_bound(size, reach)))
        for name, key in _shared(update.after):
            if key in track.averages:
                worst = max(worst, _off(update.after[name], *_moment(track, key, update, reach / lr)))
    return worst


def _moment(track: Track, key: str, update: Update, reach: float) -> tuple[Array, float]:
    """The oracle's moment, and its bound; a second moment is made of squares."""
    value = track.averages[key]
    size = max(reach, float(np.abs(value).max()), float(np.abs(update.grad).max()))
    squares = float(np.square(update.grad).max()) if "exp_avg_sq" in update.after and key == "v" else 0.0
    return value, one_update_bound(0.0, max(size, squares))


def _off(found: Array, true: Array, bound: float) -> float:
    error = float(np.abs(found - true).max())
    return error / bound if np.isfinite(error) else np.inf


def _shared(state: dict[str, Array]) -> list[tuple[str, str]]:
    return [(name, key) for name in state if name in NAMES for key in NAMES[name]]


def _snapshot(optimizer: FusedOptimizer, p: torch.nn.Parameter) -> dict[str, Array]:
    held = {key: value for key, value in optimizer.state.get(p, {}).items() if key in NAMES}
    tensors = {"theta": p.detach(), **held}
    return {key: value.detach().double().numpy().copy() for key, value in tensors.items()}
