"""What torch asks of its own optimizers on a CPU, asked of ours, in float32 and int8 state.

torch's test inputs (``torch.testing._internal.common_optimizers``) give the settings and the errors; the checks are
written here, one for each that torch's tests of optimizers make of a CPU optimizer without ``foreach``, ``capturable``
or ``differentiable``, which are ways of torch to execute a step.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import optim_db

from lightning_fuse import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLAMB, FusedLARS, FusedLion, FusedSGD

TWINS: dict[type[Optimizer], type[Optimizer]] = {
    torch.optim.AdamW: FusedAdamW,
    torch.optim.Adam: FusedAdam,
    torch.optim.SGD: FusedSGD,
}
EXECUTION = {"foreach", "fused", "capturable", "differentiable"}
# torch has none of these: settings of our own.
WITHOUT_TWIN: dict[type[Optimizer], list[dict[str, Any]]] = {
    FusedLion: [{}, {"lr": 0.01, "weight_decay": 0.1}, {"maximize": True}],
    FusedLARS: [{"trust_coefficient": 0.1}, {"weight_decay": 0.1, "nesterov": True, "trust_coefficient": 0.1}],
    FusedLAMB: [{}, {"weight_decay": 0.1}],
    FusedAdEMAMix: [{}, {"weight_decay": 0.1, "t_alpha": 30, "t_beta3": 30, "betas": (0.9, 0.99, 0.995)}],
}


class Kind(NamedTuple):
    """One optimizer with settings."""

    cls: type[Optimizer]
    settings: dict[str, Any]
    twin: type[Optimizer] | None

    def make(self, params: Any, **changes: Any) -> Optimizer:
        return self.cls(params, **{**copy.deepcopy(self.settings), **changes})  # a tensor lr is each one's own


def kinds() -> Iterator[tuple[str, Kind]]:
    for info in optim_db:
        ours = TWINS.get(info.optim_cls)
        for given in info.optim_inputs_func("cpu") if ours else ():
            if EXECUTION & set(given.kwargs):
                continue
            for state in ("fp32", "int8") if ours is not FusedSGD or given.kwargs.get("momentum") else ("fp32",):
                name = f"{ours.__name__}-{given.desc}-{state}".replace(" ", "_")
                yield name, Kind(ours, {**given.kwargs, "state": state}, info.optim_cls)
    for ours, rows in WITHOUT_TWIN.items():
        for number, settings in enumerate(rows):
            for state in ("fp32", "int8"):
                yield f"{ours.__name__}-{number}-{state}", Kind(ours, {**settings, "state": state}, None)


KINDS = dict(kinds())
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def problem() -> tuple[Parameter, Parameter, Callable[[Optimizer], Callable[[], torch.Tensor]]]:
    """A weight of two rows of blocks, a bias, and a closure that computes their loss and gradients."""
    generator = torch.Generator().manual_seed(11)
    weight = Parameter(torch.randn(3, 140, generator=generator) * 0.3)
    bias = Parameter(torch.randn(3, generator=generator))
    x = torch.randn(140, generator=generator)

    def closure_of(optimizer: Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight.mv(x) + bias).square().sum()
            loss.backward()
            return loss

        return closure

    return weight, bias, closure_of


def train(optimizer: Optimizer, closure: Callable[[], torch.Tensor], steps: int) -> list[float]:
    return [float(optimizer.step(closure)) for _ in range(steps)]


def snapshot(optimizer: Optimizer, *params: Parameter) -> list[torch.Tensor]:
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *state)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@EVERY_KIND
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_loss_goes_the_right_way(kind: Kind, contiguous: bool) -> None:
    weight, bias, closure_of = problem()
    if not contiguous:
        weight.data = torch.stack([weight.data, weight.data], dim=-1)[..., 0]
        assert not weight.is_contiguous()
    optimizer = kind.make([weight, bias], lr=1e-4)
    losses = train(optimizer, closure_of(optimizer), 20)
    assert losses[-1] > losses[0] if kind.settings.get("maximize") else losses[-1] < losses[0]


@EVERY_KIND
def test_groups_with_a_scheduler_go_the_right_way(kind: Kind) -> None:
    weight, bias, closure_of = problem()
    optimizer = kind.make([{"params": [weight]}, {"params": [bias], "lr": 1e-3}], lr=1e-4)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    losses = []
    for _ in range(20):
        losses += train(optimizer, closure_of(optimizer), 1)
        schedulers[0].step()
        schedulers[1].step(losses[-1])
    assert losses[-1] > losses[0] if kind.settings.get("maximize") else losses[-1] < losses[0]
    assert float(optimizer.param_groups[1]["lr"]) < 1e-3


@EVERY_KIND
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_tensor_lr_of_any_dimensions_is_a_number(kind: Kind, dims: int) -> None:
    results = []
    for lr in (2.0**-7, torch.tensor(2.0**-7).reshape([1] * dims)):  # the same number in float32
        weight, bias, closure_of = problem()
        optimizer = kind.make([weight, bias], lr=lr)
        train(optimizer, closure_of(optimizer), 4)
        results.append(snapshot(optimizer, weight, bias))
    assert same(*results)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@EVERY_KIND
def test_a_step_without_gradients_does_nothing(kind: Kind) -> None:
    weight, bias, _ = problem()
    optimizer = kind.make([weight, bias])
    before = [weight.detach().clone(), bias.detach().clone()]
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
    assert same([weight.detach(), bias.detach()], before)
    assert not optimizer.state_dict()["state"]


@EVERY_KIND
def test_zero_gradients_move_nothing_without_decay(kind: Kind) -> None:
    weight, bias, _ = problem()
    optimizer = kind.make([weight, bias], weight_decay=0.0)
    before = [weight.detach().clone(), bias.detach().clone()]
    for p in (weight, bias):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same([weight.detach(), bias.detach()], before)


@EVERY_KIND
def test_it_can_be_printed(kind: Kind) -> None:
    weight, bias, _ = problem()
    optimizer = kind.make([{"params": [weight]}, {"params": [bias], "lr": 0.5}])
    shown = repr(optimizer)
    assert kind.cls.__name__ in shown
    assert "Parameter Group 1" in shown
    assert "lr: 0.5" in shown


@EVERY_KIND
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("through_file", [False, True])
def test_a_state_dict_continues_bit_for_bit(kind: Kind, scheduled: bool, through_file: bool) -> None:
    weight, bias, closure_of = problem()
    optimizer = kind.make([weight, bias])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    for _ in range(5):
        train(optimizer, closure_of(optimizer), 1)
        if scheduler is not None:
            scheduler.step()
    twin_weight, twin_bias, twin_closure_of = problem()
    twin_weight.data.copy_(weight.data)
    twin_bias.data.copy_(bias.data)
    twin = kind.make([twin_weight, twin_bias])
    saved = copy.deepcopy(optimizer.state_dict())
    if through_file:
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    before = copy.deepcopy(saved)
    twin.load_state_dict(saved)
    assert str(saved) == str(before)  # a load leaves what it is given as it was
    assert train(optimizer, closure_of(optimizer), 5) == train(twin, twin_closure_of(twin), 5)
    assert same(snapshot(optimizer, weight, bias), snapshot(twin, twin_weight, twin_bias))


@EVERY_KIND
def test_state_is_not_empty_after_a_step(kind: Kind) -> None:
    weight, bias, closure_of = problem()
    optimizer = kind.make([weight, bias])
    train(optimizer, closure_of(optimizer), 1)
    assert set(optimizer.state) == {weight, bias}
    assert all(optimizer.state.values())


@EVERY_KIND
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_all_public_attributes(kind: Kind, how: str) -> None:
    weight, bias, closure_of = problem()
    optimizer = kind.make([weight, bias])
    train(optimizer, closure_of(optimizer), 2)
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is type(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public <= set(vars(copied))
    assert str(copied.state_dict()) == str(optimizer.state_dict())
    assert copied.param_groups[0]["params"][0] is not weight


@EVERY_KIND
def test_hooks_of_one_and_of_all_optimizers_run_in_order(kind: Kind) -> None:
    weight, bias, closure_of = problem()
    optimizer, seen = kind.make([weight, bias]), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all post")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        train(optimizer, closure_of(optimizer), 1)
        assert seen == ["all pre", "pre", "post", "all post"]
    finally:
        for handle in handles:
            handle.remove()
    train(optimizer, closure_of(optimizer), 1)
    assert len(seen) == 4


@EVERY_KIND
def test_state_dict_hooks_may_change_what_is_saved_and_loaded(kind: Kind) -> None:
    weight, bias, _ = problem()
    optimizer, order = kind.make([weight, bias]), []

    def loaded(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.0625} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_state_dict_pre_hook(lambda _: order.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "mark": 7})
    optimizer.register_load_state_dict_pre_hook(loaded)
    optimizer.register_load_state_dict_pre_hook(lambda *_: order.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: order.append("after"))
    saved = optimizer.state_dict()
    assert saved["mark"] == 7
    optimizer.load_state_dict(saved)
    assert order == ["save", "first", "after"]
    assert float(optimizer.param_groups[0]["lr"]) == 0.0625


@EVERY_KIND
def test_a_group_without_lr_and_decay_has_the_defaults(kind: Kind) -> None:
    weight, bias, _ = problem()
    optimizer = kind.make([{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "lr": 0.25}], lr=0.125)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.125, 0.25]
    expected = kind.settings.get("weight_decay", kind.make([Parameter(torch.ones(2, 2))]).defaults["weight_decay"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, expected]


@EVERY_KIND
def test_an_empty_parameter_is_stepped(kind: Kind) -> None:
    empty, weight = Parameter(torch.empty(0, 5)), problem()[0]
    optimizer = kind.make([empty, weight])
    empty.grad, weight.grad = torch.empty(0, 5), torch.ones_like(weight)
    optimizer.step()
    assert float(optimizer.state[empty]["step"]) == 1.0


@EVERY_KIND
def test_an_averaged_model_follows(kind: Kind) -> None:
    model = torch.nn.Linear(130, 2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = kind.make(model.parameters(), lr=0.01)
    rate = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(130)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        rate.step()
        seen.append(model.weight.detach().clone())
    assert torch.allclose(averaged.module.weight, torch.stack(seen).mean(0), atol=1e-6)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


@pytest.mark.parametrize("cls", TWINS, ids=lambda cls: cls.__name__)
def test_errors_of_torchs_own_are_errors_of_ours(cls: type[Optimizer]) -> None:
    """Every error input that is not about a way of executing; two of them ours accepts, and says so here."""
    (info,) = [info for info in optim_db if info.optim_cls is cls]
    checked = 0
    for case in info.optim_error_inputs_func("cpu", torch.float32):
        given, kwargs = case.optimizer_error_input, case.optimizer_error_input.kwargs
        if EXECUTION & set(kwargs):
            continue
        params = given.params if given.params is not None else [Parameter(torch.ones(2, 2))]
        betas = kwargs.get("betas", ())
        if any(isinstance(beta, torch.Tensor) for beta in betas):
            TWINS[cls](params, **kwargs)  # betas of both kinds, or of one element in any shape, are numbers
            continue
        # torch only warns of a parameter that is twice in one group, and would step it twice.
        error = ValueError if case.error_type is UserWarning else case.error_type
        with pytest.raises(error):
            TWINS[cls](params, **kwargs)
        checked += 1
    assert checked >= 7


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if kind.twin and kind.settings["state"] == "fp32"])
def test_torch_goes_on_from_our_state_dict_and_we_from_torchs(name: str) -> None:
    kind = KINDS[name]
    settings = {key: value for key, value in kind.settings.items() if key != "state"}
    assert kind.twin is not None
    weight, bias, closure_of = problem()
    ours = kind.make([weight, bias])
    train(ours, closure_of(ours), 3)
    other_weight, other_bias, other_closure_of = problem()
    other_weight.data.copy_(weight.data)
    other_bias.data.copy_(bias.data)
    for foreach in (False, True):
        if foreach and isinstance(settings.get("lr"), torch.Tensor):
            continue  # torch refuses that pair
        torchs = kind.twin([other_weight, other_bias], **copy.deepcopy(settings), foreach=foreach)
        torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
    torchs = kind.twin([other_weight, other_bias], **copy.deepcopy(settings), foreach=False)
    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected, found = train(ours, closure_of(ours), 3), train(torchs, other_closure_of(torchs), 3)
    assert found == pytest.approx(expected, rel=1e-5)
    ours.load_state_dict(torchs.state_dict())
    if kind.twin is not torch.optim.SGD:  # which counts nothing
        assert float(ours.state[weight]["step"]) == 6.0
