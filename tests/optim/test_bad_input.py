"""Bad input: one clear error that names what was given and what is possible, before anything is written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_fuse import FusedAdam, FusedAdamW, FusedSGD
from tests.optim.models import bits, give_gradients, groups_of, parameters, same_bits, train

NAN, INF = float("nan"), float("inf")


def one(**changes: Any) -> list[tuple[str, Parameter]]:
    return [("weight", Parameter(torch.ones(2, 3, **changes)))]


def bf16() -> list[tuple[str, Parameter]]:
    return one(dtype=torch.bfloat16)


# what is wrong -> (how to ask for it, the error's kind, words that it must hold: given, possible)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no parameters": (lambda: FusedAdamW([]), ValueError, "empty parameter list"),
    "no parameters in a group": (lambda: FusedAdamW([{"params": []}]), ValueError, "empty|no parameter"),
    "a bare tensor": (lambda: FusedAdamW(Parameter(torch.ones(2))), TypeError, "iterable"),
    "a number": (lambda: FusedAdamW([3.0]), TypeError, "can only optimize Tensors"),
    "float64 parameters": (lambda: FusedAdamW(one(dtype=torch.float64)), TypeError, "float64.*float32, bfloat16"),
    "complex parameters": (lambda: FusedAdamW(one(dtype=torch.complex64)), TypeError, "complex64.*float32"),
    "not a leaf": (lambda: FusedAdamW([Parameter(torch.ones(2)) * 2]), ValueError, "non-leaf"),
    "twice in one group": (lambda: FusedAdamW([(p := Parameter(torch.ones(2))), p]), ValueError, "twice"),
    "in two groups": (
        lambda: FusedAdamW([{"params": [p := Parameter(torch.ones(2))]}, {"params": [p]}]),
        ValueError,
        "more than one",
    ),
    "some named": (lambda: FusedAdamW([*one(), Parameter(torch.ones(2))]), ValueError, "names"),
    "lr NaN": (lambda: FusedAdamW(one(), lr=NAN), ValueError, "lr=nan: must be a finite number >= 0"),
    "lr infinite": (lambda: FusedAdamW(one(), lr=INF), ValueError, "lr=inf: must be a finite"),
    "lr negative": (lambda: FusedSGD(one(), lr=-1.0), ValueError, "lr=-1.0: must be a finite number >= 0"),
    "lr text": (lambda: FusedAdamW(one(), lr="0.1"), ValueError, "lr='0.1': must be"),
    "lr True": (lambda: FusedAdamW(one(), lr=True), ValueError, "lr=True: must be"),
    "lr of two numbers": (lambda: FusedAdamW(one(), lr=torch.ones(2)), ValueError, "lr is a tensor of 2 numbers"),
    "lr NaN tensor": (lambda: FusedAdamW(one(), lr=torch.tensor(NAN)), ValueError, "lr=nan"),
    "lr None": (lambda: FusedAdamW(one(), lr=None), ValueError, "lr=None"),
    "lr NaN in a group": (lambda: FusedAdamW([{"params": one(), "lr": NAN}]), ValueError, "lr=nan"),
    "beta1 of 1": (
        lambda: FusedAdamW(one(), betas=(1.0, 0.9)),
        ValueError,
        r"betas\[0\]=1.0: must be a number in \[0, 1\)",
    ),
    "beta2 negative": (
        lambda: FusedAdam(one(), betas=(0.9, -0.1)),
        ValueError,
        r"betas\[1\]=-0.1: must be a number in",
    ),
    "beta NaN": (lambda: FusedAdamW(one(), betas=(NAN, 0.9)), ValueError, r"betas\[0\]=nan"),
    "one beta": (lambda: FusedAdamW(one(), betas=0.9), ValueError, "betas=0.9: must be a pair"),
    "three betas": (lambda: FusedAdamW(one(), betas=(0.9, 0.9, 0.9)), ValueError, "must be a pair"),
    "eps negative": (lambda: FusedAdamW(one(), eps=-1e-8), ValueError, "eps=-1e-08"),
    "decay negative": (lambda: FusedAdamW(one(), weight_decay=-0.1), ValueError, "weight_decay=-0.1"),
    "momentum negative": (lambda: FusedSGD(one(), momentum=-0.9), ValueError, "momentum=-0.9"),
    "dampening of 1": (lambda: FusedSGD(one(), momentum=0.9, dampening=1.0), ValueError, "dampening=1.0"),
    "Nesterov without momentum": (
        lambda: FusedSGD(one(), nesterov=True),
        ValueError,
        "nesterov=True.*needs momentum > 0",
    ),
    "Nesterov with dampening": (
        lambda: FusedSGD(one(), momentum=0.9, dampening=0.1, nesterov=True),
        ValueError,
        "dampening 0",
    ),
    "dampening without momentum": (lambda: FusedSGD(one(), dampening=0.1), ValueError, "no effect without momentum"),
    "unknown format": (
        lambda: FusedAdamW(one(), state="int9"),
        ValueError,
        "unknown state format 'int9'; known: bf16, fp32, int8, int8_bf16",
    ),
    "unknown format of a pattern": (
        lambda: FusedAdamW(one(), state=[("*", "int9")]),
        ValueError,
        "format 'int9'; known",
    ),
    "unknown format of a group": (
        lambda: FusedAdamW([{"params": one(), "state": "int9"}]),
        ValueError,
        "format 'int9'; known",
    ),
    "state None": (lambda: FusedAdamW(one(), state=None), (TypeError, ValueError), "state"),
    "state 8": (lambda: FusedAdamW(one(), state=8), (TypeError, ValueError), "state"),
    "a pattern of three": (lambda: FusedAdamW(one(), state=[("a", "b", "c")]), TypeError, r"\(pattern, format\) pair"),
    "a pattern that matches nothing": (
        lambda: FusedAdamW(one(), state=[("weigth", "fp32"), "int8"]),
        ValueError,
        "pattern 'weigth' matches no parameter; closest: weight",
    ),
    "a pattern and no names": (
        lambda: FusedAdamW([Parameter(torch.ones(2))], state=[("*", "bf16")]),
        ValueError,
        "need parameter names: pass model.named_parameters",
    ),
    "the same pattern twice": (
        lambda: FusedAdamW(one(), state=[("*", "bf16"), ("*", "int8")]),
        ValueError,
        "twice|no effect|never",
    ),
    "two defaults": (lambda: FusedAdamW(one(), state=["bf16", "int8"]), ValueError, "default"),
    "a format without state": (lambda: FusedSGD(one(), state="int8"), ValueError, "no effect: this optimizer keeps no"),
    "unknown master": (
        lambda: FusedAdamW(one(), master="fp23"),
        ValueError,
        "unknown master weight format 'fp23'; known: fp32, none, split, split8",
    ),
    "a master of float32": (
        lambda: FusedAdamW(one(), master="split"),
        ValueError,
        "no effect: every parameter is float32",
    ),
    "split of fp16": (lambda: FusedAdamW(one(dtype=torch.float16), master="split"), ValueError, "possible: none, fp32"),
    "unknown kernel": (lambda: FusedAdamW(bf16(), kernel="cuda"), ValueError, "unknown kernel 'cuda'; known: auto"),
    "foreach": (lambda: FusedAdamW(one(), foreach=True), TypeError, "no argument 'foreach': how the step runs"),
    "fused": (lambda: FusedSGD(one(), fused=True), TypeError, "no argument 'fused'"),
    "a misspelt argument": (lambda: FusedAdamW(one(), wieght_decay=0.1), TypeError, "no argument 'wieght_decay'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(what: str) -> None:
    make, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        make()


BAD_GROUPS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lr NaN": ({"lr": NAN}, ValueError, "lr=nan"),
    "unknown format": ({"state": "int9"}, ValueError, "int9"),
    "float64": ({"params": [("n", Parameter(torch.ones(2).double()))]}, TypeError, "float64"),
    "the second is float64": (
        {"params": [("a", Parameter(torch.ones(2))), ("n", Parameter(torch.ones(2).double()))]},
        TypeError,
        "float64",
    ),
}


@pytest.mark.parametrize("what", BAD_GROUPS)
def test_a_bad_group_added_in_training_leaves_everything_as_it_was(what: str) -> None:
    group, error, words = BAD_GROUPS[what]
    params, undisturbed = parameters(), parameters()
    optimizer, other = FusedAdamW(params.items(), state="int8"), FusedAdamW(undisturbed.items(), state="int8")
    train(optimizer, params, range(2))
    train(other, undisturbed, range(2))
    before, groups, formats = bits(optimizer, params), groups_of(optimizer), optimizer.formats()
    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": [("late", Parameter(torch.ones(2, 2)))], **group})
    assert groups_of(optimizer) == groups
    assert optimizer.formats() == formats
    assert same_bits(bits(optimizer, params), before)
    train(optimizer, params, range(2, 4))
    train(other, undisturbed, range(2, 4))
    assert same_bits(bits(optimizer, params), bits(other, undisturbed))


def test_a_parameter_added_twice_is_refused() -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", params["wide"])]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("apart", ["one group", "two groups"])
@pytest.mark.parametrize("shared", [slice(0, 6), slice(5, 8), slice(2, 3)], ids=str)
def test_two_parameters_over_the_same_memory_are_refused(shared: slice, apart: str) -> None:
    memory = torch.ones(9)
    first, second = ("first", Parameter(memory[:6].view(2, 3))), ("second", Parameter(memory[shared]))
    other = ("other", Parameter(torch.ones(4)))
    groups = [[first, other, second]] if apart == "one group" else [[first, other], [second]]
    with pytest.raises(ValueError, match=r"(first and second|second and first) share memory.*one Parameter.*\.clone"):
        FusedAdamW([{"params": group} for group in groups])


def test_parameters_side_by_side_in_one_memory_are_stepped() -> None:
    """As in a flat buffer, and as columns of one matrix, whose intervals cross and whose elements do not."""
    memory, matrix = torch.ones(9), torch.ones(4, 6)
    views = [memory[:6].view(2, 3), memory[6:], matrix[:, :2], matrix[:, 2:], memory[:0]]
    params = [Parameter(view) for view in views]
    optimizer = FusedAdamW(params, lr=0.125, weight_decay=0.5)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    alone = Parameter(torch.ones(1))
    alone.grad = torch.ones(1)
    FusedAdamW([alone], lr=0.125, weight_decay=0.5).step()
    assert torch.equal(memory, alone.detach().expand(9))
    assert torch.equal(matrix, alone.detach().expand(4, 6))


SHARDED = """
import torch
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from lightning_fuse import FusedAdamW, FusedLAMB

