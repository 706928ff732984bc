"""Master weights in training (cases 40, 44 and 32)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, FusedSGD
from lightning_fuse.formats.rounding import bf16_bits, float_bits
from tests.optim.models import bits, give_gradients, parameters, same_bits, train
from tests.rules.rule_table import CASES
from tests.tolerances import MASTER_TRAVEL, SPLIT8_TRAVEL

BF16 = torch.bfloat16
KEEPING = ["fp32", "split", "split8"]


def joined(p: Tensor, remainder: Tensor) -> Tensor:
    """The float32 weight of split masters, written anew from its definition."""
    shift = 0 if remainder.dtype == torch.int16 else 8
    whole = (bf16_bits(p.detach()) << 16) + (remainder.long() << shift)
    return (whole & 0xFFFFFFFF).int().view(torch.float32)


def weight_of(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    return state["master"] if "master" in state else joined(p, state["remainder"])


@pytest.mark.parametrize("master", KEEPING)
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8", "int8_bf16"])
def test_small_steps_arrive(master: str, state: str) -> None:
    """Case 40: p = 1, g = 1, lr 1e-3, 100 steps: 0.900, in a parameter whose steps are 0.004 and 0.008 wide."""
    p = Parameter(torch.ones(2, 128, dtype=BF16))
    optimizer = FusedAdamW([("p", p)], lr=1e-3, weight_decay=0.0, state=state, master=master)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (weight_of(p, optimizer.state[p]) - 0.9).abs().max() <= MASTER_TRAVEL
    if state in ("fp32", "bf16"):  # neighbours are 0.8984 and 0.9023: int8's error of 0.0005 may decide
        assert (p.float() - 0.9).abs().max() <= MASTER_TRAVEL


def test_without_a_master_they_do_not() -> None:
    """The control."""
    p = Parameter(torch.ones(2, 128, dtype=BF16))
    optimizer = FusedAdamW([p], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p == 1).all()


@pytest.mark.parametrize("rule", CASES)
def test_split_is_float32_training_bit_for_bit(rule: str) -> None:
    """Case 44: the same weights as a float32 parameter and as an fp32 master that see the same gradients."""
    split, copied = parameters(BF16), parameters(BF16)
    exact = {name: Parameter(p.detach().float()) for name, p in split.items()}
    of_split = CASES[rule].make(split.items(), master="split")
    of_copy = CASES[rule].make(copied.items(), master="fp32")
    of_exact = CASES[rule].make(exact.items())
    for step in range(30):
        give_gradients(split, step)
        for name, p in split.items():
            copied[name].grad, exact[name].grad = p.grad, p.grad.float()
        for optimizer in (of_split, of_copy, of_exact):
            optimizer.step()
        for name, p in split.items():
            weight = exact[name].detach()
            assert torch.equal(float_bits(joined(p, of_split.state[p]["remainder"])), float_bits(weight))
            assert torch.equal(of_copy.state[copied[name]]["master"], weight)
            assert torch.equal(copied[name], weight.to(BF16))
    assert any(not torch.equal(p.detach().float(), exact[name].detach()) for name, p in split.items())


def test_fp16_with_a_copy_is_float32_training() -> None:
    narrow = parameters(torch.float16)
    exact = {name: Parameter(p.detach().float()) for name, p in narrow.items()}
    of_narrow, of_exact = FusedAdamW(narrow.items(), master="fp32"), FusedAdamW(exact.items())
    for step in range(10):
        give_gradients(narrow, step)
        for name, p in narrow.items():
            exact[name].grad = p.grad.float()
        of_narrow.step()
        of_exact.step()
    for name, p in narrow.items():
        assert torch.equal(of_narrow.state[p]["master"], exact[name].detach())
        assert torch.equal(p, exact[name].detach().half())


def test_split8_follows_updates_below_its_last_place() -> None:
    """24 bits of 1.0 are 2^-16 apart (1.5e-5); steps of 1e-6 still move it by 1e-3 in 1,000 of them."""
    p = Parameter(torch.full((4, 128), 1.0, dtype=BF16))
    optimizer = FusedSGD([p], lr=1e-6, master="split8")
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved = 1.0 - joined(p, optimizer.state[p]["remainder"])
    assert (moved / 1e-3 - 1).abs().max() < SPLIT8_TRAVEL
    nearest = (torch.tensor(1.0 - 1e-6).view(torch.int32) + 128) >> 8 << 8
    assert nearest.view(torch.float32) == 1.0  # the control: rounded to nearest, nothing would ever happen


def by_copy(p: Parameter, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def by_data(p: Parameter, value: Tensor) -> None:
    p.data.copy_(value)


def by_new_data(p: Parameter, value: Tensor) -> None:
    p.data = value.clone()


def by_loading(p: Parameter, value: Tensor) -> None:
    module = torch.nn.Module()
    module.weight = p
    module.load_state_dict({"weight": value})


@pytest.mark.parametrize("overwrite", [by_copy, by_data, by_new_data, by_loading])
@pytest.mark.parametrize("master", KEEPING)
@pytest.mark.parametrize("when", ["before the first step", "in training"])
def test_a_parameter_that_the_user_overwrote_wins(
    overwrite: Callable[[Parameter, Tensor], None], master: str, when: str
) -> None:
    """Case 32: weights loaded after the optimizer was built are never silently replaced by an old master."""
    p = Parameter(torch.linspace(-2, 2, 256).view(2, 128).to(BF16))
    optimizer = FusedAdamW([p], lr=1e-4, weight_decay=0.0, master=master)
    if when == "in training":
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
    value = torch.full_like(p, 100.0)
    overwrite(p, value)
    p.grad = torch.ones_like(p)
    optimizer.step()
    # One step of at most 1.1 lr (Adam's momentum) from the new value, in the weight itself; half a unit for the rest.
    weight = weight_of(p, optimizer.state[p])
    assert (p.detach().float() - 100.0).abs().max() <= 0.5
    assert (weight - 100.0).abs().max() <= 0.25 + 2e-4


def test_an_untouched_master_is_not_resynchronised() -> None:
    """The control: what is below the parameter's last place survives any number of steps."""
    p = Parameter(torch.ones(4, dtype=BF16))
    optimizer = FusedSGD([p], lr=2.0**-12, master="fp32")
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p == 1).all()
    assert torch.equal(optimizer.state[p]["master"], torch.full((4,), 1 - 3 * 2.0**-12))


