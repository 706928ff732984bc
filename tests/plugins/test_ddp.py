"""Two processes over gloo: the same weights on both, and those of one process on the concatenated batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("ddp_worker.py")


def run(run_python, folder, devices, state):
    target = folder / f"out{devices}"
    finished = run_python(str(WORKER), str(target), str(devices), state)
    assert finished.returncode == 0, finished.stderr[-3000:]
    records = [json.loads((folder / f"out{devices}.{rank}.json").read_text()) for rank in range(devices)]
    return records, torch.load(folder / f"out{devices}.ckpt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_two_ranks_are_one_process_on_both_batches(run_python, tmp_path, state):
    (first, second), two_saved = run(run_python, tmp_path, 2, state)
    (alone,), one_saved = run(run_python, tmp_path, 1, state)
    assert first == second  # weights to the bit; outcomes: an infinity on rank 0 is skipped on both
    # 7 batches an epoch, windows of 2: 4 a epoch, the second of them with the infinity, the last of them short.
    assert [one[0] for one in first["outcomes"]] == ["ok", "nonfinite", "ok", "ok"] * 2
    assert [one[1] for one in first["outcomes"]] == [2, 2, 2, 1] * 2
    assert first["updates"] == alone["updates"] == 6
    assert first["formats"] == alone["formats"]
    assert first["formats"]["layers.0.weight"] == state
    for name, weight in alone["weights"].items():
        # 6 updates of at most 0.01; gradients differ in the order of a sum of four.
        atol = 2e-6 if state == "fp32" else 1e-3
        torch.testing.assert_close(torch.tensor(first["weights"][name]), torch.tensor(weight), rtol=0, atol=atol)
    assert [group["param_names"] for group in two_saved["optimizer_states"][0]["param_groups"]] == [
        group["param_names"] for group in one_saved["optimizer_states"][0]["param_groups"]
    ]
