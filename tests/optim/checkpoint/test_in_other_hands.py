"""State dicts in the hands of others keep every bit: torch.distributed's functions, accelerate, torch's optimizers."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from lightning_fuse import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLAMB, FusedLARS, FusedLion, FusedSGD, LoadOptions
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.optim import FusedOptimizer

KINDS = [
    (state, dtype, master)
    for state in STATE_FORMATS
    for dtype in (torch.float32, torch.bfloat16)
    for master in MASTERS
    if dtype in MASTERS[master].dtypes and (dtype != torch.float32 or master == "none")
]
OPTIONS = {
    "as it is": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


class Tower(nn.Module):
    """Nested modules, one of them frozen, and a vector that no loss reaches."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(40, 40, dtype=dtype).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(40, 40, dtype=dtype), nn.Sequential(nn.Linear(40, 8, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(torch.tanh(self.base(x)))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.sin(torch.arange(160.0) * (step + 1)).view(4, 40).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(kind: tuple[str, torch.dtype, str], seed: int = 0, named: bool = True) -> tuple[Tower, FusedOptimizer]:
    state, dtype, master = kind
    model = Tower(dtype, seed)
    params: Any = model.named_parameters() if named else model.parameters()
    return model, FusedAdamW(params, lr=1e-2, weight_decay=0.1, state=state, master=master)


def state_bits(optimizer: FusedOptimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        found.update({f"{name}:{key}": value.clone() for key, value in optimizer.state.get(p, {}).items()})
    return found


def check_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for key, value in a.items():
        assert value.dtype == b[key].dtype, key
        assert torch.equal(value.reshape(-1).view(torch.uint8), b[key].reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_torchs_state_dict_functions_keep_every_bit(kind: tuple[str, torch.dtype, str], how: str) -> None:
    model, optimizer = build(kind)
    train(model, optimizer, range(3))
    weights, saved = get_state_dict(model, optimizer, options=OPTIONS[how])
    weights, saved = copy.deepcopy((weights, saved))
    other, resumed = build(kind, seed=1)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=saved, options=OPTIONS[how])
    check_same(state_bits(resumed, other), state_bits(optimizer, model))
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    check_same(state_bits(resumed, other), state_bits(optimizer, model))


OTHER_RULES: dict[str, Any] = {
    "adam": FusedAdam,
    "amsgrad": lambda p, **kw: FusedAdamW(p, amsgrad=True, **kw),
    "sgd": lambda p, **kw: FusedSGD(p, momentum=0.9, **kw),
    "lion": FusedLion,
    "lars": FusedLARS,
    "lamb": FusedLAMB,
    "ademamix": FusedAdEMAMix,
}


@pytest.mark.parametrize("make", OTHER_RULES.values(), ids=OTHER_RULES)
@pytest.mark.parametrize("how", ["as it is", "flattened"])
def test_the_same_of_other_rules(make: Any, how: str) -> None:
    models = [Tower(seed=0), Tower(seed=1)]
    optimizer, resumed = (make(model.parameters(), lr=1e-2, state="int8") for model in models)
    train(models[0], optimizer, range(3))
    weights, saved = copy.deepcopy(get_state_dict(models[0], optimizer, options=OPTIONS[how]))
    set_state_dict(models[1], resumed, model_state_dict=weights, optim_state_dict=saved, options=OPTIONS[how])
    check_same(state_bits(resumed, models[1]), state_bits(optimizer, models[0]))


@pytest.mark.parametrize("kind", [KINDS[0], ("int8", torch.bfloat16, "split8")], ids=str)
def test_a_checkpoint_folder_of_torch_distributed(kind: Any, tmp_path: Path, one_process: None) -> None:
    model, optimizer = build(kind)
    train(model, optimizer, range(3))
    weights, saved = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": saved}, checkpoint_id=tmp_path / "folder")
    other, resumed = build(kind, seed=1)
    weights, held = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": held}, checkpoint_id=tmp_path / "folder")
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=held)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    check_same(state_bits(resumed, other), state_bits(optimizer, model))


def test_another_order_of_parameters_does_not_swap_moments() -> None:
    """set_state_dict puts indices in this optimizer's order, and leaves the saved names in the other."""
    model = Tower()
    optimizer = FusedAdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = Tower()
    resumed = FusedAdamW(list(other.named_parameters())[::-1], lr=1e-2)
    set_optimizer_state_dict(other, resumed, saved)
    other.load_state_dict(model.state_dict())
    check_same(state_bits(resumed, other), state_bits(optimizer, model))
    again = FusedAdamW(list(other.named_parameters())[::-1], lr=1e-2)
    again.load_state_dict(saved)  # the names of torch's functions decide, without them, too
    check_same(state_bits(again, other), state_bits(optimizer, model))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_that_a_wrapper_gave(prefix: str) -> None:
    """torch's functions take them off; this optimizer's order is the right one then."""

    def make(seed: int) -> tuple[Tower, FusedOptimizer]:
        model = Tower(seed=seed)
        return model, FusedAdamW([(prefix + name, p) for name, p in model.named_parameters()], lr=1e-2, state="int8")

    (model, optimizer), (other, resumed) = make(0), make(1)
    train(model, optimizer, range(3))
    weights, saved = copy.deepcopy(get_state_dict(model, optimizer))
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=saved)
    check_same(state_bits(resumed, other), state_bits(optimizer, model))


