"""A thousand damaged checkpoint files: each is recognised, none is half loaded, and nothing is run from them."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fuse.callbacks import ExactResume, Fuse
from lightning_fuse.plugins.atomic_checkpoint import (
    AtomicCheckpointIO,
    CheckpointWriteError,
    UnsafeCheckpointError,
    read_checkpoint,
)
from lightning_fuse.records import DamagedCheckpointError, RunFolder, find_checkpoint, verify
from tests.callbacks.resume_runs import Net, SaveAt, fit, loader, same

FILES = 1000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small run with int8 state, inside an accumulation window."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "good.ckpt"
    callbacks = [ExactResume(), Fuse(state="int8"), SaveAt(path, "batch", 3)]
    fit(Net(), callbacks, loader(), folder, seed=1, max_steps=3, accumulate_grad_batches=2)
    return path


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The same file cut anywhere, or with one to eight bits flipped anywhere."""
    if draw.random() < 0.4:
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    for place in {draw.randrange(len(data)) for _ in range(draw.choice((1, 1, 1, 2, 8)))}:
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_a_thousand_damaged_files_are_recognised(saved: Path, tmp_path: Path) -> None:
    data, draw = saved.read_bytes(), random.Random(3)
    missed_by_torch = 0
    for number in range(FILES):
        path = tmp_path / f"{number}.ckpt"
        path.write_bytes(damaged(data, draw))
        with pytest.raises(DamagedCheckpointError, match=r"is not a complete checkpoint; give another one"):
            read_checkpoint(path)
        if number < 100:
            missed_by_torch += _torch_reads(path)
        path.unlink()
    assert missed_by_torch > 10  # the control: without the checksum these would be loaded


def _torch_reads(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


def test_a_cut_at_any_byte_of_the_end_is_recognised(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "cut.ckpt"
    for length in [*range(len(data) - 300, len(data)), *range(0, 200)]:
        path.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpointError):
            verify(path)


def test_every_bit_of_the_seal_counts(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "flipped.ckpt"
    for place in range(len(data) - 60, len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedCheckpointError):
                verify(path)


def test_a_file_of_torch_without_a_seal_is_held_to_its_own_checksums(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    torch.save({"global_step": 1, "state_dict": {"w": torch.arange(5000.0)}}, path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.arange(5000.0))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))
    with pytest.raises(DamagedCheckpointError, match="the checksum of its part"):
        read_checkpoint(path)


def test_a_refused_file_changes_nothing(saved: Path, tmp_path: Path) -> None:
    """The weights, the optimizer's configuration and the random streams are those from before the fit."""
    data = bytearray(saved.read_bytes())
    data[len(data) // 3] ^= 4
    path = tmp_path / "flipped.ckpt"
    path.write_bytes(data)
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(DamagedCheckpointError, match="the checksum of the file differs"):
        fit(net, [ExactResume(), Fuse(state="int8")], loader(), tmp_path, seed=2, max_steps=6, resume=path)
    assert same(before, dict(net.state_dict()))
    assert net.seen == []


def test_the_one_before_is_used_with_one_warning(saved: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    files = AtomicCheckpointIO()
    for step, name in ((10, "last-2.ckpt"), (20, "last-1.ckpt"), (30, "last.ckpt")):
        files.save_checkpoint(
            {"global_step": step, "state_dict": {"w": torch.full((900,), 1.0)}}, folder.checkpoints / name
        )
    data = (folder.checkpoints / "last.ckpt").read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        (folder.checkpoints / "last.ckpt").write_bytes(data[:length])
        with pytest.warns(UserWarning, match="damaged and passed over") as told:
            assert find_checkpoint(folder.path).global_step == 20
        assert len(told) == 1
        assert "last.ckpt; last-1.ckpt of step 20 is used" in str(told[0].message)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for name in ("last.ckpt", "last-1.ckpt"):
        (folder.checkpoints / name).write_bytes(flipped)
    with pytest.warns(UserWarning, match=r"last-1\.ckpt, last\.ckpt; last-2\.ckpt of step 10 is used") as told:
        assert find_checkpoint(folder.path).global_step == 10
    assert len(told) == 1


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "boom")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(saved: Path, tmp_path: Path, sealed: bool) -> None:
    contents = torch.load(saved, weights_only=True)
    path, trace = tmp_path / "bomb.ckpt", tmp_path / "trace"
    contents["hyper_parameters"] = {"more": Bomb(trace)}
    if sealed:
        with pytest.warns(UserWarning, match=r"checkpoint\['hyper_parameters'\]\['more'\] is of type"):
            AtomicCheckpointIO().save_checkpoint(contents, path)
    else:
        torch.save(contents, path)
    net = Net()
    with pytest.raises(UnsafeCheckpointError, match="could run code: it is not loaded") as caught:
        fit(net, [ExactResume(), Fuse(state="int8")], loader(), tmp_path, seed=2, max_steps=6, resume=path)
    assert str(caught.value).count("\n") == 0
    assert not trace.exists()
    assert net.seen == []
    pickle.loads(pickle.dumps(Bomb(trace)))
    assert trace.exists()  # the control: it would have


def test_everything_that_is_written_is_plain(saved: Path) -> None:
    contents = torch.load(saved, weights_only=True)
    about = contents["lightning_fuse"]
    assert about["format_version"] == 1
    assert about["versions"]["torch"] == torch.__version__.split("+")[0] or about["versions"]["torch"]
    assert contents["FusePrecision"]["open_gradients"]  # the window was open
    assert {"python", "numpy", "torch"} <= contents["callbacks"]["ExactResume"]["ranks"][0]["random"].keys()


def test_a_write_that_fails_in_the_middle_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores the signal and gets an error
    try:
        with pytest.raises(CheckpointWriteError, match=r"last\.ckpt cannot be written \(File too large; .* Make room"):
            AtomicCheckpointIO().save_checkpoint({"global_step": 2, "w": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.load(path, weights_only=True)["global_step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "last.ckpt", Path.open
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    monkeypatch.setattr(Path, "open", lambda self, mode="r": opened(Path("/dev/full") if "w" in mode else self, mode))
    with pytest.raises(CheckpointWriteError, match=r"No space left on device; .* MiB free\); the one before it is"):
        AtomicCheckpointIO().save_checkpoint({"global_step": 2, "w": torch.zeros(100_000)}, path)
    monkeypatch.undo()
    assert torch.load(path, weights_only=True)["global_step"] == 1
