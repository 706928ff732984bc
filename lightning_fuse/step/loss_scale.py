"""The dynamic loss scale: the factor on the loss that keeps float16 gradients from vanishing.

It doubles after a number of applied steps in a row and halves after an overflow, as torch's GradScaler does
(Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740), but it has a floor: without one, a run of bad batches
drives it to zero, and the zero turns every weight into NaN. Its state is GradScaler's, so either can resume the other.
All of it lives on the device of the loss, and moving it asks the device for no value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class LossScale:
    """A dynamic loss scale.

    Args:
        init_scale: The scale of the first step.
        growth_factor: What the scale is multiplied by after ``growth_interval`` applied steps in a row; > 1.
        backoff_factor: What it is multiplied by after an overflow; in (0, 1).
        growth_interval: Applied steps in a row that let it grow.
        floor: The smallest value it takes.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        floor: float = 1.0,
    ) -> None:
        if not (math.isfinite(init_scale) and init_scale > 0):
            raise ValueError(f"init_scale={init_scale!r}: must be a finite number > 0")
        if not (math.isfinite(floor) and 0 < floor <= init_scale):
            raise ValueError(f"min_loss_scale={floor!r}: must be > 0 and at most the initial scale {init_scale:g}")
        if not (math.isfinite(growth_factor) and growth_factor > 1):
            raise ValueError(f"growth_factor={growth_factor!r}: must be a finite number > 1")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor={backoff_factor!r}: must be in (0, 1)")
        if growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval!r}: must be a whole number >= 1")
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.floor = floor
        self._scale = torch.tensor(init_scale, dtype=torch.float32)
        self._growth_tracker = torch.tensor(0, dtype=torch.int32)

    @classmethod
    def from_grad_scaler(cls, scaler: torch.amp.GradScaler, floor: float | None = None, **settings: Any) -> LossScale:
        """Takes over the settings and the state of a torch GradScaler.

        Args:
            scaler: The scaler; not changed.
            floor: See the class; None for 1, or the scale where that is smaller.
            **settings: Arguments of the class that win over the scaler's.

        Returns:
            A loss scale that continues where the scaler stands.
        """
        arguments = {
            "init_scale": scaler.get_scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            **settings,
        }
        made = cls(**arguments, floor=min(1.0, arguments["init_scale"]) if floor is None else floor)
        made._growth_tracker.fill_(scaler._get_growth_tracker())
        return made

    @property
    def value(self) -> float:
        """The scale as a number; reads it from the device."""
        return float(self._scale)

    def tensor(self) -> Tensor:
        """The scale as it is now, float32, 0-dimensional; later moves leave it alone."""
        return self._scale.clone()

    @property
    def growth_counter(self) -> int:
        """Applied steps in a row since the scale last moved; reads it from the device."""
        return int(self._growth_tracker)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on.

        Args:
            loss: A scalar, any floating dtype.

        Returns:
            ``loss * scale``, differentiable.
        """
        self._move_to(loss.device)
        return loss * self._scale

    def inverse(self, device: torch.device) -> Tensor:
        """What scaled gradients are multiplied by to unscale them.

        Args:
            device: Where the gradients live.

        Returns:
            float32, 0-dimensional.
        """
        self._move_to(device)
        return self._scale.double().reciprocal().to(torch.float32)

    def move(self, found_inf: Tensor) -> None:
        """Moves the scale after a step.

        Args:
            found_inf: float32, 0-dimensional; other than 0 means that a gradient overflowed.
        """
        self._move_to(found_inf.device)
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self._scale.clamp_(min=self.floor)

    def state_dict(self) -> dict[str, Any]:
        """Settings and state in the format of ``torch.amp.GradScaler.state_dict``."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_counter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` or GradScaler's returned; the floor stays as configured, or as low as the scale.

        Args:
            state: Settings and state.

        Raises:
            ValueError: Entries are missing.
        """
        missing = [key for key in STATE_KEYS if key not in state]
        if missing:
            raise ValueError(f"not a loss scale's state: {', '.join(missing)} missing of {', '.join(STATE_KEYS)}")
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.floor = min(self.floor, float(state["scale"]))
        self._scale.fill_(float(state["scale"]))
        self._growth_tracker.fill_(int(state["_growth_tracker"]))

    def _move_to(self, device: torch.device) -> None:
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._growth_tracker = self._growth_tracker.to(device)