@pytest.mark.parametrize("how", ["as it is", "flattened"])
def test_two_optimizers_of_one_model(how: str) -> None:
    def make(seed: int) -> tuple[Tower, list[FusedOptimizer]]:
        model = Tower(seed=seed)
        first = FusedAdamW(model.body[0].named_parameters(), lr=1e-2, state="int8")
        return model, [first, FusedLion(model.body[1].named_parameters(), lr=1e-3, state="bf16")]

    (model, optimizers), (other, resumed) = make(0), make(1)
    for step in range(2):
        for optimizer in optimizers:
            train(model, optimizer, range(step, step + 1))
    weights, saved = copy.deepcopy(get_state_dict(model, optimizers, options=OPTIONS[how]))
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=saved, options=OPTIONS[how])
    for mine, theirs in zip(resumed, optimizers, strict=True):
        check_same(state_bits(mine, other), state_bits(theirs, model))


@pytest.mark.parametrize("how", ["as it is", "flattened"])
@pytest.mark.parametrize(
    ("saved", "here"),
    [(("int8", torch.float32, "none"), ("fp32", torch.float32, "none")),
     (("fp32", torch.float32, "none"), ("int8", torch.float32, "none")),
     (("fp32", torch.bfloat16, "split"), ("fp32", torch.bfloat16, "split8"))],
)  # fmt: skip
def test_another_format_is_refused_with_the_reason(saved: Any, here: Any, how: str) -> None:
    model, optimizer = build(saved)
    train(model, optimizer, range(2))
    packed = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=OPTIONS[how]))
    other, resumed = build(here)
    with pytest.raises(ValueError, match=r"this run asks for|not in the format"):
        set_optimizer_state_dict(other, resumed, packed, options=OPTIONS[how])


def test_masters_are_not_lost_silently() -> None:
    model, optimizer = build(("fp32", torch.bfloat16, "fp32"))
    train(model, optimizer, range(2))
    packed = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = build(("fp32", torch.bfloat16, "none"))
    with pytest.raises(ValueError, match=r"holds master 'fp32' .*asks for 'none'"):
        set_optimizer_state_dict(other, resumed, packed)
    resumed.load_options = LoadOptions(formats="convert")
    set_optimizer_state_dict(other, resumed, packed)
    assert "master fp32 -> none" in str(resumed.last_load)


# accelerate.


def test_accelerate_prepares_without_allocating() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = build(("int8", torch.float32, "none"))
    model, prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    assert not optimizer.state
    train(model, prepared, range(2))
    assert optimizer.state


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_accelerate_saves_and_loads(state: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, prepared = accelerator.prepare(*build((state, torch.float32, "none")))
    train(model, prepared, range(3))
    accelerator.save_state(str(tmp_path / "state"))
    train(model, prepared, range(3, 6))
    ended = state_bits(prepared.optimizer, model)
    other = accelerate.Accelerator(cpu=True)
    again, resumed = other.prepare(*build((state, torch.float32, "none"), seed=1))
    other.load_state(str(tmp_path / "state"))
    train(again, resumed, range(3, 6))
    check_same(state_bits(resumed.optimizer, again), ended)


# torch's own optimizers.


@pytest.mark.parametrize("execution", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_torchs_optimizer_loads_our_float32_state_as_it_is(execution: dict[str, bool]) -> None:
    model, optimizer = build(("fp32", torch.float32, "none"), named=False)
    train(model, optimizer, range(3))
    other = copy.deepcopy(model)
    torchs = torch.optim.AdamW(other.parameters(), lr=0.5)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in torchs.param_groups:
        group.update(execution)
    train(model, optimizer, range(3, 5))
    train(other, torchs, range(3, 5))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    back = FusedAdamW(other.parameters(), lr=0.25)
    back.load_state_dict(torchs.state_dict())
    p = other.body[0].weight
    assert int(back.state[p]["step"]) == 5
    assert torch.equal(back.state[p]["exp_avg"], torchs.state[p]["exp_avg"])
    assert set(back.state[p]) == {"step", "exp_avg", "exp_avg_sq"}


def test_int8_state_that_torchs_optimizer_has_cast_is_refused() -> None:
    model, optimizer = build(("int8", torch.float32, "none"), named=False)
    train(model, optimizer, range(2))
    torchs = torch.optim.AdamW(model.parameters())
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"for 0\.2, which are of lightning_fuse.*cast by another optimizer"):
        optimizer.load_state_dict(torchs.state_dict())


if sys.platform != "linux":
    pytestmark = pytest.mark.skip(reason="gloo")
