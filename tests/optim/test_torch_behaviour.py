"""The optimizers are torch optimizers: groups, hooks, closures, tensor learning rates, pickling, repr."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedSGD
from tests.optim.models import bits, give_gradients, groups_of, parameters, same_bits, train, updates
from tests.rules.rule_table import CASES

EVERY_RULE = pytest.mark.parametrize("rule", CASES)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(FusedAdamW, torch.optim.AdamW), (FusedAdam, torch.optim.Adam), (FusedSGD, torch.optim.SGD)],
)
def test_defaults_are_torchs(ours: type, theirs: type) -> None:
    """Case 37."""
    mine, torchs = ours([Parameter(torch.ones(1))]), theirs([Parameter(torch.ones(1))])
    shared = set(mine.defaults) & set(torchs.defaults)
    assert {"lr", "weight_decay", "maximize"} <= shared
    assert {key: mine.defaults[key] for key in shared} == {key: torchs.defaults[key] for key in shared}
    assert set(mine.defaults) == shared
    assert isinstance(mine, torch.optim.Optimizer)


def test_generators_and_named_parameters_are_welcome() -> None:
    module = torch.nn.Linear(3, 2)
    assert FusedAdamW(module.parameters()).formats() == {"0.0": "fp32", "0.1": "fp32"}
    named = FusedAdamW(module.named_parameters(), state="int8")
    assert named.formats() == {"weight": "int8", "bias": "fp32"}
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    grouped = FusedAdamW([{"params": module.named_parameters(), "lr": 0.5}])
    assert grouped.param_groups[0]["lr"] == 0.5


def test_groups_keep_their_own_settings() -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = FusedSGD([{"params": [a], "lr": 0.5}, {"params": [b]}], lr=0.25)
    a.grad, b.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert torch.equal(a, torch.full((2,), 0.5))
    assert torch.equal(b, torch.full((2,), 0.75))


@EVERY_RULE
def test_a_group_may_be_added_in_training(rule: str) -> None:
    """The old parameters do not notice, the new one is stepped as if it were alone."""
    case, late = CASES[rule], {"late": Parameter(torch.ones(2, 150))}
    params, undisturbed = parameters(), parameters()
    optimizer, other = case.make(list(params.items())), case.make(list(undisturbed.items()))
    train(optimizer, params, range(3))
    train(other, undisturbed, range(3))
    optimizer.add_param_group({"params": list(late.items()), "lr": 0.125})
    alone = {"late": Parameter(torch.ones(2, 150))}
    single = case.make(list(alone.items()), lr=0.125)
    for step in range(3, 6):
        give_gradients(params, step)
        give_gradients(late, step)
        optimizer.step()
        train(other, undisturbed, [step])
        train(single, alone, [step])
    assert same_bits(bits(optimizer, params), bits(other, undisturbed))
    assert same_bits(bits(optimizer, late), bits(single, alone))


def test_step_hooks_run_around_the_step() -> None:
    p, seen = Parameter(torch.ones(1)), []
    optimizer = FusedAdamW([p], lr=0.5, weight_decay=0.0)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", p.item())))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", p.item())))
    p.grad = torch.ones(1)
    optimizer.step()
    assert [name for name, _ in seen] == ["pre", "post"]
    assert seen[0][1] == 1.0
    assert seen[1][1] == pytest.approx(0.5)


def test_state_dict_hooks_run() -> None:
    params, seen = parameters(), []
    optimizer = FusedAdamW(params.items())
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, sd: seen.append("save post"))
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: seen.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save pre", "save post", "load pre", "load post"]


def test_zero_grad() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.values())
    give_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in params.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in params.values())


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    p, calls = Parameter(torch.ones(1)), []
    optimizer = FusedSGD([p], lr=0.25)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (2 * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 2.0
    assert p.item() == 0.5


def test_gradients_are_only_read() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.values(), weight_decay=0.1)
    give_gradients(params, 0)
    before = {name: p.grad.clone() for name, p in params.items()}
    optimizer.step()
    assert all(torch.equal(params[name].grad, g) for name, g in before.items())


@EVERY_RULE
@pytest.mark.parametrize("make", [torch.tensor, lambda lr: torch.tensor([lr]), lambda lr: torch.tensor(lr).double()])
def test_a_tensor_learning_rate_is_its_number(rule: str, make: Any) -> None:
    with_number, with_tensor = parameters(), parameters()
    number = CASES[rule].make(with_number.items(), lr=0.03125)
    tensor = CASES[rule].make(with_tensor.items(), lr=make(0.03125))
    train(number, with_number, range(2))
    train(tensor, with_tensor, range(2))
    assert same_bits(bits(number, with_number), bits(tensor, with_tensor))
    number.param_groups[0]["lr"] = 0.0625
    tensor.param_groups[0]["lr"].fill_(0.0625)
    train(number, with_number, range(2, 4))
    train(tensor, with_tensor, range(2, 4))
    assert same_bits(bits(number, with_number), bits(tensor, with_tensor))


@EVERY_RULE
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, "none"), (torch.bfloat16, "split")], ids=str)
def test_a_copy_goes_on_by_itself(rule: str, how: str, dtype: torch.dtype, master: str) -> None:
    params = parameters(dtype)
    state = "int8" if rule != "sgd" else "fp32"
    optimizer = CASES[rule].make(list(params.items()), state=state, master=master)
    train(optimizer, params, range(3))
    if how == "pickle":
        copied, twins = pickle.loads(pickle.dumps((optimizer, params)))
    elif how == "deepcopy":
        copied, twins = copy.deepcopy((optimizer, params))
    else:
        buffer = io.BytesIO()
        torch.save((optimizer, params), buffer)
        buffer.seek(0)
        copied, twins = torch.load(buffer, weights_only=False)
    original = bits(optimizer, params)
    assert same_bits(bits(copied, twins), original)
    assert copied.formats() == optimizer.formats()
    assert copied.master == optimizer.master
    train(copied, twins, range(3, 6))
    assert same_bits(bits(optimizer, params), original)
    train(optimizer, params, range(3, 6))
    assert same_bits(bits(copied, twins), bits(optimizer, params))


def test_a_copied_optimizer_can_be_saved_and_grown() -> None:
    params = parameters()
    optimizer = copy.deepcopy(FusedAdamW(params.items(), state="int8"))
    optimizer.add_param_group({"params": [("more", Parameter(torch.ones(2, 2)))]})
    assert optimizer.formats()["more"] == "int8"
    assert "lightning_fuse" in optimizer.state_dict()


def test_the_state_is_plain_tensors_under_torchs_names() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdamW(params.items(), state="int8", master="split8")
    assert not optimizer.state
    train(optimizer, params, range(1))
    keys = {"step", "exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale", "remainder"}
    assert set(optimizer.state[params["wide"]]) == keys
    assert set(optimizer.state[params["bias"]]) == {"step", "exp_avg", "exp_avg_sq", "remainder"}
    for state in optimizer.state.values():
        assert all(type(value) is torch.Tensor and value.is_contiguous() for value in state.values())
        assert state["step"].dtype == torch.float64
        assert state["step"].shape == ()
        assert state["step"].item() == 1


def test_state_of_one_kind_lies_in_one_region() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items())
    train(optimizer, params, range(1))
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert len({optimizer.state[p][key].untyped_storage().data_ptr() for p in params.values()}) == 1


def test_state_bytes_are_what_is_allocated() -> None:
    for state in ("fp32", "bf16", "int8", "int8_bf16"):
        params = parameters(torch.bfloat16)
        optimizer = FusedAdamW(params.items(), state=state, master="split", amsgrad=True)
        foretold = optimizer.state_bytes()
        train(optimizer, params, range(1))
        found: dict[str, int] = {}
        for held in optimizer.state.values():
            for key, tensor in held.items():
                found[key] = found.get(key, 0) + tensor.numel() * tensor.element_size()
        assert foretold == found == optimizer.state_bytes()


def test_no_gradient_at_all_is_no_step() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items(), weight_decay=0.5)
    before = bits(optimizer, params)
    optimizer.step()
    assert same_bits(bits(optimizer, params), before)


def test_settings_may_change_between_steps() -> None:
    p = Parameter(torch.ones(1))
    optimizer = FusedSGD([p], lr=0.25)
    p.grad = torch.ones(1)
    assert updates([p], optimizer)[0].item() == 0.25
    optimizer.param_groups[0]["lr"] = 0.5
    assert updates([p], optimizer)[0].item() == 0.5
    optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.0)
    assert updates([p], optimizer)[0].item() == 0.5
    assert updates([p], optimizer)[0].item() == 0.75
    assert groups_of(optimizer)[0]["momentum"] == 0.5
