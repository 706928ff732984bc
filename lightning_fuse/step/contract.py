"""The step contract: unscale, check, clip, update, move the loss scale; in this order, once per window.

With one of our optimizers the five acts are two passes over memory: one reduction gives norm and finiteness, and one
kernel multiplies each gradient by ``1 / loss_scale * window_factor * clip_coef`` in a register while it updates. With
torch's and others' optimizers the same acts run one after the other in memory, in the right order.

Use, in a plain loop or behind a framework::

    contract.scale(loss).backward(); contract.contribute()        for every micro-batch of the window
    contract.step(optimizer, clip_norm=1.0, window=4)             for every optimizer
    outcomes = contract.settle()                                  once: the loss scale moves here

What ``.grad`` holds afterwards: with our optimizers what backward left, still scaled and unclipped, unless ``unscale_``
or ``clip_norm_`` was called; with others the gradients that were applied. A skip leaves it likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fuse.optim.fused import FusedOptimizer
from lightning_fuse.registry import unknown_name
from lightning_fuse.step.loss_scale import LossScale
from lightning_fuse.step.outcome import REASONS, Reason, StepOutcome
from lightning_fuse.step.verdict import check_max_norm, first_nonfinite, gradients, judge
from lightning_fuse.step.window import AccumulationWindow, WindowPolicy

OnNonfinite = Literal["skip", "raise", "step"]


class NonFiniteGradientError(RuntimeError):
    """A gradient is infinite or NaN and the policy is to stop; raised before anything is written."""


@dataclass
class _Looked:
    """What is known of an optimizer whose gradients were unscaled in memory."""

    found_inf: Tensor
    grad_norm: Tensor | None = None
    clip_coef: Tensor | None = None


@dataclass
class _Counters:
    global_step: int = 0
    updates: int = 0
    streak: int = 0
    skips: dict[str, int] = field(default_factory=lambda: {reason: 0 for reason in REASONS if reason != "ok"})


class StepContract:
    """Runs the optimizer steps of one training run.

    Args:
        loss_scale: The dynamic loss scale; None where the precision needs none.
        on_nonfinite: What to do where a gradient is infinite or NaN: "skip" the step, "raise", or "step" all the same.
        window: What a window with fewer micro-batches than planned stands for: "mean", "sum", "drop" or "carry"; see
            ``window.py``.
        max_consecutive_skips: Longest run of nonfinite steps; one more raises. None for no limit.

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
    ) -> None:
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(unknown_name("on_nonfinite", on_nonfinite, get_args(OnNonfinite)))
        if max_consecutive_skips is not None and max_consecutive_skips < 1:
            raise ValueError(f"max_consecutive_skips={max_consecutive_skips!r}: must be >= 1, or None for no limit")
        self.loss_scale = loss_scale
        self.on_nonfinite = on_nonfinite
        self.window = AccumulationWindow(window)
        self.max_consecutive_skips = max_consecutive_skips
        self.last: StepOutcome | None = None
        self.last_step_ms: float | None = None  # host time of the last optimizer step, verdict included
        self.names: dict[Tensor, str] = {}  # for messages about optimizers that were given no names
        self._counters = _Counters()
        self._vetoed = False
        self._looked: dict[int, _Looked] = {}
        self._pending: list[StepOutcome] = []
        self._overflow: Tensor | None = None

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run, skipped ones included."""
        return self._counters.global_step

    @property
    def updates(self) -> int:
        """Applied optimizer steps of the run."""
        return self._counters.updates

    @property
    def skips(self) -> dict[str, int]:
        """Skipped steps by reason."""
        return dict(self._counters.skips)

    @property
    def contributions(self) -> int:
        """Micro-batches whose gradients the open window holds."""
        return self.window.count

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on.

        Args:
            loss: A scalar, any floating dtype.

        Returns:
            The loss times the loss scale and the micro-batch's weight, where there are any.
        """
        share = self.window.share(loss.device)
        weighted = loss if share == 1.0 else loss * share
        return weighted if self.loss_scale is None else self.loss_scale.scale(weighted)

    def contribute(self) -> None:
        """Counts one micro-batch into the open window, after its backward."""
        self.window.contribute()

    def veto(self) -> None:
        """Skips the next step, with the reason "user"; no counter of state moves."""
        self._vetoed = True

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients have been unscaled in memory since its last step."""
        return id(optimizer) in self._looked

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer, window: int | None = None) -> None:
        """Unscales an optimizer's gradients in memory, for code that wants to look at them before the step.

        Args:
            optimizer: Whose gradients.
            window: Micro-batches of a full window; see ``step``.

        Raises:
            RuntimeError: They have been unscaled since the last step.
        """
        if id(optimizer) in self._looked:
            raise RuntimeError(
                "the gradients of this optimizer are unscaled already: unscale once per step, "
                "before the first look at them"
            )
        grads = gradients(optimizer)
        if not grads:
            return
        factor = self._factor(grads[0].device, window)
        found_inf = torch.zeros((), dtype=torch.float32, device=grads[0].device)
        if factor is not None:
            found_inf = judge(grads, factor).found_inf
            torch._foreach_mul_(grads, factor)
        self._looked[id(optimizer)] = _Looked(found_inf)

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
        grads = gradients(optimizer)
        if not grads:
            return
        if id(optimizer) not in self._looked:
            self.unscale_(optimizer, window)
        verdict = judge(grads, _one(grads[0].device))
        coef = verdict.clip_coef(max_norm)
        torch._foreach_mul_(grads, coef)
        looked = self._looked[id(optimizer)]
        looked.grad_norm = verdict.grad_norm if looked.grad_norm is None else looked.grad_norm
        looked.clip_coef = coef if looked.clip_coef is None else looked.clip_coef * coef

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        window: int | None = None,
        index: int = 0,
        where: str = "",
    ) -> None:
        """Steps one optimizer, or skips it; ``settle`` tells the outcome.

        Args:
            optimizer: Ours, or any torch optimizer whose ``step`` needs no closure.
            clip_norm: Clip the global L2 norm, in unscaled units, to this; None does not clip.
            window: Micro-batches of a full window, each of which has contributed 1/window of its gradient; None where
                the caller has weighted them. Given, a window without contributions is no step.
            index: The optimizer's place among several, for the outcome.
            where: Where in the run this is, for messages, for instance "batch 17".

        Raises:
            NonFiniteGradientError: A gradient is not finite and the policy is "raise", or too many steps in a row were
                skipped. Nothing has been written then.
            ValueError: ``clip_norm`` is not a finite number > 0.
        """
        started = perf_counter()
        if clip_norm is not None:
            check_max_norm(clip_norm)
        grads = gradients(optimizer)
        looked = self._looked.pop(id(optimizer), None)
        if self._vetoed:
            self._vetoed = False
            self._skip("user", index)
        elif not grads or (window is not None and self.window.count == 0):
            self._skip("no_grad", index)
        else:
            self._judge_and_step(optimizer, grads, looked, clip_norm, window, index, where)
        self.last_step_ms = (perf_counter() - started) * 1e3

    def settle(self) -> list[StepOutcome]:
        """Ends a training step: the loss scale moves once, whatever number of optimizers stepped.

        Returns:
            One outcome for each ``step`` since the last call, in order.
        """
        pending, self._pending = self._pending, []
        if self.loss_scale is not None and self._overflow is not None:
            self.loss_scale.move(self._overflow)
        self._overflow = None
        if pending:
            self.window.close()
        after = None if self.loss_scale is None else self.loss_scale.value
        outcomes = [replace(outcome, loss_scale_after=after) for outcome in pending]
        if outcomes:
            self.last = outcomes[-1]
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale as plain data."""
        counters = self._counters
        return {
            "global_step": counters.global_step,
            "updates": counters.updates,
            "streak": counters.streak,
            "skips": dict(counters.skips),
            "window": self.window.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def resume_counts(self, steps: int) -> None:
        """Continues a run that kept no counts of updates: all its steps count as applied.

        Args:
            steps: Optimizer steps of the run so far.
        """
        self._counters = _Counters(global_step=steps, updates=steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was taken; a loss scale is kept where only one side has one.

        Args:
            state: What ``state_dict`` returned.
        """
        counters = self._counters
        counters.global_step, counters.updates = int(state["global_step"]), int(state["updates"])
        counters.streak = int(state["streak"])
        counters.skips.update({reason: int(count) for reason, count in state["skips"].items()})
        self.window.load_state_dict(state["window"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    # The acts.

    def _judge_and_step(
        self,
        optimizer: Optimizer,
        grads: list[Tensor],
        looked: _Looked | None,
        clip_norm: float | None,
        window: int | None,
        index: int,
        where: str,
    ) -> None:
        one = _one(grads[0].device)
        factor = one if looked is not None else self._factor(grads[0].device, window, one)
        verdict = judge(grads, factor)
        found_inf, grad_norm, coef = verdict.found_inf, verdict.grad_norm, None
        if looked is not None:
            # What overflowed before somebody looked stays an overflow, whatever was done to the gradients since.
            found_inf = torch.maximum(found_inf, looked.found_inf)
            grad_norm = grad_norm if looked.grad_norm is None else looked.grad_norm
            coef = looked.clip_coef
        if clip_norm is not None:
            now = verdict.clip_coef(clip_norm)
            factor = factor * now
            coef = now if coef is None else coef * now
        bad = bool(found_inf)
        if bad and self.on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f"a gradient is not finite{_at(where)}: first in {first_nonfinite(optimizer, self.names)}; "
                'nothing was written. Use on_nonfinite="skip" to leave such steps out'
            )
        self._overflow = found_inf if self._overflow is None else torch.maximum(self._overflow, found_inf)
        applied = not bad or self.on_nonfinite == "step"
        if applied:
            self._apply(optimizer, grads, None if factor is one else factor)
        else:
            self._check_streak(optimizer, where)
        self._count("ok" if applied else "nonfinite", applied)
        clip_coef = 1.0 if coef is None else float(coef)
        self._file(index, "ok" if applied else "nonfinite", applied, float(grad_norm), clip_coef)

    def _apply(self, optimizer: Optimizer, grads: list[Tensor], factor: Tensor | None) -> None:
        if isinstance(optimizer, FusedOptimizer):
            optimizer.grad_factor = factor
            try:
                optimizer.step()
            finally:
                optimizer.grad_factor = None
            return
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        optimizer.step()

    def _factor(self, device: torch.device, window: int | None, neutral: Tensor | None = None) -> Any:
        """``1 / loss_scale * window_factor`` as float32, or ``neutral`` where both are 1."""
        factor = None if self.loss_scale is None else self.loss_scale.inverse(device)
        share = self.window.factor(window, device)
        if share is not None:
            factor = share if factor is None else factor * share
        return neutral if factor is None else factor

    def _skip(self, reason: Reason, index: int) -> None:
        self._count(reason, False)
        self._file(index, reason, False, None, 1.0)

    def _count(self, reason: Reason, applied: bool) -> None:
        counters = self._counters
        counters.global_step += 1
        if applied:
            counters.updates += 1
            counters.streak = 0
        else:
            counters.skips[reason] += 1
            counters.streak += reason == "nonfinite"

    def _file(self, index: int, reason: Reason, applied: bool, grad_norm: float | None, clip_coef: float) -> None:
        scale = None if self.loss_scale is None else self.loss_scale.value
        counters = self._counters
        self._pending.append(
            StepOutcome(
                counters.global_step, counters.updates, applied, reason, grad_norm, clip_coef, scale, scale,
                self.window.count, index,
            )
        )  # fmt: skip

    def _check_streak(self, optimizer: Optimizer, where: str) -> None:
        limit, streak = self.max_consecutive_skips, self._counters.streak
        if limit is not None and streak >= limit:
            first = self._counters.global_step + 1 - streak
            raise NonFiniteGradientError(
                f"{streak + 1} steps in a row had gradients that are not finite (steps {first} to "
                f"{self._counters.global_step + 1}{_at(where)}): first in {first_nonfinite(optimizer, self.names)}. "
                "The weights are those before the first of them. Lower the learning rate, look at these batches, "
                f"or allow more with max_consecutive_skips (now {limit})"
            )


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _at(where: str) -> str:
    return f" at {where}" if where else ""
