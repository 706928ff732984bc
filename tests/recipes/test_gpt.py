"""The GPT: causal, of the right size, and quiet about global random state when it writes."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse.recipes.gpt import GPT
from tests.composing import composed


def small(**changes: object) -> GPT:
    return GPT(**{"context": 16, "layers": 2, "heads": 2, "width": 16, **changes}).eval()


def test_logits_have_one_row_per_position() -> None:
    assert small()(torch.randint(256, (3, 10))).shape == (3, 10, 256)


def test_a_position_does_not_see_what_comes_after() -> None:
    model, tokens = small(), torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_it_starts_knowing_nothing() -> None:
    tokens = torch.randint(256, (8, 17))
    logits = small(width=64)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.05)  # ln 256


def test_writing_is_reproducible_and_leaves_random_state_alone() -> None:
    model, prompt = small(), torch.tensor([10])
    state = torch.get_rng_state()
    first, second = model.generate(prompt, 30, seed=3), model.generate(prompt, 30, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert first.shape == (31,)  # longer than the context
    assert not torch.equal(first, model.generate(prompt, 30, seed=4))


@pytest.mark.parametrize(("word", "millions"), [("tiny", 0.84), ("small", 10.8), ("medium", 86), ("large", 304)])
def test_sizes_are_as_their_files_say(word: str, millions: float) -> None:
    cfg = composed(f"model={word}").model
    with torch.device("meta"):
        model = GPT(**{key: value for key, value in cfg.items() if key != "_target_"})
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("changes", [{"width": 15}, {"layers": 0}, {"context": 0}])
def test_impossible_sizes_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"model\."):
        small(**changes)
