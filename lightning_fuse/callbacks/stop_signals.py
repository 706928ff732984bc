"""Signals as a wish to stop where a run can be continued: at the next closed window, with a checkpoint.

SIGINT (Ctrl-C), SIGTERM, SIGHUP (a terminal that closes) and SIGUSR1 (a scheduler that will start the job again) are
heard. The first signal is noted and training goes on; the owner of this asks ``due`` after every batch, saves and calls
``stop``. A second signal ends the run at once, from the last checkpoint that is there. Several ranks agree on the step,
whichever of them was told. Under a SLURM that requeues, SIGUSR1 and SIGTERM are left to Lightning; a handler of the
user's own, and a signal that is ignored (``nohup``), are left as they are.

A terminal and a scheduler send a signal to the whole process group. The workers of a data loader would die of it before
the window closes, so processes that are forked while a fit listens get a group of their own. They still end with the
process that started them, and when it ends them.
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

ENDING = ("SIGTERM", "SIGHUP", "SIGUSR1")  # those that end a run like a SIGTERM, where the system has them
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
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        self.wanted = None
        self._key = f"lightning_fuse/stop/{next(_fits)}"
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        for number in (getattr(signal, name) for name in ENDING if hasattr(signal, name)):
            if _is_free(trainer, number):
                self._before[number] = signal.signal(number, self._handle)

    def shield_workers(self) -> None:
        """Gives processes that are forked from now on a process group of their own, until ``restore``."""
        _listening.add(id(self))

    def restore(self) -> None:
        """Puts back the handlers that were there before; more than once is fine."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        _listening.discard(id(self))

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
            SIGTERMException: It was another one.
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


def _is_free(trainer: L.Trainer, number: int) -> bool:
    """Whether a signal has no other meaning than the system's or Lightning's usual one."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and number != signal.SIGHUP:
        return False
    usual: Any = signal.getsignal(number)
    if number == signal.SIGTERM:  # Lightning has put its own handler there
        usual = trainer._signal_connector._original_handlers.get(number)
    return usual in (None, signal.SIG_DFL)


_listening: set[int] = set()


def _leave_the_group() -> None:
    if _listening:
        os.setpgid(0, 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_the_group)
