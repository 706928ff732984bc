"""The words of the ledger, its command, and ``train.py ledger=true``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from lightning_fuse.cli.ledger import main
from lightning_fuse.combinations import find_conflict
from lightning_fuse.config import optimizer_factory, run_options
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import KERNELS
from lightning_fuse.ledger.query import parse, whole
from lightning_fuse.ledger.tables import count_recipe, gradient_section, scaled_gradient, size
from lightning_fuse.run import PARAMETER_DTYPES
from lightning_fuse.step import LossScale, StepContract
from tests.composing import ROOT, SMALL, composed
from tests.tolerances import WORKED_EXAMPLE

ODD = """
import torch
def Values(): return torch.nn.Linear(int(torch.ones(3).sum()), 4)
def Lazy(): return torch.nn.LazyLinear(4)
def Complex(): return torch.nn.Linear(4, 4, dtype=torch.complex64)
def Double(): return torch.nn.Linear(4, 4, dtype=torch.float64)
def Half(): return torch.nn.Linear(1000, 5, bias=False, dtype=torch.float16)
"""
RECIPES = sorted(path.stem for path in (ROOT / "lightning_fuse" / "conf" / "recipe").glob("*.yaml"))


# Every recipe's model, in every format and master.


def choices() -> Iterator[tuple[str, str, str]]:
    for state in STATE_FORMATS:
        for master in MASTERS:
            yield state, master, "bf16-true"
        yield state, "none", "32-true"


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_of_every_recipe_is_predicted_to_the_byte(recipe: str) -> None:
    cfg = composed(f"recipe={recipe}")
    for words in choices():
        cfg.state.format, cfg.master, cfg.precision = words
        assert find_conflict(run_options(cfg)) is None
        model = instantiate(cfg.model)
        module = instantiate(cfg.recipe.module, _partial_=True)(
            model, optimizer_factory(cfg), instantiate(cfg.schedule)
        )
        ledger = count_recipe(module, cfg.precision)
        module.to(PARAMETER_DTYPES.get(cfg.precision, torch.float32))
        optimizers = [module.optimizer_factory(groups) for groups in module.groups_of_optimizers()]
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        said: dict[str, int] = {}
        for optimizer in optimizers:
            optimizer.step()
            for key, count in optimizer.state_bytes().items():
                said[key] = said.get(key, 0) + count
        tensors = [(key, t) for o in optimizers for state in o.state.values() for key, t in state.items()]
        measured: dict[str, int] = {}
        for key, tensor in tensors:
            measured[key] = measured.get(key, 0) + tensor.nbytes
        regions = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors}
        assert ledger.state == measured == said, words
        assert ledger.allocated == sum(regions.values()), words
        assert ledger.parameters == ledger.gradients == sum(p.nbytes for p in module.parameters())


# The worked example of a loss scale.


def test_a_small_gradient_at_a_loss_scale_is_whole_again_before_clipping() -> None:
    assert scaled_gradient(2e-8, 32768) == pytest.approx(6.5536e-4, rel=1e-12)
    rows = gradient_section(2e-8, 32768).rows
    assert [row[1] for row in rows] == ["2e-08", "0.00065536", "2e-08"]
    assert rows[0][2] == "lost: rounds to 0"
    assert float(torch.tensor(2e-8, dtype=torch.float16)) == 0.0
    weight = torch.nn.Parameter(torch.ones(1))
    contract = StepContract(loss_scale=LossScale(32768.0))
    contract.scale((2e-8 * weight).sum()).backward()
    assert float(weight.grad) == pytest.approx(6.5536e-4, rel=WORKED_EXAMPLE)
    contract.step(torch.optim.SGD([weight], lr=1.0), clip_norm=1e-8)
    [outcome] = contract.update()
    assert outcome.grad_norm == pytest.approx(2e-8, rel=WORKED_EXAMPLE)
    assert outcome.clip_coef == pytest.approx(1e-8 / (2e-8 + 1e-6), rel=1e-5)  # torch's formula, in unscaled units


# Words.


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e9", 10**9), ("1_000_000", 10**6), ("7B", 7 * 10**9), ("1.5M", 1_500_000), ("12", 12), ("2.5e3", 2500)],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    assert whole("params", text) == number


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "x", "1e", "", "1e-3", "0.0001M0", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"params=.* is no whole number from 1; write for instance"):
        whole("params", text)


def test_words_are_read() -> None:
    query = parse(["params=1e8", "state=int8", "shards=4", "tensors=12", "activations=3e6", "devices=4"])
    assert (query.what, query.tensors, query.activations) == ("1e8", 12, 3 * 10**6)
    assert (query.words, query.shards, query.batch) == (["state=int8"], 4, {"devices": 4})
    query = parse(["recipe=byte_lm", "model=medium", "momentum=0", "shards=2"])
    assert (query.words, query.shards) == (["model=medium", "optimizer.momentum=0"], 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["params=1e9", "state"], "'state' is no key=value; give for instance params=7B"),
        (["params=1", "params=2"], "params is given twice"),
        (["state=int8"], "nothing to count; give one of params="),
        (["params=1", "recipe=digits"], "params and recipe; give one of"),
        (["recipe=digits", "tensors=3"], "tensors=3 goes with params alone"),
        (["params=1", "loss_scale=3"], "loss_scale alone says nothing"),
        (["params=1", "shards=0"], "shards=0 is no whole number from 1"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_sizes_have_decimal_and_binary_units() -> None:
    assert size(16 * 10**9) == "16 GB (14.9 GiB)"
    assert size(800 * 10**6) == "800 MB (762.9 MiB)"
    assert size(2048) == "2.048 kB (2 KiB)"
    assert size(8) == "8 B"


# Commands.


def ledger_py(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160"}
    command = [sys.executable, str(ROOT / "scripts" / "ledger.py"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_command_of_the_issue(tmp_path: Path) -> None:
    done = ledger_py("params=1e9", "precision=bf16-true", "master=fp32", "state=fp32", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "16 GB (14.9 GiB)" in done.stdout
    assert "not counted: activations" in done.stdout
    refused = ledger_py("params=1e9", "state=int9", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("refused: state=int9: unknown word of state 'int9'; known: bf16, fp32, int8")
    assert list(tmp_path.iterdir()) == []


def test_any_importable_module_and_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(1000, 10)\n")
    assert main(["module=mine:build", "state=int8"]) == 0
    assert "10,010 parameters: adamw_fused, state=int8" in capsys.readouterr().out
    (tmp_path / "odd.py").write_text(ODD)
    assert main(["module=odd:Half", "state=fp32"]) == 0  # 32-true casts nothing: 2 bytes each, and 1 kB of buffer
    shown = capsys.readouterr().out
    assert re.search(r"parameters +│ +10 kB .* 2\.000", shown), shown
    assert main(["recipe=byte_lm", "model=medium", "precision=bf16-true", "master=split"]) == 0
    shown = capsys.readouterr().out
    assert "adamw_fused, state=fp32, master=split" in shown
    assert "master weights" in shown
    for word, message in (
        ("module=torch.nn", "give PACKAGE.MODULE:FACTORY"),
        ("module=torch.nn:Linea", "torch.nn has no Linea"),
        ("module=torch:manual_seed", "cannot be built without arguments"),
        ("module=builtins:dict", "makes a dict; give a factory of a torch.nn.Module"),
        ("module=nowhere:x", "No module named 'nowhere'; give a module that python can import"),
        ("module=sys:maxsize", "maxsize of sys cannot be called"),
        ("module=odd:Values", "on the meta device, where tensors have no values (RuntimeError"),
        ("module=odd:Lazy", "weight has no shape yet"),
        ("module=odd:Complex", "parameter weight is torch.complex64"),
        ("module=odd:Double", "parameter weight is torch.float64"),
        ("parms=1e9", "nothing to count"),
        ("recipe=byte_lmm", "did you mean 'byte_lm'?"),
        ("params=1 sate=int8", "did you mean 'state'?"),
        ("params=1 amsgrad=1", "optimizer.amsgrad=1 is a whole number; give true or false"),
        ("params=1 optimizer=lion_fused amsgrad=true", "unknown key 'optimizer.amsgrad'"),
        ("params=1 master=split", "float32 parameters are their own master weights"),
        ("params=1 state.patterns={a:bf16}", "patterns need names"),
        ("recipe=digits state.patterns={hed.*:bf16}", "pattern 'hed.*' matches no parameter"),
        ("params=1 --config-dir=nowhere", "there is no such folder"),
    ):
        assert main(word.split()) == 2
        assert message in capsys.readouterr().err


def test_the_ledger_says_what_this_version_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params=1e6", "shards=4", "state=int8", "activations=1e6"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("not counted │" in shown) == ("triton" not in KERNELS)
    assert "as FSDP2's fully_shard makes them" in shown
    assert "peak of a step" in shown


def test_a_recipe_of_ones_own_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self, *, width: int):\n"
        "        super().__init__(width, 10)\n"
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "own.yaml").write_text("_target_: own_net.Net\nwidth: 100\n")
    words = ["recipe=digits", "model=own", "recipe.requires.model.target=own_net.Net", "state=int8"]
    assert main(["--config-dir", "conf", *words]) == 0
    assert "1,010 parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_train_py_prints_the_ledger_and_trains(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "160"}
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "ledger=true", "state=int8"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    printed, trained = done.stdout.index("counted in all"), done.stdout.index("lightning_fuse run")
    assert printed < trained
    assert list(tmp_path.glob("runs/**/summary.json"))
