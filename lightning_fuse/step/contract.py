"""The step contract: unscale, check, clip, update, move the loss scale; in this order, once per window.

With one of our optimizers the five acts are two passes over memory: one reduction gives norm and finiteness, and one
kernel multiplies each gradient by ``1 / loss_scale * window_factor * clip_coef`` in a register while it updates. With
torch's and others' optimizers the same acts run one after the other in memory, in the right order.

Use, in a plain loop or behind a framework::

    contract.scale(loss).backward(); contract.accumulate()        for every micro-batch of the window
    contract.step(optimizer, clip_norm=1.0, window=4)             for every optimizer
    outcomes = contract.update()                                  once: the loss scale moves here

On a CPU ``update`` tells what the steps did. On a GPU nothing is asked of the device: outcomes come one step later,
from the next ``update`` or, before a step whose learning rate depends on them, from ``flush``. A policy of "raise", or
an optimizer that is not ours, has to know before it may step, and waits.

What ``.grad`` holds afterwards: with our optimizers what backward left, still scaled and unclipped, unless ``unscale_``
or ``clip_norm_`` was called; with others the gradients that were applied. A skip leaves it likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.kernels.shards import local_part
from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.step.accumulation import AccumulationWindow, WindowPolicy
from lightning_fuse.step.grad_stats import (
    GradStats,
    UnscaledGrads,
    check_max_norm,
    compute_grad_stats,
    gradients,
    unwrapped,
)
from lightning_fuse.step.loss_scale import LossScale
from lightning_fuse.step.outcome import NonFinitePolicy, OnNonfinite, PendingStep, Reason, RunCounters, StepOutcome


class StepContract:
    """Runs the optimizer steps of one training run.

    Args:
        loss_scale: The dynamic loss scale; None where the precision needs none.
        on_nonfinite: What to do where a gradient is infinite or NaN: "skip" the step, "raise", or "step" all the same.
        window: What a window with fewer micro-batches than planned stands for: "mean", "sum", "drop" or "carry"; see
            ``accumulation.py``.
        max_consecutive_skips: Longest run of nonfinite steps of one optimizer; one more raises. None for no limit.
        deferred: Whether outcomes are read one step later; None: where gradients are on a GPU.

    Attributes:
        last: The outcome of the last step whose outcome is known.
        latest: All outcomes of the last training step that had any.
        policy: What becomes of gradients that are not finite.
        last_step_ms: Host time of the last optimizer step, look at the gradients included, in milliseconds.
        names: Names of parameters, for messages about optimizers that were given none.

    Raises:
        ValueError: A choice is unknown.
    """

    def __init__(
        self,
        *,
        loss_scale: LossScale | None = None,
        on_nonfinite: OnNonfinite = "skip",
        window: WindowPolicy = "mean",
        max_consecutive_skips: int | None = 50,
        deferred: bool | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.policy = NonFinitePolicy(on_nonfinite, max_consecutive_skips)
        self.window = AccumulationWindow(window)
        self.deferred = deferred
        self.last: StepOutcome | None = None
        self.latest: list[StepOutcome] = []
        self.last_step_ms: float | None = None
        self.names: Mapping[Tensor, str] = {}
        self.counters = RunCounters()
        self.reset()

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run, skipped ones included."""
        return self.counters.global_step

    @property
    def updates(self) -> int:
        """Applied optimizer steps of the run."""
        return self.counters.updates

    @property
    def skips(self) -> dict[str, int]:
        """Skipped steps by reason."""
        return dict(self.counters.skips)

    @property
    def contributions(self) -> int:
        """Micro-batches whose gradients the open window holds."""
        return self.window.count

    @property
    def in_flight(self) -> int:
        """Steps that have ended and whose outcome nobody has read yet; always 0 on a CPU."""
        return len(self._in_flight)

    def scale(self, loss: Tensor, window: int | None = None) -> Tensor:
        """The loss to call ``backward`` on.

        Args:
            loss: A scalar, any floating dtype.
            window: Micro-batches of a full window as of now, of which the loss carries its share, where that number
                may change while a window is open.

        Returns:
            The loss times the loss scale and the micro-batch's weight, where there are any.
        """
        weight = self.window.loss_weight(loss.device, window)
        weighted = loss if weight == 1.0 else loss * weight
        return weighted if self.loss_scale is None else self.loss_scale.scale(weighted)

    def accumulate(self) -> None:
        """Counts one micro-batch into the open window, after its backward."""
        self.window.accumulate()

    def skip_next(self) -> None:
        """Skips the next step, with the reason "user"; no counter of state moves."""
        self._skip_next = True

    def reset(self) -> None:
        """Forgets the window and the training step under way: their gradients will not be applied."""
        self.window.close()
        self._skip_next = False
        self._unscaled = UnscaledGrads()
        self._pending: list[PendingStep] = []  # of the training step under way
        self._in_flight: list[PendingStep] = []  # of ended ones, not read yet
        self._overflow: Tensor | None = None

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients have been unscaled in memory since its last step."""
        return unwrapped(optimizer) in self._unscaled

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer, window: int | None = None) -> None:
        """Unscales an optimizer's gradients in memory, for code that wants to look at them before the step.

        What is not finite now skips the step even if the gradients are repaired afterwards, with and without a scale.

        Args:
            optimizer: Whose gradients.
            window: Micro-batches of a full window; see ``step``.

        Raises:
            RuntimeError: They have been unscaled since the last step.
        """
        optimizer = unwrapped(optimizer)
        grads = gradients(optimizer)
        if grads:
            factor = self._factor(grads[0].device, window)
            self._unscaled.unscale(optimizer, grads, factor, on_host=self._on_host(grads, optimizer))

    @torch.no_grad()
    def clip_norm_(self, optimizer: Optimizer, max_norm: float, window: int | None = None) -> None:
        """Clips an optimizer's gradients in memory, unscaling them first.

        Args:
            optimizer: Whose gradients.
            max_norm: The largest global L2 norm wanted, in unscaled units.
            window: Micro-batches of a full window; see ``step``.

        Raises:
            ValueError: ``max_norm`` is not a finite number > 0.
        """
        check_max_norm(max_norm)
        optimizer = unwrapped(optimizer)
        grads = gradients(optimizer)
        if grads:
            if optimizer not in self._unscaled:
                self.unscale_(optimizer, window)
            self._unscaled.clip(optimizer, grads, max_norm, on_host=self._on_host(grads, optimizer))

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        window: int | None = None,
        index: int = 0,
        where: str = "",
        run: Callable[[], Any] | None = None,
    ) -> Any:
        """Steps one optimizer, or skips it; ``update`` tells the outcome.

        Args:
            optimizer: Ours, or any torch optimizer whose ``step`` needs no closure.
            clip_norm: Clip the global L2 norm, in unscaled units, to this; None does not clip.
            window: Micro-batches of a full window, each of which has contributed 1/window of its gradient; None where
                the caller has weighted them. Given, a window without contributions is no step.
            index: The optimizer's place among several, for the outcome.
            where: Where in the run this is, for messages, for instance "batch 17".
            run: What calls the optimizer's own step; None for a call without arguments.

        Returns:
            What the optimizer's own step returned; None where it was skipped.

        Raises:
            NonFiniteGradientError: A gradient is not finite and the policy is "raise", or too many steps in a row were
                skipped. Nothing has been written then, and the window is abandoned.
            ValueError: ``clip_norm`` is not a finite number > 0.
        """
        started = perf_counter()
        if clip_norm is not None:
            check_max_norm(clip_norm)
        optimizer = unwrapped(optimizer)
        grads = gradients(optimizer)
        earlier, returned = self._unscaled.pop(optimizer), None
        if self._skip_next:
            self._skip_next = False
            self._add(index, where, "user")
        elif not grads or (window is not None and self.window.count == 0):
            self._add(index, where, "no_grad")
        else:
            run = optimizer.step if run is None else run
            returned = self._check_and_step(optimizer, run, grads, earlier, clip_norm, window, index, where)
        if window is None:
            # The caller's own windows: the next one starts with the next backward.
            self.window.end_soon()
        self.last_step_ms = (perf_counter() - started) * 1e3
        return returned

    def update(self, waiting: Iterable[Optimizer] = ()) -> list[StepOutcome]:
        """Ends a training step: the loss scale moves once, whatever number of optimizers stepped.

        Args:
            waiting: Optimizers whose gradients are still being gathered over several training steps: where the loss
                scale moves, their gradients move with it.

        Returns:
            One outcome for each ``step`` since the last call, in order; on a GPU those of the training step before.

        Raises:
            NonFiniteGradientError: See ``flush``.
        """
        known = self.flush()
        pending, self._pending = self._pending, []
        if self.loss_scale is not None and self._overflow is not None:
            waiting = list(waiting)
            before = self.loss_scale.tensor() if waiting else None
            self.loss_scale.move(self._overflow)
            if before is not None:
                self._rescale(waiting, self.loss_scale.tensor() / before)
        self._overflow = None
        if pending:
            self.window.close()
        after = None if self.loss_scale is None else self.loss_scale.tensor()
        for step in pending:
            step.scale_after = after
            step.start_copy()
        self._in_flight = pending
        return known if any(map(self._is_deferred, pending)) else known + self.flush()

    def flush(self) -> list[StepOutcome]:
        """Reads what ended training steps did, as far as nobody has yet; waits for the device if it has to.

        Returns:
            One outcome for each of their steps, in order.

        Raises:
            NonFiniteGradientError: On a GPU: too many steps in a row were skipped.
        """
        known, self._in_flight = self._in_flight, []
        outcomes = [self._outcome(step) for step in known]
        if outcomes:
            self.latest, self.last = outcomes, outcomes[-1]
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Counters, loss scale and open window as plain data; on a GPU ``flush`` first, to have all steps counted."""
        return {
            "counters": self.counters.state_dict(),
            "window": self.window.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def resume_counts(self, steps: int) -> None:
        """Continues a run that kept no counts of updates: all its steps count as applied.

        Args:
            steps: Optimizer steps of the run so far.
        """
        self.counters = RunCounters()
        self.counters.global_step = self.counters.updates = steps

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was taken; a loss scale is kept where only one side has one.

        Args:
            state: What ``state_dict`` returned.
        """
        self.counters.load_state_dict(state["counters"])
        self.window.load_state_dict(state["window"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    # The acts.

    def _check_and_step(
        self,
        optimizer: Optimizer,
        run: Callable[[], Any],
        grads: list[Tensor],
        earlier: GradStats | None,
        clip_norm: float | None,
        window: int | None,
        index: int,
        where: str,
    ) -> Any:
        unscale = self._factor(grads[0].device, window) if earlier is None else None
        defer, on_host = self._may_defer(grads, optimizer), self._on_host(grads, optimizer)
        stats = compute_grad_stats(grads, unscale, earlier, clip_norm, on_host=on_host)
        found_inf = stats.found_inf
        skip_on, skipped = (None if self.policy.on_nonfinite == "step" else found_inf), False
        if not defer:
            bad = bool(found_inf) if stats.finite is None else not stats.finite
            if bad:
                self._check_policy(optimizer, index, where)
            # Known now: hooks around the optimizer's step run for applied updates only.
            skipped, skip_on = skip_on is not None and bad, None
        self._overflow = found_inf if self._overflow is None else torch.maximum(self._overflow, found_inf)
        returned = None if skipped else self._apply(optimizer, run, grads, stats.factor, skip_on)
        self._add(index, where, None, stats)
        return returned

    def _rescale(self, waiting: Iterable[Optimizer], ratio: Tensor) -> None:
        """Brings gradients that carry the old loss scale to the new one; on a GPU nobody asks whether they differ."""
        for optimizer in map(unwrapped, waiting):
            grads = [] if optimizer in self._unscaled else gradients(optimizer)
            if grads and (ratio.device.type != "cpu" or float(ratio) != 1.0):
                torch._foreach_mul_(list(map(local_part, grads)), ratio)

    def _apply(
        self,
        optimizer: Optimizer,
        run: Callable[[], Any],
        grads: list[Tensor],
        factor: Tensor | None,
        skip_on: Tensor | None,
    ) -> Any:
        if isinstance(optimizer, FusedOptimizer):
            optimizer.grad_factor, optimizer.found_inf = factor, skip_on
            try:
                return run()
            finally:
                optimizer.grad_factor = optimizer.found_inf = None
        if factor is not None:
            torch._foreach_mul_(list(map(local_part, grads)), factor)
        return run()

    def _may_defer(self, grads: list[Tensor], optimizer: Optimizer) -> bool:
        """Whether a step can be launched without knowing what it will do."""
        wanted = grads[0].device.type == "cuda" if self.deferred is None else self.deferred
        return wanted and self.policy.on_nonfinite != "raise" and isinstance(optimizer, FusedOptimizer)

    def _on_host(self, grads: list[Tensor], optimizer: Optimizer) -> bool:
        """Whether the numbers of a step are Python floats: a dozen operators on single numbers cost more."""
        return grads[0].device.type == "cpu" and not self._may_defer(grads, optimizer)

    def _is_deferred(self, step: PendingStep) -> bool:
        return bool(self.deferred) if self.deferred is not None else step.on_gpu

    def _factor(self, device: torch.device, window: int | None) -> Tensor | None:
        """``1 / loss_scale * window_factor`` as float32; None for 1."""
        factor = None if self.loss_scale is None else self.loss_scale.inverse(device)
        share = self.window.factor(window, device)
        return factor if share is None else share if factor is None else factor * share

    def _add(self, index: int, where: str, reason: Reason | None, stats: GradStats | None = None) -> None:
        scale = None if self.loss_scale is None else self.loss_scale.tensor()
        self._pending.append(PendingStep(index, where, self.window.count, stats, reason, scale))

    def _outcome(self, step: PendingStep) -> StepOutcome:
        """Counts a step, now that it is known what it did."""
        outcome = step.outcome(self.counters, self.policy)
        self.policy.check(self.counters.streak(step.optimizer))
        return outcome

    def _check_policy(self, optimizer: Optimizer, index: int, where: str) -> None:
        """Raises where the policy or the limit on skips says so, before anything is written."""
        where_now = where or f"step {self.counters.global_step + 1}"
        error = self.policy.error(optimizer, self.counters.streak(index), where_now, self.names)
        if error is not None:
            self.reset()
            raise error
