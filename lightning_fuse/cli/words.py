"""Checks the words of a command line before Hydra runs: what cannot be composed is refused in one line.

Hydra itself answers a misspelt group, word or key with several lines, some with a traceback, and exit status 1.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf

from lightning_fuse.registry import unknown_name
from lightning_fuse.run_place import check_writable, hydra_quoted

MOST = 60  # combinations of a multirun that are composed here; each takes a tenth of a second


def check_words(words: list[str], conf: Path, config_dir: str | None, multirun: bool) -> None:
    """Composes what the words ask for, and forgets it again.

    Args:
        words: GROUP=WORD and KEY=VALUE, with lists where many runs are asked for.
        conf: The folder of the shipped configuration.
        config_dir: One more folder, searched as well.
        multirun: Whether many runs are asked for by an option.

    Raises:
        ValueError: They cannot be composed: what was given, what is possible, and the closest known word.
    """
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise ValueError(f"--config-dir {config_dir}: there is no such folder; give one that holds GROUP/WORD.yaml")
        words = [*words, f"hydra.searchpath=[{hydra_quoted(f'file://{folder}')}]"]
    overrides = [_parsed(word) for word in words]
    with hydra.initialize_config_dir(str(conf), version_base="1.3", job_name="train"):
        for number, run in enumerate(_runs(overrides)):
            try:
                cfg = hydra.compose("config", run, return_hydra_config=True)
            except HydraException as error:
                raise ValueError(_fault(error, run)) from error
            lists = [override for override in overrides if override.is_sweep_override()]
            if lists and not multirun and cfg.hydra.mode is None:
                raise ValueError(f"{lists[0].input_line} is a list of values for several runs; add -m for these")
            if number == 0:
                place = "sweep" if multirun or cfg.hydra.mode is not None else "run"
                check_writable(f"hydra.{place}.dir", Path(cfg.hydra[place].dir))
            if number == MOST:
                break


def _parsed(word: str) -> Override:
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except OverrideParseException as error:
        if "=" not in word:
            raise ValueError(f"{word!r} is no word; give GROUP=WORD or KEY=VALUE, such as state=int8") from error
        key, _, value = word.partition("=")
        quoted = shlex.quote(f"{key}={hydra_quoted(value)}")
        raise ValueError(f"{word} cannot be read; put a text with special characters in quotes: {quoted}") from error


def _runs(overrides: list[Override]) -> Iterator[list[str]]:
    """Words of runs in which every value of every list comes up; not all combinations of them."""
    choices: list[list[str]] = []
    for override in overrides:
        try:
            values = [str(value) for value in override.sweep_string_iterator()] if override.is_sweep_override() else []
        except (NotImplementedError, HydraException, AttributeError, TypeError):
            values = []  # a glob, which the sweeper resolves
            continue
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in values] or [str(override.input_line)])
    for run in zip_longest(*choices):
        yield [word if word is not None else choice[0] for word, choice in zip(run, choices, strict=True)]
    if not choices:
        yield []


def _fault(error: HydraException, words: list[str]) -> str:
    """Hydra's reason in one line of ours."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, word = error.missing_cfg_file.rpartition("/")
        given = f"{group}={word}" if group else word
        options = error.options or _words_of(group)
        return f"{given}: {unknown_name(f'word of {group}', word, options)}" if options else f"{given}: no such file"
    message = str(error).split("\n")[0]
    found = re.search(r"'([^']+)'", message)
    if not isinstance(error, ConfigCompositionException) or found is None:
        return message
    key = found[1].split("@")[0]
    given = next((word for word in words if word.lstrip("+~").startswith(key)), key)
    if "already at" in message:
        return f"{given}: the key is there already; leave the + out"
    if key.startswith("hydra."):
        return f"{given}: unknown key {key!r}; --hydra-help and --cfg hydra show those of Hydra"
    return f"{given}: {_unknown_key(key, words)}"


def _words_of(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group)) if group else []


def _unknown_key(key: str, words: list[str]) -> str:
    """Names the keys beside an unknown one, and the closest of all."""
    from hydra.core.global_hydra import GlobalHydra

    groups = [name for name in GlobalHydra.instance().config_loader().list_groups("") if name != "hydra"]
    cfg = hydra.compose("config", [word for word in words if word.partition("=")[0] in groups])
    keys = {*_dotted(OmegaConf.to_container(cfg)), *groups}
    if key in keys:
        return f"{key} takes other values; --help names its words, --cfg job shows its settings"
    parent = key.rpartition(".")[0]
    beside = sorted(name for name in keys if name.rpartition(".")[0] == parent)
    close = get_close_matches(key, sorted(keys), n=1) or [
        name for name in sorted(keys) if name.rpartition(".")[2] == key.rpartition(".")[2]
    ]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if parent and isinstance(node := OmegaConf.select(cfg, parent), DictConfig) and "_target_" in node:
        hint += f" (+{key}=… gives {parent} one more argument)"
    return f"unknown key {key!r}; known: {', '.join(beside or sorted({name.split('.')[0] for name in keys}))}{hint}"


def _dotted(table: Any, prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if not str(name).startswith("_"):
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from _dotted(value, f"{prefix}{name}.")
