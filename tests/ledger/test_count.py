"""The ledger against the worked examples, and against optimizers that really keep what it predicts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_fuse.combinations import find_conflict
from lightning_fuse.config import check, optimizer_factory, run_options
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.ledger.count import CASTS, Ledger, count_module, estimate_params, sharded
from lightning_fuse.ledger.tables import batch_section
from lightning_fuse.optim import FusedAdamW
from tests.composing import CONF, composed

FUSED = sorted(path.stem for path in (CONF / "optimizer").glob("*_fused.yaml"))


class Odd(nn.Module):
    """Every shape that bytes could go wrong in: rows around 128, vectors, a scalar, nothing, four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 127), (2, 128), (5, 129), (7, 1), (1, 300), (4, 3, 5, 7), (257,), (1,), (), (2, 0), (130, 131)]
        self.weights = nn.ParameterList([Parameter(torch.randn(shape)) for shape in shapes])
        self.frozen = Parameter(torch.randn(11, 3), requires_grad=False)
        self.register_buffer("running", torch.zeros(9))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def stepped(module: nn.Module, *words: str) -> Any:
    """A real optimizer of the words after one step over the module."""
    cfg = composed(*words)
    module.to(CASTS.get(cfg.precision, torch.float32))
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = optimizer_factory(cfg)(named)
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


def predicted(module: nn.Module, *words: str, shards: int = 1) -> Ledger:
    cfg = composed(*words)
    check(cfg)
    return count_module(module, optimizer_factory(cfg), cfg.precision, shards=shards)


def estimated(number: int, *words: str, **spread: int) -> Ledger:
    cfg = composed(*words)
    return estimate_params(number, optimizer_factory(cfg), cfg.precision, **spread)


# Worked examples.


def test_a_billion_parameters_with_float32_masters_and_moments_are_16_gb() -> None:
    ledger = estimated(10**9, "precision=bf16-true", "master=fp32", "state=fp32")
    assert (ledger.parameters, ledger.gradients) == (2 * 10**9, 2 * 10**9)
    assert ledger.state == {"step": 8, "exp_avg": 4 * 10**9, "exp_avg_sq": 4 * 10**9, "master": 4 * 10**9}
    assert ledger.total == 16 * 10**9 + 8  # and one step counter


@pytest.mark.parametrize(
    ("state", "megabytes", "scales"), [("fp32", 800, 0), ("bf16", 400, 0), ("int8", 200, 6_250_000)]
)
def test_moments_of_a_hundred_million_parameters(state: str, megabytes: int, scales: int) -> None:
    kinds = {key: nbytes for key, nbytes in estimated(10**8, f"state={state}").state.items() if key != "step"}
    assert sum(nbytes for key, nbytes in kinds.items() if "scale" not in key) == megabytes * 10**6
    assert (
        sum(nbytes for key, nbytes in kinds.items() if "scale" in key) == scales
    )  # 10^8 / 128 blocks * 4 bytes * 2 moments


def test_more_micro_batches_change_no_state() -> None:
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


def possible(optimizer: str) -> list[tuple[str, ...]]:
    """Every state, master and precision that an optimizer trains with, as words."""
    rows = itertools.product(STATE_FORMATS, MASTERS, ("32-true", "bf16-true", "16-true"))
    words = [
        (f"optimizer={optimizer}", f"state={state}", f"master={master}", f"precision={precision}")
        for state, master, precision in rows
    ]
    return [row for row in words if find_conflict(run_options(composed(*row))) is None]


@pytest.mark.parametrize("optimizer", FUSED)
def test_bytes_of_odd_shapes_are_exact(optimizer: str) -> None:
    for words in possible(optimizer):
        module = Odd()
        real = stepped(module, *words)
        ledger = predicted(module, *words)
        assert ledger.state == real.state_bytes() == kept(real), words
        assert ledger.allocated == storages(real), words
        named = dict(module.named_parameters())
        assert ledger.parameters == sum(p.nbytes for p in named.values())
        assert ledger.gradients == sum(p.grad.nbytes for p in named.values() if p.grad is not None)
        assert ledger.buffers == sum(b.nbytes for b in module.buffers())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_patterns_and_amsgrad_are_counted(amsgrad: bool) -> None:
    patterns = "state.patterns={weights.6: int8, weights.1?: bf16, weights.0: int8_bf16}"
    words = (patterns, f"optimizer.amsgrad={amsgrad}".lower())
    module = Odd()
    real = stepped(module, *words)
    assert predicted(module, *words).state == kept(real)
    assert predicted(module, *words).allocated == storages(real)
    assert predicted(module, words[1]).state != kept(real)  # the patterns matter


