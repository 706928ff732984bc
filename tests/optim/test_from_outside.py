"""A rule and a format from outside of the package, as docs/extending.md shows them: every format, checkpoints, Fuse."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

from lightning_fuse.config import ConfigError, run_options
from lightning_fuse.formats import STATE_FORMATS, StateFormat
from lightning_fuse.optim import FusedOptimizer
from lightning_fuse.rules import RULES
from tests.composing import composed
from tests.pages import blocks, text_of


@pytest.fixture
def signum() -> Iterator[type[FusedOptimizer]]:
    """The page's module ``my.signum``; its rule is forgotten afterwards."""
    (shown,) = [block for block in blocks(text_of("docs/extending.md"), "python") if block.label == "my/signum.py"]
    module = types.ModuleType("my_signum")
    tables = [(table, dict(table._entries)) for table in (RULES, STATE_FORMATS)]
    exec(compile(shown.text, "my/signum.py", "exec"), module.__dict__)
    sys.modules["my_signum"] = module
    module.FusedSignum.__module__ = "my_signum"
    yield module.FusedSignum
    del sys.modules["my_signum"]
    for table, entries in tables:
        table._entries = entries


def gradients(count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randn(6, 160, generator=made) for _ in range(count)]


def trained(optimizer: FusedOptimizer, p: Parameter, count: int, start: int = 0) -> None:
    for grad in gradients(count)[start:]:
        p.grad = grad
        optimizer.step()


def parameter() -> Parameter:
    return Parameter(torch.linspace(-1, 1, 6 * 160).reshape(6, 160))


def test_it_is_the_formula(signum: type[FusedOptimizer]) -> None:
    p, lr, beta, decay = parameter(), 0.01, 0.7, 0.3
    trained(signum([("w", p)], lr=lr, beta=beta, weight_decay=decay), p, 5)
    weight, buffer = parameter().detach().double(), torch.zeros(6, 160, dtype=torch.float64)
    for grad in gradients(5):
        buffer = beta * buffer + (1 - beta) * grad.double()
        weight = (1 - lr * decay) * weight - lr * buffer.sign()
    torch.testing.assert_close(p.detach().double(), weight, rtol=0, atol=1e-6)  # five steps, a few ulps of 1 each


@pytest.mark.parametrize("state", list(STATE_FORMATS))
def test_every_format_keeps_it_and_a_checkpoint_continues_it(signum: type[FusedOptimizer], state: str) -> None:
    p, q = parameter(), parameter()
    optimizer, other = signum([("w", p)], lr=0.01, state=state), signum([("w", q)], lr=0.01, state=state)
    trained(optimizer, p, 3)
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(optimizer.state_dict())
    trained(optimizer, p, 6, start=3)
    trained(other, q, 6, start=3)
    assert torch.equal(p, q)
    assert optimizer.formats() == {"w": state}
    assert optimizer.kernel_name == "reference"


def test_its_checkpoint_is_not_taken_for_another_rule_s(signum: type[FusedOptimizer]) -> None:
    p = parameter()
    optimizer = signum([("w", p)], lr=0.01)
    trained(optimizer, p, 1)
    from lightning_fuse import FusedLion

    with pytest.raises(ValueError, match="belongs to another optimizer than FusedLion"):
        FusedLion([("w", parameter())], lr=0.01).load_state_dict(optimizer.state_dict())


def test_a_registered_format_is_a_word(signum: type[FusedOptimizer]) -> None:
    bf16, fp32 = STATE_FORMATS["bf16"], STATE_FORMATS["fp32"]
    STATE_FORMATS.register(StateFormat("bf16_fp32", signed=bf16.signed, unsigned=fp32.unsigned))
    p = parameter()
    optimizer = signum([("w", p)], lr=0.01, state="bf16_fp32")
    trained(optimizer, p, 2)
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16


def test_the_command_line_takes_optimizers_derived_from_ours(signum: type[FusedOptimizer]) -> None:
    target = "optimizer._target_=my_signum.FusedSignum"
    assert run_options(composed(target, "state=int8")).family == "fused"
    with pytest.raises(ConfigError, match="what collections keeps as state is not known here"):
        run_options(composed("optimizer._target_=collections.OrderedDict"))
    with pytest.raises(ConfigError, match="name a class that can be imported"):
        run_options(composed("optimizer._target_=nowhere.Optimizer"))
