"""The text: cut in one place, every byte predicted once, and refused where it is too short."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch

from lightning_fuse.recipes.byte_lm import ByteData, Windows
from lightning_fuse.recipes.metrics import BitsPerByte, TokensPerSecond


def data(path: Path, **settings: object) -> ByteData:
    return ByteData(**{"context": 8, "batch_size": 2, "path": str(path), **settings})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(200)))
    return path


def test_validation_is_the_end_in_one_piece(text: Path) -> None:
    cut = data(text, validation=0.25)
    assert cut.train_set.text.tolist() == list(range(150))
    assert cut.validation_set.text.tolist() == list(range(150, 200))
    assert cut.data_hash == f"sha256:{sha256(text.read_bytes()).hexdigest()}"


def test_every_byte_is_predicted_once() -> None:
    windows = Windows(torch.arange(34, dtype=torch.uint8), context=8)
    targets = [int(byte) for index in range(len(windows)) for byte in windows[index][1:]]
    assert targets == list(range(1, 33))


def test_batches_are_full_and_shuffled_and_validation_is_in_order(text: Path) -> None:
    made = data(text, validation=0.25)
    batches = list(made.train_dataloader())
    assert {tuple(batch.shape) for batch in batches} == {(2, 9)}
    starts = torch.cat(batches)[:, 0].tolist()
    assert sorted(starts) == list(range(0, 144, 8))
    assert starts != sorted(starts)
    assert torch.cat(list(made.val_dataloader()))[:, 0].tolist() == [150, 158, 166, 174, 182, 190]


def test_without_a_path_the_text_ships_with_python() -> None:
    made = ByteData(context=128, batch_size=8)
    assert len(made.train_set) > 1000
    assert len(made.validation_set) > 100
    assert bytes(made.train_set.text[:2000].tolist()).isascii()


@pytest.mark.parametrize(
    ("length", "settings", "message"),
    [
        (0, {}, "has 0 bytes, one context is 8"),
        (8, {}, "has 8 bytes, one context is 8"),
        (40, {}, "validation part holds no window of 9"),
        (100, {"batch_size": 50}, "one batch is 50"),
        (100, {"validation": 1.0}, "data.validation=1.0"),
        (100, {"batch_size": 0}, "data.batch_size=0"),
    ],
)
def test_a_text_or_setting_that_does_not_do_is_refused(
    tmp_path: Path, length: int, settings: dict[str, object], message: str
) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(length))
    with pytest.raises(ValueError, match=message):
        data(path, **settings)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        data(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="is a folder"):
        data(tmp_path)


def test_bits_per_byte_weighs_by_bytes() -> None:
    metric = BitsPerByte()
    metric.update(torch.tensor(1.0), weight=1)
    metric.update(torch.tensor(3.0), weight=3)
    assert metric.compute().item() == pytest.approx(2.5 / 0.6931472)


def test_tokens_per_second() -> None:
    metric = TokensPerSecond()
    assert metric.compute() == 0
    metric.update(100, 0.5)
    metric.update(200, 1.0)
    assert metric.compute() == 200
