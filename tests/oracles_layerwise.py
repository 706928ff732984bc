"""Independent optimizers for tests, as in ``oracles.py``: float64 NumPy, written from the papers.

Lion   Chen et al. 2023, program 1, with the decay applied first as the factor 1 - lr * lambda
LARS   You et al. 2017, algorithm 1: the local rate times gradient and decay goes into the momentum; the rate is 1 where
       a norm is 0, at most 100, and vectors and scalars take plain momentum
LAMB   You et al. 2020, algorithm 2 with phi the identity; the ratio is 1 where a norm is 0
"""

from __future__ import annotations

import numpy as np

from tests.oracles import Array, Oracle, Track


class Reaching(Oracle):
    """An oracle that also says what its last update was summed from.

    Attributes:
        reach: The largest sum of magnitudes behind an element of the last update; rounding errors are shares of it.
    """

    reach = 0.0


def norm(x: Array) -> float:
    """L2 norm, written without NumPy's linear algebra."""
    return float(np.sqrt(np.sum(np.square(x))))


class LionOracle(Reaching):
    """Lion; ``coupled=True`` puts the decay into the gradient, as Lion does not."""

    def update(self, track: Track, g: Array) -> None:
        s = self.settings
        lr, (beta1, beta2), decay = s["lr"], s["betas"], s["weight_decay"]
        if s.get("coupled"):
            g, decay = g + decay * track.theta, 0.0
        m = track.averages.get("m", np.zeros_like(track.theta))
        direction = np.sign(beta1 * m + (1 - beta1) * g)
        track.theta = track.theta * (1 - lr * decay) - lr * direction
        track.averages = {"m": beta2 * m + (1 - beta2) * g}
        self.reach = max(lr, lr * float(np.max(np.abs(m) + np.abs(g), initial=0.0)))


class LARSOracle(Reaching):
    """LARS; ``everywhere=True`` rescales vectors, too, and ``decoupled=True`` takes the decay out of the gradient."""

    def update(self, track: Track, g: Array) -> None:
        s, w = self.settings, track.theta
        lr, momentum, decay = s["lr"], s["momentum"], s["weight_decay"]
        rate = 1.0
        if (w.ndim > 1 or s.get("everywhere")) and norm(w) > 0 and norm(g) > 0:
            rate = min(100.0, s["trust_coefficient"] * norm(w) / (norm(g) + decay * norm(w) + s["eps"]))
        if s.get("decoupled"):
            w, push = w - lr * decay * w, rate * g
        else:
            push = rate * (g + decay * w)
        before = track.averages.get("v", np.zeros_like(w))
        v = momentum * before + push
        self.reach = 2 * lr * float(np.max(rate * (np.abs(g) + decay * np.abs(w)) + np.abs(before), initial=0.0))
        track.averages = {"v": v}
        track.theta = w - lr * (push + momentum * v if s["nesterov"] else v)


class LAMBOracle(Reaching):
    """LAMB; ``trusted=False`` leaves the ratio out, ``coupled=True`` puts the decay into the gradient."""

    def update(self, track: Track, g: Array) -> None:
        s, w = self.settings, track.theta
        lr, (beta1, beta2), decay = s["lr"], s["betas"], s["weight_decay"]
        if s.get("coupled"):
            g, decay = g + decay * w, 0.0
        zero = np.zeros_like(w)
        before = track.averages.get("m", zero)
        m = beta1 * before + (1 - beta1) * g
        v = beta2 * track.averages.get("v", zero) + (1 - beta2) * g**2
        track.averages = {"m": m, "v": v}
        m_hat, v_hat = m / (1 - beta1**track.t), v / (1 - beta2**track.t)
        u = m_hat / (np.sqrt(v_hat) + s["eps"]) + decay * w
        ratio = norm(w) / norm(u) if s.get("trusted", True) and norm(w) > 0 and norm(u) > 0 else 1.0
        summed = (np.abs(before) + np.abs(g)) / (1 - beta1**track.t) / (np.sqrt(v_hat) + s["eps"]) + decay * np.abs(w)
        self.reach = lr * ratio * float(np.max(summed, initial=0.0))
        track.theta = w - lr * ratio * u
