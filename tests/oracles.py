"""Independent optimizers for tests: float64 NumPy, written from the papers, sharing nothing with the package.

Adam     Kingma & Ba 2015, algorithm 1, with L2 decay in the gradient
AdamW    Loshchilov & Hutter 2019, algorithm 2, with the decay factor 1 - lr * lambda as in torch
AMSGrad  Reddi et al. 2018, algorithm 2, bias-corrected as in torch: max over the uncorrected second moments
AdEMAMix Pagliardini et al. 2024, algorithm 1 and its schedules of alpha and beta3
SGD      Polyak's momentum and Nesterov's in the form of torch.optim.SGD: the first buffer is the gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Track:
    """One parameter of an oracle: its value, its own count of updates and its running averages."""

    theta: Array
    t: int = 0
    averages: dict[str, Array] = field(default_factory=dict)


class Oracle:
    """A float64 optimizer over one group of parameters.

    Args:
        params: Starting values; copied.
        settings: Hyperparameters by torch's names.
    """

    def __init__(self, params: Sequence[Array], **settings: Any) -> None:
        self.settings = settings
        self.tracks = [Track(np.array(p, dtype=np.float64)) for p in params]

    def step(self, grads: Sequence[Array | None], applied: bool = True) -> None:
        """One step: None leaves a parameter out of it, ``applied=False`` leaves out all of them."""
        if not applied:
            return
        for track, grad in zip(self.tracks, grads, strict=True):
            if grad is not None:
                track.t += 1
                sign = -1.0 if self.settings.get("maximize") else 1.0
                self.update(track, sign * np.asarray(grad, dtype=np.float64))

    def update(self, track: Track, g: Array) -> None:
        raise NotImplementedError

    @property
    def values(self) -> list[Array]:
        return [track.theta for track in self.tracks]


class AdamOracle(Oracle):
    """Adam; ``decoupled=True`` makes it AdamW."""

    def update(self, track: Track, g: Array) -> None:
        s = self.settings
        lr, (beta1, beta2), decay = s["lr"], s["betas"], s["weight_decay"]
        if s["decoupled"]:
            track.theta = track.theta - lr * decay * track.theta
        else:
            g = g + decay * track.theta
        zero = np.zeros_like(track.theta)
        m = beta1 * track.averages.get("m", zero) + (1 - beta1) * g
        v = beta2 * track.averages.get("v", zero) + (1 - beta2) * g**2
        peak = np.maximum(track.averages.get("peak", zero), v)
        track.averages = {"m": m, "v": v, "peak": peak}
        m_hat = m / (1 - beta1**track.t)
        v_hat = (peak if s["amsgrad"] else v) / (1 - beta2**track.t)
        track.theta = track.theta - lr * m_hat / (np.sqrt(v_hat) + s["eps"])


class SGDOracle(Oracle):
    """SGD, plain or with momentum."""

    def update(self, track: Track, g: Array) -> None:
        s = self.settings
        g = g + s["weight_decay"] * track.theta
        direction = g
        if s["momentum"]:
            buffer = g if track.t == 1 else s["momentum"] * track.averages["buffer"] + (1 - s["dampening"]) * g
            track.averages = {"buffer": buffer}
            direction = g + s["momentum"] * buffer if s["nesterov"] else buffer
        track.theta = track.theta - s["lr"] * direction


class AdEMAMixOracle(Oracle):
    """AdEMAMix as in the paper's appendix: schedules in logarithms, weight decay inside the bracket of the update."""

    def update(self, track: Track, g: Array) -> None:
        s = self.settings
        beta1, beta2, beta3 = s["betas"]
        alpha, t = s["alpha"], track.t
        if s["t_alpha"]:
            alpha = min(t * alpha / s["t_alpha"], alpha)
        if s["t_beta3"] and t < s["t_beta3"]:
            first, last, share = np.log(beta1), np.log(beta3), t / s["t_beta3"]
            beta3 = min(np.exp(first * last / ((1 - share) * last + share * first)), beta3)
        zero = np.zeros_like(track.theta)
        m1 = beta1 * track.averages.get("m", zero) + (1 - beta1) * g
        m2 = beta3 * track.averages.get("slow", zero) + (1 - beta3) * g
        v = beta2 * track.averages.get("v", zero) + (1 - beta2) * g**2
        track.averages = {"m": m1, "slow": m2, "v": v}
        mixed = m1 / (1 - beta1**t) + alpha * m2
        root = np.sqrt(v / (1 - beta2**t)) + s["eps"]
        self.reach = s["lr"] * max(1.0, float(np.abs(mixed / root).max(initial=0.0)))
        track.theta = track.theta - s["lr"] * (mixed / root + s["weight_decay"] * track.theta)


class StandStill(Oracle):
    """A negative control: an optimizer that does nothing."""

    def update(self, track: Track, g: Array) -> None:
        return
