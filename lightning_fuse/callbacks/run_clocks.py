"""The three clocks of a run: training, validation, wall.

They run on a monotonic counter, never go backwards, continue over a resume and over a second ``fit``, and stand still
while no ``fit`` is running, so that downtime is never counted:

- **train**: from the first batch to the end of training, without validations;
- **validation**: validations during training, from the last batch before them (their loaders start then). The sanity
  check before training is none;
- **wall**: everything inside ``fit``, from its setup to its end. Always at least the sum of the other two.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any


class Stopwatch:
    """Seconds that add up between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._kept = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far, those since the last ``start`` included."""
        running = 0.0 if self._since is None else max(0.0, perf_counter() - self._since)
        return self._kept + running

    def start(self, since: float | None = None) -> None:
        """Runs, from now or from an earlier ``perf_counter()``; without effect on a running watch."""
        if self._since is None:
            self._since = perf_counter() if since is None else since

    def stop(self, at: float | None = None) -> None:
        """Stands still, from now or from an earlier ``perf_counter()``; without effect on a standing watch."""
        if self._since is not None:
            self._kept += max(0.0, (perf_counter() if at is None else at) - self._since)
            self._since = None

    def continue_from(self, seconds: float) -> None:
        """Replaces what was counted before the last ``start``."""
        self._kept = max(0.0, float(seconds))


class RunClocks:
    """Train, validation and wall clock, moved by the callback that owns them.

    The owner calls ``fit_begins`` in ``setup``, ``train_begins`` in ``on_train_start``, ``batch_ends`` in
    ``on_train_batch_end``, ``validation_begins`` and ``validation_ends`` around every validation but the sanity check,
    ``train_ends`` in ``on_train_end`` and ``fit_ends`` in ``on_fit_end`` and ``on_exception``.
    """

    def __init__(self) -> None:
        self.train = Stopwatch()
        self.validation = Stopwatch()
        self.wall = Stopwatch()
        self._batch_end: float | None = None

    def fit_begins(self) -> None:
        """The wall clock runs."""
        self.wall.start()

    def train_begins(self) -> None:
        """The train clock runs; the wall clock too if nobody started it."""
        self.wall.start()
        self.train.start()
        self._batch_end = None

    def batch_ends(self) -> None:
        """Remembers when, as a validation may follow."""
        self._batch_end = perf_counter()

    def validation_begins(self) -> None:
        """Hands over from the train clock to the validation clock, as of the last batch."""
        self.train.stop(self._batch_end)
        self.validation.start(self._batch_end)

    def validation_ends(self) -> None:
        """Hands back."""
        now = perf_counter()
        self.validation.stop(now)
        self.train.start(now)
        self._batch_end = None

    def train_ends(self) -> None:
        """Train and validation clock stand still."""
        self.train.stop()
        self.validation.stop()

    def fit_ends(self) -> None:
        """All clocks stand still."""
        self.train_ends()
        self.wall.stop()

    def state_dict(self) -> dict[str, float]:
        """Seconds of each clock."""
        return {"train": self.train.seconds, "validation": self.validation.seconds, "wall": self.wall.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from saved seconds, without what lay between.

        Args:
            state: What ``state_dict`` returned.
        """
        self.train.continue_from(state["train"])
        self.validation.continue_from(state["validation"])
        self.wall.continue_from(state["wall"])
