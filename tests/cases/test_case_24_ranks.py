"""Cases 22 and 24 on two processes: token weights across ranks, and one all-reduce for every optimizer step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ddp_manual.py")
SETUP = 2  # all-reduces with which Lightning and DDP start


def run(run_python, kind, how):
    finished = run_python(str(SCRIPT), kind, how)
    assert finished.returncode == 0, finished.stderr[-3000:]
    line = next(line for line in finished.stdout.splitlines() if '"reduced"' in line)
    return json.loads(line[line.index("{") :])


@pytest.mark.slow
def test_case_24_manual_optimization_reduces_once_per_step(run_python):
    seen = run(run_python, "manual", "fused")
    assert seen["steps"] == 2
    assert seen["reduced"] - SETUP == 2
    # Gradients 1 and 3 on the ranks: mean 2, norm 4, clipped to 2; two steps.
    assert seen["w"] == pytest.approx([-1.0] * 4, abs=1e-5)


@pytest.mark.slow
def test_case_24_stock_reduces_in_every_backward(run_python):
    seen = run(run_python, "manual", "stock")
    assert seen["steps"] == 2
    assert seen["reduced"] - SETUP >= 8
    assert seen["w"] == pytest.approx([-1.0] * 4, abs=1e-5)


@pytest.mark.slow
def test_case_22_tokens_are_weighed_across_ranks(run_python):
    """One token of gradient 4 here, three of 0 there: 1.0 a step; stock's mean of means is 2.0."""
    assert run(run_python, "tokens", "fused")["w"] == pytest.approx([1.0 - 8 * 1.0] * 4, abs=1e-5)
    assert run(run_python, "tokens", "stock")["w"] == [1.0 - 8 * 2.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["overflow", "overflow by hand"])
def test_case_10_an_overflow_on_one_rank_skips_the_step_on_all(run_python, kind):
    """Seven steps of the mean of 1 and 3 on either rank; a rank that had stepped alone would hang or differ."""
    seen = run(run_python, kind, "fused")
    assert (seen["steps"], seen["skips"]) == (8, 1)
    assert seen["w"] == [1.0 - 7 * 2.0] * 4
