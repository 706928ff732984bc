"""On a GPU the contract launches work and asks for no value. Shown with a device queue that refuses to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fuse.optim import FusedAdamW
from lightning_fuse.step import LossScale, StepContract

READS = ("_local_scalar_dense", "is_nonzero", "equal.default")


class UnreadableDevice(TorchDispatchMode):
    """Every operator that would make the host wait for a number raises; all others run."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(word in str(function) for word in READS):
            raise AssertionError(f"the host waited for a value: {function}")
        return function(*args, **(kwargs or {}))


class LaunchOnly:
    """Stands for a kernel on a device: it takes tensors and reads none."""

    name = "launch only"

    def __init__(self) -> None:
        self.launches: list[tuple[Tensor | None, Tensor | None]] = []

    def step(self, work: Sequence[Any], factor: Tensor | None, found_inf: Tensor | None) -> None:
        self.launches.append((factor, found_inf))


@pytest.fixture
def sums_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native sum returns a Python number; a device's stays where it is."""

    def total(grads: Sequence[Tensor]) -> Tensor:
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()

    monkeypatch.setattr("lightning_fuse.step.grad_stats.global_sum_of_squares", total)


def launch(contract: StepContract, look: Callable[[StepContract, FusedAdamW], None]) -> LaunchOnly:
    w = torch.nn.Parameter(torch.ones(3, 200))
    optimizer = FusedAdamW([("w", w)], lr=1e-2, state="int8")
    kernel = LaunchOnly()
    optimizer._choose_kernel = lambda: kernel  # type: ignore[assignment, return-value, method-assign]
    contract.scale(torch.tensor(1.0))
    w.grad = torch.full_like(w, 1024.0)
    contract.accumulate()
    with UnreadableDevice():
        look(contract, optimizer)
        contract.step(optimizer, clip_norm=0.5, window=1)
        assert contract.update() == []
    return kernel


@pytest.mark.usefixtures("sums_on_the_device")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("looked", [True, False])
def test_a_step_asks_for_no_value(scaled: bool, looked: bool) -> None:
    contract = StepContract(loss_scale=LossScale(1024.0) if scaled else None, deferred=True)
    kernel = launch(contract, (lambda c, o: c.unscale_(o, 1)) if looked else (lambda c, o: None))
    assert len(kernel.launches) == 1
    assert kernel.launches[0][1] is not None  # found_inf goes to the device, not to the host
    (outcome,) = contract.flush()
    assert (outcome.reason, outcome.global_step) == ("ok", 1)
    assert outcome.grad_norm == pytest.approx((1.0 if scaled else 1024.0) * 600**0.5)


@pytest.mark.usefixtures("sums_on_the_device")
def test_the_refusal_works() -> None:
    """An immediate contract does read, and is caught."""
    with pytest.raises(AssertionError, match="the host waited"):
        launch(StepContract(deferred=False), lambda c, o: None)


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_the_contract_runs_a_few_operators_whatever_the_number_of_parameters(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its 0.3 ms on the host go by, on any machine: ``scripts/bench_step.py --tasks overhead`` has the time."""
    total = torch.tensor(1.0, dtype=torch.float64)
    monkeypatch.setattr("lightning_fuse.step.grad_stats.global_sum_of_squares", lambda grads: total)
    counts = []
    for number in (3, 100):
        params = [torch.nn.Parameter(torch.ones(4, 200)) for _ in range(number)]
        optimizer, contract = FusedAdamW(params, lr=1e-2, state=state), StepContract(loss_scale=LossScale(1024.0))
        optimizer._choose_kernel = lambda: LaunchOnly()  # type: ignore[assignment, return-value, method-assign]
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(2):  # state is allocated in the first
            with Counting() as mode:
                contract.scale(torch.tensor(1.0))
                contract.accumulate()
                contract.step(optimizer, clip_norm=0.5, window=1)
                contract.update()
        counts.append(mode.count)
    assert counts[0] == counts[1] <= 30, counts