def test_sgd_without_momentum_keeps_a_counter_alone() -> None:
    words, module = ("optimizer=sgd_fused", "optimizer.momentum=0.0"), nn.Linear(3, 2)
    assert predicted(module, *words).state == kept(stepped(module, *words)) == {"step": 16}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["adamw_loop", "adamw_foreach", "adamw_torch", "sgd_torch"])
def test_torch_s_own_optimizers_are_exact(optimizer: str, precision: str) -> None:
    words = (f"optimizer={optimizer}", f"precision={precision}", f"state={'bf16' if 'bf' in precision else 'fp32'}")
    module = Odd()
    real = stepped(module, *words)
    assert predicted(module, *words).state == kept(real)


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_bitsandbytes_is_exact(state: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65), nn.Linear(65, 63, bias=False))
    real = bnb.optim.AdamW(module.parameters(), optim_bits={"fp32": 32, "int8": 8}[state])
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    real.step()
    ledger = predicted(module, "optimizer=adamw_bnb", f"state={state}")
    assert sum(ledger.state.values()) == storages(real)
    assert ledger.state["state1"] == kept(real)["state1"]


def matrix(rows: int) -> nn.Module:
    module = nn.Module()
    module.w = Parameter(torch.zeros(rows, 300))
    return module


def test_shards_along_dimension_0_add_up() -> None:
    """Blocks lie in rows, so the shards of a matrix hold what the whole holds; the ledger counts the largest."""
    whole = predicted(matrix(10), "state=int8")
    parts = [predicted(matrix(rows), "state=int8") for rows in (4, 4, 2)]  # torch.chunk(3)
    assert [t.shape[0] for t in torch.zeros(10, 300).chunk(3)] == [4, 4, 2]
    for key in ("exp_avg.codes", "exp_avg.scale"):
        assert sum(part.state[key] for part in parts) == whole.state[key]
    assert predicted(matrix(10), "state=int8", shards=3).state == parts[0].state
    assert sharded((), 3) == ()
    assert estimated(1000, shards=3).parameters == 334 * 4


def test_a_module_on_the_meta_device_counts_like_a_real_one() -> None:
    with torch.device("meta"):
        empty = Odd()
    words = ("state=int8", "precision=bf16-true", "master=split")
    assert predicted(empty, *words) == predicted(Odd(), *words)


def test_a_checkpoint_file_is_as_large_as_predicted(tmp_path: Any) -> None:
    words = ("state=int8", "precision=bf16-true", "master=split")
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    real = stepped(module, *words)
    path = tmp_path / "saved.ckpt"
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [real.state_dict()]}, path)
    size, expected = path.stat().st_size, predicted(module, *words).checkpoint
    assert expected <= size <= expected + 32_768  # names, shapes and the archive's own bytes


def test_a_model_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern 'hed\.\*' matches no parameter"):
        predicted(nn.Linear(3, 3), "state.patterns={hed.*: bf16}")
    with pytest.raises(ValueError, match="params=3 tensors=4"):
        estimated(3, tensors=4)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        predicted(nn.Linear(3, 3, dtype=torch.float64))


def test_bytes_per_element_are_those_of_long_rows() -> None:
    assert estimated(10, "state=int8").widths == {"p": 4, "exp_avg": 1 + 4 / 128, "exp_avg_sq": 1 + 4 / 128}
    assert estimated(10, "precision=bf16-true", "master=split").widths["remainder"] == 2
    assert predicted(Odd(), "state.patterns={weights.0: int8}").widths["exp_avg"] == 4  # of the default format
