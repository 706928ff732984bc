"""Sweeps: what is printed for W&B obeys its schema and is the multirun, and the launchers start it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from itertools import product
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_class
from jsonschema import Draft7Validator
from omegaconf import DictConfig

from lightning_fuse.cli.sweep import main, sweep_of
from lightning_fuse.config import ConfigError, check
from tests.composing import CONF, ROOT, composed

SWEEPS = sorted(path.stem for path in (CONF / "multirun").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "tests" / "sweep_schema.json").read_text(encoding="utf-8"))
Values = frozenset[tuple[str, Any]]


def with_hydra(*words: str) -> DictConfig:
    """The composed configuration with Hydra's own part."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(words), return_hydra_config=True).hydra


def runs_of_wandb(sweep: dict[str, Any]) -> list[list[str]]:
    """What a grid search of W&B's server runs: words as its agent writes them, NAME=VALUE."""
    choices = {name: [p["value"]] if "value" in p else p["values"] for name, p in sweep["parameters"].items()}
    return [
        [f"{name}={value}" for name, value in zip(choices, chosen, strict=True)]
        for chosen in product(*choices.values())
    ]


def runs_of_hydra(name: str) -> list[list[str]]:
    """What a multirun of Hydra's basic sweeper runs."""
    params = [f"{key}={value}" for key, value in with_hydra(f"multirun={name}").sweeper.params.items()]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(params), max_batch_size=None)
    return [list(run) for run in batch]


def values(run: list[str]) -> Values:
    """A run as (key, value) pairs, so that 3e-4 and 0.0003 are one."""
    return frozenset((o.key_or_group, o.value()) for o in OverridesParser.create().parse_overrides(run))


