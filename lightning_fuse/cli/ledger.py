"""What a training run will keep in memory and move per step, before it is started.

    lightning-fuse ledger params=1e9 precision=bf16-true master=fp32 state=fp32
    lightning-fuse ledger params=7B state=int8 precision=bf16-true master=split shards=8
    lightning-fuse ledger recipe=byte_lm model=medium state=int8          any words of train
    lightning-fuse ledger --config-dir my/conf recipe=sine                a recipe of one's own
    lightning-fuse ledger module=torchvision.models:resnet50 state=bf16   any factory, built without memory
    lightning-fuse ledger params=1e8 devices=4 accumulate=2 micro_batch=8
    lightning-fuse ledger gradient=2e-8 loss_scale=32768

Bytes are in GB = 10^9 with GiB beside. ``activations=NUMBER`` adds the peak of a step, from what one step was seen to
need (the ``memory`` callback measures it). See docs/ledger.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_fuse.cli.train import CONF
from lightning_fuse.cli.words import check_words
from lightning_fuse.config import check, optimizer_factory, resolved
from lightning_fuse.ledger.count import Ledger, count_module, estimate_params
from lightning_fuse.ledger.query import Query, parse, whole
from lightning_fuse.ledger.tables import (
    Section,
    batch_section,
    count_recipe,
    gradient_section,
    sections,
    show,
    title_of,
)
from lightning_fuse.run_place import hydra_quoted


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the words ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config-dir", metavar="FOLDER", help="one more folder of configurations")
    options = parser.parse_args(arguments)
    if not options.words:
        parser.print_help()
        return 0
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # modules of one's own
    try:
        show(answer(parse(options.words), options.config_dir))
    except (ValueError, TypeError, ImportError, AttributeError, HydraException) as error:
        print(f"refused: {error.__cause__ or error}" if isinstance(error, HydraException) else f"refused: {error}",
              file=sys.stderr)  # fmt: skip
        return 2
    return 0


def answer(query: Query, config_dir: str | None = None) -> list[Section]:
    """The tables of a ledger.

    Args:
        query: What the words ask for.
        config_dir: One more folder of configurations.

    Returns:
        The sections.

    Raises:
        ValueError: It cannot be counted.
        ImportError: The module's package is not there.
    """
    found: list[Section] = []
    if query.subject:
        cfg = _composed(query, config_dir)
        found += sections(_count(query, cfg), title_of(resolved(cfg)), query.activations)
    if query.batch:
        found.append(batch_section(query.batch))
    if query.gradient:
        found.append(gradient_section(query.gradient["gradient"], query.gradient["loss_scale"]))
    return found


def _composed(query: Query, config_dir: str | None) -> DictConfig:
    words = [*([f"recipe={query.what}"] if query.subject == "recipe" else []), *query.words, "run_folder=none"]
    check_words(words, CONF, config_dir, multirun=False)
    own = [] if config_dir is None else [f"hydra.searchpath=[{hydra_quoted(f'file://{Path(config_dir).resolve()}')}]"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", [*words, *own])
    check(cfg)
    return cfg


def _count(query: Query, cfg: DictConfig) -> Ledger:
    factory, precision = optimizer_factory(cfg), str(cfg.precision)
    if query.subject == "params":
        if cfg.state.patterns:
            raise ValueError("patterns need names: give recipe=NAME or module=PACKAGE.MODULE:FACTORY instead of params")
        return estimate_params(whole("params", query.what), factory, precision, query.tensors, query.shards)
    if query.subject == "module":
        return count_module(_built(query.what), factory, precision, shards=query.shards)
    with torch.device("meta"):
        model = instantiate(cfg.model)
    recipe = instantiate(cfg.recipe.module, _partial_=True)(model, factory, instantiate(cfg.schedule))
    return count_recipe(recipe, precision, query.shards)


def _built(place: str) -> torch.nn.Module:
    """Builds an importable module on the meta device, where parameters have shapes and no memory."""
    name, colon, factory = place.partition(":")
    if not colon:
        raise ValueError(f"module={place}: give PACKAGE.MODULE:FACTORY, for instance torch.nn:Transformer")
    try:
        source: Any = import_module(name)
    except ImportError as error:
        raise ImportError(f"module={place}: {error}; give a module that python can import from here") from error
    if not callable(make := getattr(source, factory, None)):
        lacks = f"{factory} of {name} cannot be called" if hasattr(source, factory) else f"{name} has no {factory}"
        raise ValueError(f"module={place}: {lacks}; give one of its classes or functions")
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:  # it is the user's code, and may raise anything
        raise ValueError(
            f"module={place} cannot be built without arguments on the meta device, where tensors have no values "
            f"({type(error).__name__}: {error}); give a factory of yours that can"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module={place} makes a {type(module).__name__}; give a factory of a torch.nn.Module")
    return module


if __name__ == "__main__":
    raise SystemExit(main())
