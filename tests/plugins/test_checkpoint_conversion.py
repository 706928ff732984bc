"""Checkpoint files converted by the script: ours, stock Lightning's, torch's, and files that are none (case 31)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_fuse import Fuse, FusedAdamW, FusedSGD, LoadOptions
from lightning_fuse.callbacks import ExactResume
from lightning_fuse.formats import MASTERS
from lightning_fuse.optim import to_torch_state
from lightning_fuse.optim.checkpoint.schema import saved_formats
from lightning_fuse.plugins.checkpoint_conversion import ConversionSpec, convert_file
from scripts.convert_checkpoint import main
from tests.optim.models import parameters, train
from tests.tolerances import rule_bound

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.98), "eps": 0.02, "weight_decay": 0.2}


class Net(L.LightningModule):
    """Two layers on fixed data; configures torch's AdamW, without names, as most people do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 200), torch.nn.Tanh(), torch.nn.Linear(200, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return (self.net(x).float() ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **SETTINGS)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=generator))
        return torch.utils.data.DataLoader(data, batch_size=4)


def fit(folder: Path, steps: int, *callbacks: L.Callback, resume: Path | None = None, **settings: Any) -> Net:
    module = Net()
    trainer = L.Trainer(
        max_steps=steps, callbacks=list(callbacks), accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=None if resume is None else str(resume))
    assert trainer.global_step == steps
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def same(a: Net, b: Net) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def farthest(a: Net, b: Net) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x.detach() - y.detach()).abs().max()) for x, y in pairs)


def run_script(*words: Any) -> int:
    return main([str(word) for word in words])


def test_a_stock_checkpoint_becomes_one_of_ours(tmp_path: Path) -> None:
    """Converted before the resume or at the resume: the same bits."""
    stock, ours, out = tmp_path / "stock", tmp_path / "ours", tmp_path / "int8.ckpt"
    fit(stock, 4)
    assert run_script(stock / "4.ckpt", out, "--state", "int8") == 0
    (state,) = read(out)["optimizer_states"]
    assert [saved.state for saved in saved_formats(state).values()] == ["int8", "fp32", "int8", "fp32"]
    assert state["state"][0]["exp_avg.codes"].dtype == torch.int8
    before = fit(ours, 8, Fuse(optimizer="adamw_fused", state="int8"), resume=out)
    during = fit(ours, 8, Fuse(optimizer="adamw_fused", state="int8"), resume=stock / "4.ckpt")
    assert same(before, during)
    assert not same(before, fit(ours, 4, Fuse(optimizer="adamw_fused", state="int8")))


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_ours_becomes_one_that_stock_lightning_resumes(state: str, tmp_path: Path) -> None:
    fuse = {"optimizer": "adamw_fused", "state": state}
    fit(tmp_path, 4, Fuse(**fuse), ExactResume())  # whose entries a stock Trainer must not stumble over
    out = tmp_path / "stock.ckpt"
    assert run_script(tmp_path / "4.ckpt", out, "--to", "lightning") == 0
    stock = fit(tmp_path, 8, resume=out)  # torch's own AdamW under Lightning's own plugin
    ours = fit(tmp_path, 8, Fuse(**fuse), resume=tmp_path / "4.ckpt")
    fresh = fit(tmp_path, 4)
    distance = max(
        float((a.detach() - b.detach()).abs().max()) for a, b in zip(stock.parameters(), ours.parameters(), strict=True)
    )
    moved = max(
        float((a.detach() - b.detach()).abs().max())
        for a, b in zip(stock.parameters(), fresh.parameters(), strict=True)
    )
    if state == "fp32":
        assert distance <= 2 * rule_bound(SETTINGS, 4, 1.0, 12.0)
    # The control: four steps move weights much farther; int8 strays by its share of an update.
    assert distance < 0.05 * moved


def test_a_conversion_of_a_file_is_that_of_a_load(tmp_path: Path) -> None:
    fit(tmp_path, 4, Fuse(optimizer="adamw_fused", state="int8"))
    assert run_script(tmp_path / "4.ckpt", tmp_path / "bf16.ckpt", "--state", "bf16") == 0
    assert run_script(tmp_path / "bf16.ckpt", tmp_path / "mixed.ckpt", "--state", "net.0.*=fp32,int8") == 0
    formats = saved_formats(read(tmp_path / "mixed.ckpt")["optimizer_states"][0])
    assert [saved.state for saved in formats.values()] == ["fp32", "fp32", "int8", "fp32"]
    saved, converted = read(tmp_path / "4.ckpt"), read(tmp_path / "bf16.ckpt")
    assert {key for key in saved if key != "optimizer_states"} == {k for k in converted if k != "optimizer_states"}
    module = Net()
    optimizer = FusedAdamW(module.named_parameters(), state="bf16")
    optimizer.load_state_dict(saved["optimizer_states"][0], options=LoadOptions(formats="convert"))
    expected = optimizer.state_dict()
    for index, held in converted["optimizer_states"][0]["state"].items():
        for key, value in held.items():
            assert torch.equal(value, expected["state"][index][key])


