"""Lightning's search for a learning rate, under the step contract.

The search goes on until the loss diverges, and everything is put back afterwards. So a gradient that is not finite is
nothing to refuse there: it is applied, as stock Lightning applies it, or skipped where a loss scale skips it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fuse.step import StepContract


@contextmanager
def stock_policy(contract: StepContract) -> Iterator[None]:
    """Lets a contract treat gradients that are not finite as stock Lightning does.

    Args:
        contract: It has its own policy again afterwards.
    """
    policy = contract.policy
    kept = policy.on_nonfinite, policy.limit
    policy.on_nonfinite, policy.limit = ("step" if contract.loss_scale is None else "skip"), None
    try:
        yield
    finally:
        policy.on_nonfinite, policy.limit = kept
