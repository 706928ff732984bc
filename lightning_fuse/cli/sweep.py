"""Prints a list of runs as a W&B sweep, for its server to hand out to any number of agents.

    lightning-fuse sweep digits_lr > digits_lr.yaml
    wandb sweep digits_lr.yaml                          prints the id
    wandb agent ID                                      on every machine

The list is a file in conf/multirun, the same that ``multirun=NAME`` runs without a server. The sweep's metric is its
recipe's. With ``method: bayes`` and ``optimizer.lr: {distribution: log_uniform_values, min: 1e-4, max: 1e-1}`` in the
printed file, W&B's server chooses the rates itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lightning_fuse.cli.train import CONF
from lightning_fuse.cli.words import check_words
from lightning_fuse.run_place import hydra_quoted

PROJECT = "lightning_fuse"
GOALS = {"min": "minimize", "max": "maximize"}
COMMAND = ["${env}", "${program}", "train", "logger=wandb", "logger.wandb.offline=false", "${args_no_hyphens}"]


def main(arguments: list[str] | None = None) -> int:
    """Prints the sweep; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="a word of multirun")
    parser.add_argument("--config-dir", metavar="FOLDER", help="one more folder of configurations")
    options = parser.parse_args(arguments)
    try:
        sweep = sweep_of(options.name, options.config_dir)
    except (ValueError, HydraException) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(OmegaConf.to_yaml(OmegaConf.create(sweep)), end="")
    return 0


def sweep_of(name: str, config_dir: str | None = None) -> dict[str, Any]:
    """A list of runs in W&B's words.

    Args:
        name: A word of multirun.
        config_dir: One more folder of configurations.

    Returns:
        What a sweep file holds.

    Raises:
        ValueError: There is no such list, or no such folder.
    """
    check_words([f"multirun={name}"], CONF, config_dir, multirun=True)
    own = [] if config_dir is None else [f"hydra.searchpath=[{hydra_quoted(f'file://{Path(config_dir).resolve()}')}]"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        cfg = hydra.compose("config", [f"multirun={name}", *own], return_hydra_config=True)
        lists = [f"{key}={values}" for key, values in cfg.hydra.sweeper.params.items()]
        overrides = OverridesParser.create().parse_overrides(lists)
        fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        recipe = hydra.compose("config", [*fixed, *own]).recipe
    command = COMMAND if config_dir is None else [*COMMAND[:3], "--config-dir", config_dir, *COMMAND[3:]]
    return {
        "program": "lightning-fuse",
        "name": name,
        "project": PROJECT,
        "method": "grid",
        "metric": {"name": recipe.monitor, "goal": GOALS[recipe.mode]},
        "parameters": {override.key_or_group: _choices(override) for override in overrides},
        "command": command,
    }


def _choices(override: Any) -> dict[str, Any]:
    if not override.is_sweep_override():
        return {"value": override.value()}
    return {"values": [_plain(value) for value in override.sweep_iterator()]}


def _plain(value: Any) -> Any:
    return getattr(value, "text", value)  # a quoted string of Hydra's
