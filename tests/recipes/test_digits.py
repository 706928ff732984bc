"""The digits: every class in both parts, and read right after seconds of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_fuse.recipes.digits import CNN, DigitsData
from lightning_fuse.run import train
from tests.composing import composed


def test_each_class_is_in_both_parts_by_its_share() -> None:
    data = DigitsData(batch_size=32, validation=0.2)
    train_labels, held_labels = data.train_set.tensors[1], data.validation_set.tensors[1]
    assert len(train_labels) + len(held_labels) == 1797
    for digit in range(10):
        held, others = int((held_labels == digit).sum()), int((train_labels == digit).sum())
        assert held == pytest.approx(0.2 * (held + others), abs=1)
    assert data.data_hash == DigitsData(batch_size=1).data_hash


def test_images_lie_between_0_and_1() -> None:
    images = DigitsData(batch_size=32).train_set.tensors[0]
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)


def test_the_network_maps_images_to_ten_logits() -> None:
    assert CNN(width=8)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(ValueError, match="multiple of 8"):
        CNN(width=12)


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_97_percent_in_a_few_updates(state: str, tmp_path: Path) -> None:
    words = [
        "recipe=digits",
        f"state={state}",
        "recipe.max_steps=100",
        "logger=none",
        "trainer.enable_progress_bar=false",
    ]
    metrics = train(composed(*words, run_folder=tmp_path / "run"), words)
    assert metrics["val/accuracy"] > 0.97
