"""The ledger against the worked examples, and against optimizers that really keep what it predicts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_fuse.formats import MASTERS as REAL_MASTERS
from lightning_fuse.formats import STATE_FORMATS
from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedAdEMAMix, FusedLAMB, FusedLARS, FusedLion, FusedSGD
from lightning_fuse.reports.ledger import Counted, Ledger, Setup, bare, counted, ledger_of, sharded
from lightning_fuse.reports.ledger_kinds import FORMATS, MASTERS, MASTERS_FIT, OPTIMIZERS, PRECISIONS
from lightning_fuse.rules import RULES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FUSED: dict[str, Any] = {
    "adamw_fused": FusedAdamW,
    "adam_fused": FusedAdam,
    "sgd_fused": lambda params, **kw: FusedSGD(params, momentum=0.9, **kw),
    "lion_fused": FusedLion,
    "lars_fused": FusedLARS,
    "lamb_fused": FusedLAMB,
    "ademamix_fused": FusedAdEMAMix,
}


class Odd(nn.Module):
    """Every shape that bytes could go wrong in: rows around 128, vectors, a scalar, nothing, four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 127), (2, 128), (5, 129), (7, 1), (1, 300), (4, 3, 5, 7), (257,), (1,), (), (2, 0), (130, 131)]
        self.weights = nn.ParameterList([Parameter(torch.randn(shape)) for shape in shapes])
        self.frozen = Parameter(torch.randn(11, 3), requires_grad=False)
        self.register_buffer("running", torch.zeros(9))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def stepped(module: nn.Module, setup: Setup) -> Any:
    """A real optimizer of the setup's after one step over the module."""
    module.to(DTYPES[PRECISIONS[setup.precision]])
    options = {"state": [*setup.patterns, setup.state], "master": setup.master}
    if setup.amsgrad:
        options["amsgrad"] = True
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = FUSED[setup.optimizer](named, lr=1e-3, **options)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def kept(optimizer: Any) -> dict[str, int]:
    """Bytes of every tensor in the state, by key: an oracle that asks no one."""
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                found[key] = found.get(key, 0) + tensor.numel() * tensor.element_size()
    return found