init_process_group("gloo", init_method="file://{}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for dim, cls in ((1, FusedAdamW), (0, FusedLAMB)):
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(dim)]))
    try:
        cls([("weight", p)], kernel="{}")
    except (TypeError, NotImplementedError) as error:
        print(error)
"""


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_shards_that_cannot_be_stepped_are_refused_by_name(
    kernel: str, run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python("-c", SHARDED.format(tmp_path / "store", kernel))
    columns, layerwise = done.stdout.splitlines()
    assert columns.startswith("parameter weight is a DTensor that cannot be stepped: its placement is S"), done.stderr
    assert "Shard(0)" in columns
    assert layerwise.startswith("parameter weight is sharded, and the rule lamb needs the norm of the whole")


def test_a_name_given_twice_is_refused() -> None:
    """State follows names in a checkpoint: two parameters of one name could not be told apart."""
    with pytest.raises(ValueError, match="name"):
        FusedAdamW([("same", Parameter(torch.ones(2))), ("same", Parameter(torch.ones(3)))])


def test_sparse_gradients_are_refused_before_anything_is_written() -> None:
    table, dense = nn.Embedding(10, 4, sparse=True), Parameter(torch.ones(4))
    optimizer = FusedAdamW([("dense", dense), *table.named_parameters()])
    (table(torch.tensor([1, 2])) * dense).sum().backward()
    before = bits(optimizer, {"dense": dense, "weight": table.weight})
    with pytest.raises(
        TypeError, match="gradient of weight is sparse: must be dense; build the embedding with sparse=False"
    ):
        optimizer.step()
    assert same_bits(bits(optimizer, {"dense": dense, "weight": table.weight}), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lr": NAN}, "lr=nan"), ({"betas": (0.9, 1.0)}, r"betas\[1\]"), ({"weight_decay": -1.0}, "weight_decay")],
)
def test_settings_that_went_bad_in_training_stop_the_step(change: dict[str, Any], words: str) -> None:
    """Also in the second group: the first is not stepped either."""
    params = parameters()
    names = list(params)
    optimizer = FusedAdamW([{"params": [(n, params[n]) for n in part]} for part in (names[:2], names[2:])])
    train(optimizer, params, range(2))
    optimizer.param_groups[1].update(change)
    give_gradients(params, 2)
    before = bits(optimizer, params)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert same_bits(bits(optimizer, params), before)


def test_decay_that_turns_weights_around_is_allowed_as_in_torch() -> None:
    """lr * weight_decay > 1 is unwise, not undefined."""
    p = Parameter(torch.ones(1))
    optimizer = FusedAdamW([p], lr=1.0, weight_decay=3.0)
    p.grad = torch.zeros(1)
    optimizer.step()
    assert p.item() == -2.0
