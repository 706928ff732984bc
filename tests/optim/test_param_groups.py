"""param_groups: decay by what a parameter is, settings by pattern."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_fuse import FusedAdamW, param_groups


class Custom(nn.Module):
    """Names that mislead: a matrix called like a bias and a norm, a vector called like a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_bias_like_name = Parameter(torch.ones(3, 4))
        self.bias = Parameter(torch.ones(3, 4))
        self.weight_matrix = Parameter(torch.ones(4))
        self.temperature = Parameter(torch.ones(()))


class OwnNorm(nn.Module):
    """A normalisation that torch does not know, with a vector as all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.batch_norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm((3, 4))
        self.group_norm = nn.GroupNorm(2, 4)
        self.own = OwnNorm()
        self.custom = Custom()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


DECAYED = {
    "embed.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "linear.weight",
    "conv.weight",
    "custom.norm_bias_like_name",
    "custom.bias",
}
UNDECAYED = {
    "attention.in_proj_bias",
    "attention.out_proj.bias",
    "attention.bias_k",  # three dimensions, a bias all the same
    "attention.bias_v",
    "linear.bias",
    "conv.bias",
    "batch_norm.weight",
    "batch_norm.bias",
    "layer_norm.weight",  # two dimensions, a norm all the same
    "layer_norm.bias",
    "group_norm.weight",
    "group_norm.bias",
    "own.scale",
    "custom.weight_matrix",
    "custom.temperature",
}


def by_name(groups: list[dict]) -> dict[str, dict]:
    return {name: {k: v for k, v in g.items() if k != "params"} for g in groups for name, _ in g["params"]}


def test_what_is_decayed_is_decided_by_what_it_is() -> None:
    model = Model()
    assert model.attention.bias_k.dim() == 3
    settings = by_name(param_groups(model, weight_decay=0.1))
    assert {name for name, s in settings.items() if s["weight_decay"] == 0.1} == DECAYED
    assert {name for name, s in settings.items() if s["weight_decay"] == 0.0} == UNDECAYED


def test_tied_parameters_appear_once_and_frozen_ones_not_at_all() -> None:
    groups = param_groups(Model(), weight_decay=0.1)
    params = [p for g in groups for _, p in g["params"]]
    assert len(params) == len({id(p) for p in params}) == len(DECAYED | UNDECAYED)
    assert all(p.requires_grad for p in params)


def test_a_norm_of_which_a_weight_is_tied_to_a_matrix_elsewhere() -> None:
    """A shared module's parameter is judged by each of its owners; any bias-like one frees it."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].bias = model["a"].bias
    settings = by_name(param_groups(model, weight_decay=0.1))
    assert set(settings) == {"a.weight", "a.bias", "b.weight"}
    assert settings["a.bias"]["weight_decay"] == 0.0


def test_no_decay_patterns() -> None:
    settings = by_name(param_groups(Model(), weight_decay=0.1, no_decay=["embed.*", "custom.norm*"]))
    assert settings["embed.weight"]["weight_decay"] == 0.0
    assert settings["custom.norm_bias_like_name"]["weight_decay"] == 0.0
    assert settings["linear.weight"]["weight_decay"] == 0.1


def test_overrides() -> None:
    overrides = {"head.*": {"lr": 1e-4}, "linear.*": {"lr": 0.5, "state": "bf16"}, "linear.weight": {"lr": 0.25}}
    model = Model()
    del model.head
    with pytest.raises(ValueError, match=r"pattern 'head.\*' matches no parameter"):
        param_groups(model, weight_decay=0.1, overrides=overrides)
    del overrides["head.*"]
    settings = by_name(param_groups(model, weight_decay=0.1, overrides=overrides, lr=0.125))
    assert settings["linear.weight"]["lr"] == settings["linear.bias"]["lr"] == 0.5  # the first match wins
    assert settings["linear.weight"]["weight_decay"] == 0.1
    assert settings["linear.bias"]["weight_decay"] == 0.0  # what an override does not set stays
    assert settings["conv.weight"]["lr"] == 0.125
    decayed = by_name(param_groups(model, weight_decay=0.1, overrides={"linear.bias": {"weight_decay": 0.5}}))
    assert decayed["linear.bias"]["weight_decay"] == 0.5


def test_a_pattern_for_a_tied_name_names_the_first() -> None:
    with pytest.raises(ValueError, match=r"'head.weight' matches no parameter; closest: "):
        param_groups(Model(), weight_decay=0.1, no_decay=["head.weight"])


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameter; set requires_grad=True"):
        param_groups(nn.Linear(2, 2).requires_grad_(False), weight_decay=0.1)


def test_the_groups_drive_our_optimizers_and_torchs() -> None:
    model = Model()
    overrides = {"embed.*": {"state": "bf16", "lr": 0.5}}
    optimizer = FusedAdamW(param_groups(model, weight_decay=0.1, overrides=overrides), state="int8")
    formats = optimizer.formats()
    assert formats["embed.weight"] == "bf16"
    assert formats["linear.weight"] == "int8"
    assert formats["linear.bias"] == "fp32"
    assert {g["lr"] for g in optimizer.param_groups} == {0.5, 1e-3}
    torchs = torch.optim.AdamW(param_groups(model, weight_decay=0.1))
    assert {g["weight_decay"] for g in torchs.param_groups} == {0.0, 0.1}


def test_undecayed_parameters_stay_where_their_gradient_is_zero() -> None:
    model = Model()
    optimizer = FusedAdamW(param_groups(model, weight_decay=0.5), lr=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in model.named_parameters():
        expected = before[name] * 0.75 if name in DECAYED else before[name]
        assert torch.equal(p, expected), name