def test_only_the_elements_that_were_overwritten_start_anew() -> None:
    p = Parameter(torch.ones(4, dtype=BF16))
    optimizer = FusedSGD([p], lr=2.0**-12, master="fp32")
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[1] = 5.0
    optimizer.step()
    kept = optimizer.state[p]["master"]
    assert kept.tolist() == [1 - 2 * 2.0**-12, 5 - 2.0**-12, 1 - 2 * 2.0**-12, 1 - 2 * 2.0**-12]


@pytest.mark.parametrize("master", KEEPING)
def test_a_nan_gradient_shows_in_the_parameter(master: str) -> None:
    """Case 43: one element, in the parameter, the master and after more steps."""
    p = Parameter(torch.ones(2, 128, dtype=BF16))
    optimizer = FusedAdamW([p], lr=1e-3, state="int8", master=master)
    p.grad = torch.ones_like(p)
    p.grad[1, 3] = torch.nan
    for _ in range(3):
        optimizer.step()
        p.grad = torch.ones_like(p)
    assert p.isnan().sum() == 1
    assert p[1, 3].isnan()


@pytest.mark.parametrize("master", KEEPING)
def test_a_skipped_step_leaves_the_master(master: str) -> None:
    params = parameters(BF16)
    optimizer = FusedAdamW(params.items(), master=master)
    train(optimizer, params, range(3))
    before = bits(optimizer, params)
    give_gradients(params, 3)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert same_bits(bits(optimizer, params), before)


@pytest.mark.parametrize("master", KEEPING)
def test_a_model_loaded_after_the_optimizers_state_wins(master: str) -> None:
    """Case 32, the wrong way round: a checkpoint's state, then other weights. Nobody's old master comes back."""
    there = parameters(BF16)
    source = FusedAdamW(there.items(), lr=1e-4, weight_decay=0.0, master=master)
    train(source, there, range(3))
    params = {name: Parameter(p.detach().clone()) for name, p in there.items()}
    optimizer = FusedAdamW(params.items(), lr=1e-4, weight_decay=0.0, master=master)
    optimizer.load_state_dict(source.state_dict())
    with torch.no_grad():
        for p in params.values():
            p.fill_(100.0)
    train(optimizer, params, range(3, 4))
    for p in params.values():
        assert (p.detach().float() - 100.0).abs().max() <= 0.5
        assert (weight_of(p, optimizer.state[p]) - 100.0).abs().max() <= 0.25 + 2e-4


def test_a_load_over_other_weights_says_so() -> None:
    """With copies it is detected while the state is loaded; the parameter wins and is named."""
    there = parameters(BF16)
    source = FusedAdamW(there.items(), lr=1e-4, master="fp32")
    train(source, there, range(3))
    params = {name: Parameter(p.detach().clone()) for name, p in there.items()}
    with torch.no_grad():
        params["wide"][0, :5] = 100.0
    optimizer = FusedAdamW(params.items(), lr=1e-4, master="fp32")
    with pytest.warns(UserWarning, match="5 of 600 weights of wide are not what their master weights round to"):
        optimizer.load_state_dict(source.state_dict())
    assert optimizer.last_load is not None
    assert len(optimizer.last_load.warnings) == 1
