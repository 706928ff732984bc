"""Optimizers that are not ours run under the contract with their own step: wrappers, arguments, closures, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_fuse.callbacks import Fuse
from lightning_fuse.plugins.closures import check_closure, needs_closure
from lightning_fuse.step import LossScale, StepContract

BATCHES = [1.0, 2.0, 3.0, 4.0]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Lookahead(Optimizer):
    """Keeps its base under ``optimizer``; every second step goes half-way back."""

    def __init__(self, base: Optimizer) -> None:
        self.optimizer, self.calls = base, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]
        super().__init__(base.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(params, self.slow, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss


class Scaled(SGD):
    """Takes an argument of its own and returns something of its own."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] * scale)
        return f"stepped {scale}"


class Insists(SGD):
    """Wants a closure, and only its loss."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure, please")
        loss = closure()
        super().step()
        self.losses = [*getattr(self, "losses", []), None if loss is None else float(loss)]
        return loss


class SAM(Optimizer):
    """Climbs first, evaluates again there, comes back and steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        params = [p for group in self.param_groups for p in group["params"]]
        climbed = [p.grad.clone() for p in params]
        for p, by in zip(params, climbed, strict=True):
            p.data.add_(by)
            p.grad = None
        loss = closure()
        for p, by in zip(params, climbed, strict=True):
            p.data.sub_(by)
        self.base.step()
        return loss


class Net(LightningModule):
    def __init__(self, make: Any, by_hand: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
        self.make, self.arguments, self.returned = make, arguments, []
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Tensor) -> Tensor:
        loss = (self.w * batch).sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.returned.append(optimizer.step(**self.arguments))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.returned.append(optimizer.step(closure=optimizer_closure, **self.arguments))

    def configure_optimizers(self) -> Optimizer:
        self.made = self.make([self.w])
        return self.made


def fit(module: Net, *callbacks: Any, plugins: Any = None) -> Net:
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), plugins=plugins, **QUIET)
    trainer.fit(module, DataLoader(torch.tensor(BATCHES), batch_size=None))
    return module


def lookahead(params: Any) -> Optimizer:
    return Lookahead(SGD(params, lr=0.1, momentum=0.5))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_wrapper_with_a_base_takes_its_own_steps(by_hand: bool, half: bool) -> None:
    def plugins() -> Any:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)) if half else None

    ours = fit(Net(lookahead, by_hand), Fuse(optimizer=None), plugins=plugins())
    stock = fit(Net(lookahead, by_hand))
    assert ours.made.calls == 4
    torch.testing.assert_close(ours.w, stock.w, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_wrapper_in_a_plain_contract(scale: float | None) -> None:
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = lookahead([w])
    contract = StepContract(loss_scale=None if scale is None else LossScale(scale))
    for batch in BATCHES:
        w.grad = None
        contract.scale((w * batch).sum()).backward()
        contract.accumulate()
        contract.step(optimizer)
        contract.update()
    assert optimizer.calls == 4
    assert torch.equal(w, fit(Net(lookahead)).w)


@pytest.mark.parametrize("by_hand", [False, True])
def test_arguments_arrive_and_what_step_returns_comes_back(by_hand: bool) -> None:
    ours = fit(Net(lambda p: Scaled(p, lr=0.1), by_hand, scale=0.5), Fuse(optimizer=None))
    stock = fit(Net(lambda p: Scaled(p, lr=0.1), by_hand, scale=0.5))
    assert ours.returned == stock.returned == ["stepped 0.5"] * 4
    assert torch.equal(ours.w, stock.w)


def test_the_loss_comes_back_from_a_step_that_returns_it() -> None:
    ours = fit(Net(lambda p: SGD(p, lr=0.1)), Fuse(optimizer=None))
    stock = fit(Net(lambda p: SGD(p, lr=0.1)))
    assert list(map(float, ours.returned)) == list(map(float, stock.returned))


def test_an_optimizer_that_insists_on_a_closure_gets_the_known_loss() -> None:
    ours = fit(Net(lambda p: Insists(p, lr=0.1)), Fuse(optimizer=None))
    stock = fit(Net(lambda p: Insists(p, lr=0.1)))
    assert ours.made.losses == stock.made.losses
    assert torch.equal(ours.w, stock.w)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("make", "name"), [(lambda p: SAM(p, lr=0.1), "SAM"), (torch.optim.LBFGS, "LBFGS")])
def test_an_optimizer_that_evaluates_again_is_refused_before_training(make: Any, name: str, by_hand: bool) -> None:
    module = Net(make, by_hand)
    with pytest.raises(ValueError, match=f"^{name} evaluates the model several times"):
        fit(module, Fuse(optimizer=None))
    assert torch.equal(module.w, torch.ones(4))


def test_trying_a_step_changes_nothing_of_the_optimizer() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = SAM([w], lr=0.1)
    with pytest.raises(ValueError, match="SAM"):
        check_closure(optimizer)
    assert torch.equal(w, torch.ones(4))
    assert w.grad is None
    assert not optimizer.state


def test_closures_are_seen_in_signatures_and_first_lines() -> None:
    assert [needs_closure(cls) for cls in (SAM, Insists, torch.optim.LBFGS)] == [True] * 3
    assert [needs_closure(cls) for cls in (SGD, Scaled, Lookahead, torch.optim.AdamW)] == [False] * 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
def test_clipping_of_complex_and_double_gradients_is_torchs(dtype: torch.dtype) -> None:
    grads = [torch.randn(5, 3, dtype=dtype), torch.randn(7, dtype=dtype)]
    mine, its = ([torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads] for _ in range(2))
    for p, q, grad in zip(mine, its, grads, strict=True):
        p.grad, q.grad = grad.clone(), grad.clone()
    contract = StepContract()
    contract.step(SGD(mine, lr=1.0), clip_norm=0.5)
    (outcome,) = contract.update()
    norm = torch.nn.utils.clip_grad_norm_(its, 0.5)
    SGD(its, lr=1.0).step()
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for p, q in zip(mine, its, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bad", [complex(1, float("nan")), complex(float("inf"), 0), complex(0, float("-inf"))])
def test_a_bad_part_of_a_complex_gradient_skips_the_step(bad: complex) -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    p.grad = torch.tensor([1, bad, 1], dtype=torch.complex64)
    contract = StepContract()
    contract.step(SGD([p], lr=1.0))
    assert contract.update()[0].reason == "nonfinite"
    assert torch.equal(p, torch.zeros_like(p))


def test_double_gradients_whose_squares_overflow_are_finite() -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.full((2,), 1e200, dtype=torch.float64)
    contract = StepContract()
    contract.step(SGD([p], lr=1.0))
    assert contract.update()[0].reason == "ok"
    assert torch.equal(p.detach(), torch.full((2,), -1e200, dtype=torch.float64))


def test_a_refusal_of_double_parameters_names_the_way_out() -> None:
    module = Net(lambda p: torch.optim.AdamW(p, lr=0.1)).double()
    with pytest.raises((TypeError, ValueError), match="optimizer=None"):
        fit(module, Fuse())