def test_the_command_prints_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"byte_lm_optimizers", "digits_lr"} <= set(SWEEPS)
    assert main(["digits_lr"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == sweep_of("digits_lr")
    assert main(["digits_l"]) == 2
    assert "did you mean 'digits_lr'?" in capsys.readouterr().err


def test_a_list_of_ones_own_is_a_sweep_too(tmp_path: Path) -> None:
    (tmp_path / "multirun").mkdir()
    own = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: 'range(3)', +x.y: \"'a b',c\"}}}\n"
    (tmp_path / "multirun" / "own.yaml").write_text(own)
    sweep = sweep_of("own", str(tmp_path))
    assert sweep["parameters"] == {"seed": {"values": [0, 1, 2]}, "x.y": {"values": ["a b", "c"]}}
    assert sweep["metric"] == {"name": "val/loss", "goal": "minimize"}
    assert sweep["command"][2:5] == ["train", "--config-dir", str(tmp_path)]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_file_obeys_the_schema(name: str) -> None:
    sweep = sweep_of(name)
    Draft7Validator(SCHEMA).validate(sweep)
    assert sweep["name"] == name


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_file_obeys_the_published_schema(name: str) -> None:
    published = _published()
    if published is None:
        pytest.skip("W&B's package sweeps is not installed (it needs numpy below 2; pip install --no-deps sweeps)")
    Draft7Validator(published).validate(sweep_of(name))


def test_our_schema_allows_no_more_than_the_published_one() -> None:
    published = _published()
    if published is None:
        pytest.skip("W&B's package sweeps is not installed (it needs numpy below 2; pip install --no-deps sweeps)")
    assert set(SCHEMA["properties"]) <= set(published["properties"])
    for spoil in SPOILT:
        sweep = sweep_of("digits_lr")
        spoil(sweep)
        if not list(Draft7Validator(published).iter_errors(sweep)):
            assert spoil in OURS_ALONE


def _published() -> dict[str, Any] | None:
    try:
        (path,) = [file for file in files("sweeps") or () if file.name == "schema.json"]
    except PackageNotFoundError:
        return None
    return json.loads(Path(path.locate()).read_text(encoding="utf-8"))


def _no_method(sweep: dict[str, Any]) -> None:
    del sweep["method"]


def _no_metric(sweep: dict[str, Any]) -> None:
    del sweep["metric"]


def _unknown_method(sweep: dict[str, Any]) -> None:
    sweep["method"] = "gridd"


def _unknown_key(sweep: dict[str, Any]) -> None:
    sweep["parameter"] = {}


def _no_values(sweep: dict[str, Any]) -> None:
    sweep["parameters"]["seed"] = {"values": []}


def _both(sweep: dict[str, Any]) -> None:
    sweep["parameters"]["seed"] = {"value": 1, "values": [1, 2]}


def _name_with_a_plus(sweep: dict[str, Any]) -> None:
    sweep["parameters"]["+trainer.x"] = {"value": 1}


def _zero_on_a_log_scale(sweep: dict[str, Any]) -> None:
    sweep["parameters"]["optimizer.lr"] = {"distribution": "log_uniform_values", "min": 0, "max": 1}


SPOILT = [
    *(_no_method, _no_metric, _unknown_method, _unknown_key, _no_values, _both, _name_with_a_plus, _zero_on_a_log_scale)
]
OURS_ALONE = [_no_metric]  # W&B lets a grid have none, but then its pages have nothing to sort by


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_schema_sees_a_spoilt_sweep(spoil: Callable[[dict[str, Any]], None]) -> None:
    sweep = sweep_of("digits_lr")
    spoil(sweep)
    assert list(Draft7Validator(SCHEMA).iter_errors(sweep))


@pytest.mark.parametrize("name", SWEEPS)
def test_the_multirun_is_the_sweep(name: str) -> None:
    theirs, ours = runs_of_wandb(sweep_of(name)), runs_of_hydra(name)
    assert len(ours) == len(theirs) == {"digits_lr": 15}.get(name, 45)
    assert {values(run) for run in theirs} == {values(run) for run in ours}
    assert len({values(run) for run in ours}) == len(ours)


def test_the_metric_of_a_sweep_is_that_of_its_recipe() -> None:
    for name in SWEEPS:
        sweep = sweep_of(name)
        recipe = composed(f"recipe={sweep['parameters']['recipe']['value']}").recipe
        assert sweep["metric"]["name"] == recipe.monitor
        assert sweep["metric"]["goal"] == {"min": "minimize", "max": "maximize"}[recipe.mode]


def test_every_run_of_a_sweep_trains_or_is_refused() -> None:
    refused = set()
    for run in [run for run in runs_of_hydra("digits_optimizers") if "seed=0" in run]:
        cfg = composed(*run)
        try:
            check(cfg)
        except ConfigError:
            refused.add((cfg.optimizer.name, cfg.state.format))
    stock = {(name, state) for name in ("adamw_loop", "adamw_foreach", "adamw_torch") for state in ("bf16", "int8")}
    assert refused == stock | {("adamw_bnb", "bf16")}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_of_a_sweep_is_one_of_ours(name: str) -> None:
    # The agent's own substitution, for one run as its server would send it.
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = sweep_of(name)
    sent = {key: {"value": p.get("value", p.get("values", [None])[0])} for key, p in sweep["parameters"].items()}
    filled = {
        **create_sweep_command_args({"args": sent}),
        "program": [sweep["program"]],
        "env": [],
        "interpreter": ["python"],
    }
    command = [
        word
        for part in create_sweep_command(sweep["command"])
        for word in (filled[part[2:-1]] if part.startswith("${") else [part])
    ]
    assert command[:2] == ["lightning-fuse", "train"]
    cfg = composed(*command[2:])
    check(cfg)
    assert cfg.logger.wandb.offline is False
    assert cfg.recipe.name == sent["recipe"]["value"]
    assert cfg.optimizer.name == sent["optimizer"]["value"]
    if "optimizer.lr" in sent:
        assert cfg.optimizer.lr == sent["optimizer.lr"]["value"]


def test_a_refused_run_of_a_wandb_agent_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_fuse import run

    monkeypatch.setattr(run, "_in_multirun", lambda: False)
    with pytest.raises(SystemExit):
        run._give_up(ConfigError("no"), code=2)
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    run._give_up(ConfigError("no"), code=2)
    with pytest.raises(SystemExit):  # a training that failed is a failure there, too
        run._give_up(ValueError("no"), code=1)
    assert capsys.readouterr().err.count("refused: no") == 2


def test_slurm_jobs_are_configured() -> None:
    settings = with_hydra("multirun=digits_lr", "hydra/launcher=slurm", "hydra.launcher.partition=gpu").launcher
    assert get_class(settings._target_).__name__ == "SlurmLauncher"
    assert settings.partition == "gpu"
    assert settings.timeout_min == 240
    assert settings.tasks_per_node == 1  # a multirun's run is one process
    assert settings.max_num_timeout == 0  # what was stopped is resumed by name, not started again


@pytest.mark.slow
def test_submitit_runs_a_job_of_a_multirun(run_python: Callable, tmp_path: Path) -> None:
    """SLURM's launcher without SLURM: the same submission, handed to processes of this machine."""
    small = ["model.width=8", "trainer=debug", "trainer.limit_val_batches=1", "logger=none", "callbacks.best=null"]
    words = ["multirun=digits_lr", "hydra/launcher=submitit_local", "optimizer.lr=1e-2", "seed=1", *small]
    done = run_python(str(ROOT / "train.py"), *words)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/*/*_digits_lr/0_lr0.01_seed1/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"


@pytest.mark.slow
def test_joblib_runs_two_jobs_of_a_multirun(run_python: Callable, tmp_path: Path) -> None:
    small = ["model.width=8", "trainer=debug", "trainer.limit_val_batches=1", "logger=none", "callbacks.best=null"]
    words = ["multirun=digits_lr", "hydra/launcher=parallel", "optimizer.lr=1e-3,1e-2", "seed=0", *small]
    done = run_python(str(ROOT / "train.py"), *words)
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.glob("runs/*/*_digits_lr/*/summary.json"))
    assert [path.parent.name for path in folders] == ["0_lr0.001_seed0", "1_lr0.01_seed0"]
    manifests = [json.loads((path.parent / "manifest.json").read_text()) for path in folders]
    assert [m["config"]["optimizer"]["lr"] for m in manifests] == [1e-3, 1e-2]
    assert {m["config"]["state"]["format"] for m in manifests} == {"int8"}
    assert {json.loads(path.read_text())["status"] for path in folders} == {"finished"}