def narrow(tmp_path: Path, master: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of bfloat16 parameters with master weights."""
    path = tmp_path / f"{master}.ckpt"
    if not path.exists():
        fit(tmp_path, 4, Fuse(optimizer="adamw_fused", state="int8", master=master), precision="bf16-true")
        (tmp_path / "4.ckpt").rename(path)
    return path, read(path)


@pytest.mark.parametrize("master", ["fp32", "split", "split8"])
def test_weights_alone_are_the_masters(master: str, tmp_path: Path) -> None:
    path, saved = narrow(tmp_path, master)
    out = tmp_path / "weights.ckpt"
    assert run_script(path, out, "--weights-only", "fp32") == 0
    (state,) = saved["optimizer_states"]
    written = read(out)
    assert "optimizer_states" not in written
    for index, name in enumerate(state["param_groups"][0]["param_names"]):
        param = saved["state_dict"][name]
        parts = tuple(state["state"][index][part.suffix] for part in MASTERS[master].parts(tuple(param.shape)))
        assert param.dtype == torch.bfloat16
        assert torch.equal(written["state_dict"][name], MASTERS[master].join(param, parts))
        assert not torch.equal(written["state_dict"][name], param.float())
    loaded = Net.load_from_checkpoint(out, map_location="cpu", weights_only=True)
    assert torch.equal(loaded.net[0].weight, written["state_dict"]["net.0.weight"])


def test_masters_are_converted_in_a_file(tmp_path: Path) -> None:
    path, saved = narrow(tmp_path, "fp32")
    assert run_script(path, tmp_path / "split.ckpt", "--master", "split") == 0
    converted = read(tmp_path / "split.ckpt")
    for index, name in enumerate(saved["optimizer_states"][0]["param_groups"][0]["param_names"]):
        before, after = (each["optimizer_states"][0]["state"][index] for each in (saved, converted))
        weight = MASTERS["split"].join(converted["state_dict"][name], (after["remainder"],))
        assert torch.equal(weight, before["master"])
        assert all(torch.equal(after[key], value) for key, value in before.items() if key not in ("master", "format"))


def test_tied_weights_stay_equal(tmp_path: Path) -> None:
    _, saved = narrow(tmp_path, "split")
    saved["state_dict"]["head.weight"] = saved["state_dict"]["net.0.weight"]
    torch.save(saved, tmp_path / "tied.ckpt")
    convert_file(tmp_path / "tied.ckpt", tmp_path / "out.ckpt", ConversionSpec(weights_only=True))
    weights = read(tmp_path / "out.ckpt")["state_dict"]
    assert torch.equal(weights["head.weight"], weights["net.0.weight"])
    assert not torch.equal(weights["head.weight"], saved["state_dict"]["net.0.weight"].float())


def test_a_state_dict_alone(tmp_path: Path) -> None:
    """Of torch's SGD, without names, one parameter never stepped; and for torch."""
    params = parameters()
    optimizer = torch.optim.SGD(list(params.values()), lr=0.1, momentum=0.9)
    train(optimizer, params, range(3))
    saved = optimizer.state_dict()
    del saved["state"][2]
    torch.save(saved, tmp_path / "sgd.pt")
    convert_file(tmp_path / "sgd.pt", tmp_path / "int8.pt", ConversionSpec(state="int8"))
    converted = read(tmp_path / "int8.pt")
    assert 2 not in converted["state"]
    assert "param_names" not in converted["param_groups"][0]
    ours = FusedSGD(params.values(), lr=0.1, momentum=0.9, state="int8")
    ours.load_state_dict(converted)
    convert_file(tmp_path / "int8.pt", tmp_path / "back.pt", ConversionSpec(to="torch"))
    back = read(tmp_path / "back.pt")
    optimizer.load_state_dict(back)
    expected = to_torch_state(ours)
    assert all(
        torch.equal(back["state"][index]["momentum_buffer"], held["momentum_buffer"])
        for index, held in expected["state"].items()
    )


def test_brackets_in_a_path_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To rich, a word in brackets is a style, and a stray closing one an error."""
    params = {"layers[0].weight": torch.nn.Parameter(torch.randn(2, 150)), "[/red]": torch.nn.Parameter(torch.ones(3))}
    optimizer = FusedAdamW(params.items())
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    folder = tmp_path / "run[1] [bold]x[/bold]"
    folder.mkdir(parents=True)
    torch.save(optimizer.state_dict(), folder / "in[a-z]*.pt")
    assert run_script(folder / "in[a-z]*.pt", folder / "out[ok].pt", "--state", "int8") == 0
    printed = capsys.readouterr().out
    assert f"written: {folder}/out[ok].pt" in printed.replace("\n", "")
    assert "layers[0].weight" in printed
    assert (folder / "out[ok].pt").exists()
    assert run_script(folder / "[red]missing.pt", folder / "x.pt") == 1
    assert "[red]missing.pt is no file" in capsys.readouterr().err.replace("\n", "")


class Bomb:
    """What a file from elsewhere could hold: code that runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, path = tmp_path / "ran", tmp_path / "bomb.ckpt"
    torch.save({"state_dict": {}, "optimizer_states": [], "extra": Bomb(mark)}, path)
    for words in (["--state", "int8"], ["--to", "torch"], ["--weights-only", "fp32"]):
        assert run_script(path, tmp_path / "out.ckpt", *words) == 1
        assert "could run code" in capsys.readouterr().err
    assert not mark.exists()
    assert not (tmp_path / "out.ckpt").exists()
    torch.load(path, weights_only=False)  # the control: the bomb is live
    assert mark.exists()


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good, out = tmp_path / "good.pt", tmp_path / "out.pt"
    params = parameters()
    optimizer = FusedAdamW(params.items())
    train(optimizer, params, range(1))
    torch.save(optimizer.state_dict(), good)
    (tmp_path / "text.pt").write_text("no archive")
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-700])
    (tmp_path / "old.pt").write_bytes(pickle.dumps([1, 2]))
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    untold = torch.optim.AdamW(list(params.values())).state_dict()
    untold["param_groups"][0].pop("decoupled_weight_decay")
    torch.save(untold, tmp_path / "untold.pt")
    refused = [
        (["missing.pt", out], "is no file"),
        ([good, good], "exists: give another name"),
        ([good, tmp_path / "nowhere" / "out.pt"], "is no folder"),
        (["text.pt", out], "cannot be read as tensors and plain data"),
        (["cut.pt", out], "cannot be read as tensors and plain data"),
        (["old.pt", out], "cannot be read"),
        (["other.pt", out], r"holds no optimizer state (its keys: weights)"),
        (["other.pt", out, "--weights-only", "fp32"], "holds no weights"),
        ([good, out, "--state", "int9"], "unknown state format 'int9'; known"),
        ([good, out, "--master", "fp23"], "unknown master weight format 'fp23'; known"),
        ([good, out, "--master", "split"], "every parameter is float32"),
        ([good, out, "--state", "wdie=int8,fp32"], "pattern 'wdie' matches no parameter; closest: wide"),
        ([good, out, "--to", "torch", "--state", "int8"], "state has no effect with to=torch"),
        ([good, out, "--optimizer", "adam"], "the state is of adamw"),
        (["untold.pt", out], "does not tell which optimizer"),
        (["untold.pt", out, "--optimizer", "adamax"], "unknown optimizer 'adamax'"),
    ]
    monkeypatch.chdir(tmp_path)
    for words, message in refused:
        assert run_script(*words) == 1, words
        assert message in " ".join(capsys.readouterr().err.split()), words
        assert not out.exists()
    assert run_script("untold.pt", out, "--optimizer", "adamw") == 0


@pytest.mark.slow  # a process of its own imports torch and Lightning anew
def test_the_script_runs(run_python: Any, repo_root: Path, tmp_path: Path) -> None:
    params = parameters()
    optimizer = FusedAdamW(params.items())
    train(optimizer, params, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    done = run_python(str(repo_root / "scripts" / "convert_checkpoint.py"), "in.pt", "out.pt", "--state", "int8")
    assert done.returncode == 0, done.stderr
    assert "state fp32 -> int8 (exp_avg_sq off by" in " ".join(done.stdout.replace("│", " ").split())
    assert "2 kept bit for bit" in done.stdout
    assert (tmp_path / "out.pt").exists()
