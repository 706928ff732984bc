"""The wheel in an empty environment and an empty folder: a recipe of one's own, as docs/new_recipe.md shows it.

The environment has the wheel, and beside it the third-party packages of the one that runs the tests, so that nothing is
downloaded; the checkout is not on its path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, text_of

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin/lightning-fuse`` of an environment with the wheel."""
    pytest.importorskip("scikit_build_core")
    base = tmp_path_factory.mktemp("installed")
    tree = base / "source"
    shutil.copytree(ROOT / "lightning_fuse", tree / "lightning_fuse", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tree / name)
    build = "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1]))"
    # The reference kernel will do; tests/test_packaging.py builds the native one.
    environment = {**os.environ, "SKBUILD_WHEEL_CMAKE": "false"}
    made = subprocess.run(
        [sys.executable, "-c", build, str(base)], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = base.glob("*.whl")
    venv.create(base / "venv", with_pip=False)
    python = base / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=_clean())
    (packages,) = (base / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return base / "venv" / "bin" / "lightning-fuse"


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}


@pytest.fixture
def command(installed: Path, tmp_path: Path) -> Run:
    """``lightning-fuse WORDS`` in an empty folder; any other program by its path."""
    folder = tmp_path / "project"
    folder.mkdir()

    def run(*words: str, program: Path = installed) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(program), *words], cwd=folder, env=_clean(), capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_of_ones_own_needs_no_clone(command: Run, installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    place = command(
        "-c", "import lightning_fuse; print(lightning_fuse.__file__)", program=installed.with_name("python")
    )
    assert str(installed.parents[1]) in place.stdout
    for block in blocks(text_of("docs/new_recipe.md"), "python", "yaml"):
        assert block.label is not None
        path = folder / block.label
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text.split("\n", 1)[1] if block.language == "yaml" else block.text)

    words = ["--config-dir", "my/conf", "recipe=sine", "trainer.max_steps=40", "logger=none", "kernel=reference"]
    command("train", "-m", *words, "state=fp32,int8", "seed=0,1", "hydra.sweep.dir=runs/many")
    first = folder / "runs" / "many" / "0_sine_adamw_fused_fp32"
    again = command("train", "--config-dir", "my/conf", f"resume={first}", "trainer.max_steps=60")
    assert "resuming from" in again.stdout
    assert sum(1 for _ in (first / "steps.jsonl").open()) == 60

    compared = command("compare", "runs/many")
    assert (folder / "runs" / "many" / "comparison" / "page.html").is_file(), compared.stdout
    command("convert", str(first / "checkpoints" / "last.ckpt"), "torch.ckpt", "--to", "lightning")
    assert (folder / "torch.ckpt").is_file()
    counted = command("ledger", "--config-dir", "my/conf", "recipe=sine", "state=int8")
    assert "193 parameters" in counted.stdout
    assert "method: grid" in command("sweep", "digits_lr").stdout
    command("train", "recipe=digits", "model.width=8", "trainer=debug", "logger=none", "run_folder=shipped")
    assert sorted(path.name for path in folder.iterdir()) == ["my", "runs", "shipped", "torch.ckpt"]
