"""SIGTERM and SIGINT as a wish to stop where a run can be continued: at the next closed window, with a checkpoint.

The first signal is noted and training goes on; whoever owns this asks ``due`` after every batch, saves and calls
``stop``. A second signal ends the run at once, from the last checkpoint that is there. Several ranks agree on the step,
whichever of them was told. SIGUSR1, and SIGTERM under a SLURM that requeues, are left to Lightning, a handler of the
user's own is left to the user.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

NOTICE = b"\n%s: stopping after this window, with a checkpoint; once more to stop at once\n"
_fits = itertools.count()  # so that the ranks of a second fit do not find the wish of the first


class StopSignals:
    """The signals of one fit.

    Attributes:
        wanted: The signal that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.wanted: int | None = None
        self._before: dict[int, Any] = {}
        self._key = ""

    def install(self, trainer: L.Trainer) -> None:
        """Listens from now on; in the main thread only, as Python has it.

        Args:
            trainer: Its loop has started, so that Lightning has set its own handlers.
        """
        self.wanted = None
        self._key = f"lightning_fuse/stop/{next(_fits)}"
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        if _is_free(trainer):
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Puts back the handlers that were there before; more than once is fine."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def due(self, trainer: L.Trainer) -> bool:
        """Whether the run stops here; every rank asks after every batch and gets the same answer.

        Args:
            trainer: The trainer.
        """
        if trainer.fit_loop._should_accumulate():
            return False
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return self.wanted is not None
        # No rank can end the next step before this one has begun it, so all of them see the wish in time.
        store = dist.distributed_c10d._get_default_store()
        if self.wanted is not None:
            store.compare_set(self._key, "", f"{trainer.global_step + 1} {self.wanted}")
        if not store.check([self._key]):
            return False
        step, number = store.get(self._key).decode().split()
        self.wanted = int(number)
        return trainer.global_step >= int(step)

    def stop(self, trainer: L.Trainer) -> NoReturn:
        """Ends the fit as the signal would have.

        Args:
            trainer: Is told that a SIGTERM came.

        Raises:
            KeyboardInterrupt: It was SIGINT.
            SIGTERMException: It was SIGTERM.
        """
        self.restore()
        if self.wanted == signal.SIGINT:
            raise KeyboardInterrupt
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wanted is None:
            self.wanted = number
            os.write(1, NOTICE % signal.Signals(number).name.encode())  # print may be what was interrupted
            return
        self.restore()
        raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException


def _is_free(trainer: L.Trainer) -> bool:
    """Whether SIGTERM has no other meaning than Lightning's usual one."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return False
    return trainer._signal_connector._original_handlers.get(signal.SIGTERM) in (None, signal.SIG_DFL)