def storages(optimizer: Any) -> int:
    """Bytes of all memory that the state lies in, each chunk once."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def predicted(module: nn.Module, setup: Setup) -> Ledger:
    return ledger_of(counted(module), setup)


# Worked examples.


def test_a_billion_parameters_with_float32_masters_and_moments_are_16_gb() -> None:
    ledger = bare(10**9, Setup(precision="bf16-true", master="fp32", state="fp32"))
    assert (ledger.parameters, ledger.gradients) == (2 * 10**9, 2 * 10**9)
    assert ledger.state == {"step": 8, "exp_avg": 4 * 10**9, "exp_avg_sq": 4 * 10**9, "master": 4 * 10**9}
    assert ledger.total == 16 * 10**9 + 8  # and one step counter


@pytest.mark.parametrize(
    ("state", "megabytes", "scales"), [("fp32", 800, 0), ("bf16", 400, 0), ("int8", 200, 6_250_000)]
)
def test_moments_of_a_hundred_million_parameters(state: str, megabytes: int, scales: int) -> None:
    ledger = bare(10**8, Setup(state=state))
    found = [ledger.of_moment(name) for name in ("exp_avg", "exp_avg_sq")]
    assert sum(values for values, _ in found) == megabytes * 10**6
    assert sum(each for _, each in found) == scales  # 10^8 / 128 blocks * 4 bytes * 2 moments


def test_more_micro_batches_change_no_state() -> None:
    from lightning_fuse.reports.ledger_table import batch_section

    assert batch_section({"devices": 4, "accumulate": 2, "micro_batch": 8}).rows[0][-1] == "64"
    module = nn.Linear(16, 8)
    optimizer = FusedAdamW(module.named_parameters(), lr=1e-3, state="int8")
    sizes = []
    for _ in range(2):
        for micro_batch in range(8):
            module(torch.randn(micro_batch + 1, 16)).sum().backward()
        optimizer.step()
        sizes.append((kept(optimizer), storages(optimizer)))
    assert sizes[0] == sizes[1]


# Predicted and real, to the byte.


def test_every_format_master_and_rule_is_in_the_ledger() -> None:
    assert set(FORMATS) == set(STATE_FORMATS)
    assert set(MASTERS) == set(REAL_MASTERS)
    for word, master in REAL_MASTERS.items():
        assert {DTYPES[name] for name in MASTERS_FIT[word]} == set(master.dtypes)
    for word, kind in OPTIMIZERS.items():
        if kind.family == "fused":
            real = [(moment.name, moment.signed) for moment in RULES[word.removesuffix("_fused")].moments]
            ours = [(moment.name, moment.signed) for moment in kind.moments]
            assert real == ours or word == "sgd_fused"
    assert set(FUSED) == {word for word, kind in OPTIMIZERS.items() if kind.family == "fused"}


TABLE = [
    (optimizer, state, master, precision)
    for optimizer, state, master, precision in itertools.product(
        FUSED, FORMATS, MASTERS, ("32-true", "bf16-true", "16-true")
    )
    if PRECISIONS[precision] in MASTERS_FIT[master]
]


@pytest.mark.parametrize("optimizer", FUSED)
def test_bytes_of_odd_shapes_are_exact(optimizer: str) -> None:
    for _, state, master, precision in (row for row in TABLE if row[0] == optimizer):
        setup = Setup(optimizer=optimizer, state=state, master=master, precision=precision)
        module = Odd()
        real = stepped(module, setup)
        ledger = predicted(module, setup)
        assert ledger.state == real.state_bytes() == kept(real), (state, master, precision)
        assert ledger.allocated == storages(real), (state, master, precision)
        named = dict(module.named_parameters())
        assert ledger.parameters == sum(p.nbytes for p in named.values())
        assert ledger.gradients == sum(p.grad.nbytes for p in named.values() if p.grad is not None)
        assert ledger.buffers == sum(b.nbytes for b in module.buffers())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_patterns_and_amsgrad_are_counted(amsgrad: bool) -> None:
    patterns = (("weights.6", "int8"), ("weights.1?", "bf16"), ("weights.0", "int8_bf16"))
    setup = Setup(state="fp32", patterns=patterns, amsgrad=amsgrad)
    module = Odd()
    real = stepped(module, setup)
    assert predicted(module, setup).state == kept(real)
    assert predicted(module, setup).allocated == storages(real)
    assert predicted(module, Setup(amsgrad=amsgrad)).state != kept(real)  # the patterns matter


def test_sgd_without_momentum_keeps_a_counter_alone() -> None:
    setup = Setup(optimizer="sgd_fused", momentum=0.0)
    module = nn.Linear(3, 2)
    optimizer = FusedSGD(module.named_parameters(), lr=1e-3)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert predicted(module, setup).state == kept(optimizer) == {"step": 16}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["adamw_loop", "adamw_foreach", "adamw_torch", "sgd_torch"])
def test_torch_s_own_optimizers_are_exact(optimizer: str, precision: str) -> None:
    setup = Setup(optimizer=optimizer, precision=precision, state=PRECISIONS[precision])
    module = Odd().to(DTYPES[PRECISIONS[precision]])
    trained = [p for p in module.parameters() if p.requires_grad]
    how = {"adamw_loop": {"foreach": False}, "adamw_foreach": {"foreach": True}}.get(optimizer, {"fused": True})
    kind = torch.optim.SGD if optimizer.startswith("sgd") else torch.optim.AdamW
    real = kind(trained, lr=1e-3, **({"momentum": 0.9} if kind is torch.optim.SGD else {}), **how)
    for p in trained:
        p.grad = torch.ones_like(p)
    real.step()
    assert predicted(module, setup).state == kept(real)


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_bitsandbytes_is_exact(state: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65), nn.Linear(65, 63, bias=False))
    real = bnb.optim.AdamW(module.parameters(), optim_bits={"fp32": 32, "int8": 8}[state])
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    real.step()
    ledger = predicted(module, Setup(optimizer="adamw_bnb", state=state))
    assert sum(ledger.state.values()) == storages(real)
    assert ledger.state["state1"] == kept(real)["state1"]


def test_shards_along_dimension_0_add_up() -> None:
    """Blocks lie in rows, so the shards of a matrix hold what the whole holds; the ledger counts the largest."""
    setup = Setup(state="int8")
    whole = ledger_of([Counted("w", (10, 300))], setup)
    parts = [ledger_of([Counted("w", (rows, 300))], setup) for rows in (4, 4, 2)]  # torch.chunk(3)
    assert [t.shape[0] for t in torch.zeros(10, 300).chunk(3)] == [4, 4, 2]
    for key in ("exp_avg.codes", "exp_avg.scale"):
        assert sum(part.state[key] for part in parts) == whole.state[key]
    assert ledger_of([Counted("w", (10, 300))], Setup(state="int8", shards=3)).state == parts[0].state
    assert sharded((), 3) == ()
    assert bare(1000, Setup(shards=3)).parameters == 334 * 4


def test_a_module_on_the_meta_device_counts_like_a_real_one() -> None:
    with torch.device("meta"):
        empty = Odd()
    setup = Setup(state="int8", precision="bf16-true", master="split")
    assert vars(predicted(empty, setup)) == vars(predicted(Odd(), setup))


def test_a_checkpoint_file_is_as_large_as_predicted(tmp_path: Any) -> None:
    setup = Setup(state="int8", precision="bf16-true", master="split")
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    real = stepped(module, setup)
    path = tmp_path / "saved.ckpt"
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [real.state_dict()]}, path)
    size, expected = path.stat().st_size, predicted(module, setup).checkpoint
    assert expected <= size <= expected + 32_768  # names, shapes and the archive's own bytes


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": "int9"}, "unknown state format 'int9'; known: bf16, fp32, int8"),
        ({"optimizer": "adamw"}, "unknown optimizer 'adamw'; known: .*adamw_fused"),
        ({"precision": "bf16"}, "unknown precision 'bf16'; known"),
        ({"master": "split"}, "master=split does not fit the fp32 parameters of precision=32-true; use master=none"),
        ({"master": "split", "precision": "16-true"}, "fp16 parameters of precision=16-true; use master=none, fp32"),
        ({"optimizer": "adamw_torch", "state": "int8"}, "cannot keep state=int8; use state=fp32, or optimizer="),
        ({"optimizer": "adamw_bnb", "master": "fp32", "precision": "bf16-true"}, "adamw_bnb has no master=fp32; use"),
        ({"optimizer": "lion_fused", "amsgrad": True}, "amsgrad=true has no effect on lion_fused"),
        ({"shards": 0}, "shards=0: give the number"),
    ],
)
def test_bad_choices_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**settings)


def test_a_model_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        ledger_of([Counted("w", (3,), trained=False)], Setup())
    with pytest.raises(ValueError, match=r"unknown parameter pattern 'hed\.\*'; known: head\.weight"):
        ledger_of([Counted("head.weight", (3, 3))], Setup(patterns=(("hed.*", "bf16"),)))
    with pytest.raises(ValueError, match="patterns need names"):
        bare(10, Setup(patterns=(("a", "bf16"),)))
    with pytest.raises(ValueError, match="params=3 tensors=4"):
        bare(3, Setup(), tensors=4)
