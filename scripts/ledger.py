"""What a training run will keep in memory and move per step, before it is started.

    python scripts/ledger.py params=1e9 precision=bf16-true master=fp32 state=fp32
    python scripts/ledger.py params=7B state=int8 precision=bf16-true master=split shards=8
    python scripts/ledger.py recipe=byte_lm model=medium state=int8          any words of train.py
    python scripts/ledger.py module=torchvision.models:resnet50 state=bf16   any factory, built without memory
    python scripts/ledger.py params=1e8 devices=4 accumulate=2 micro_batch=8
    python scripts/ledger.py gradient=2e-8 loss_scale=32768

Bytes are in GB = 10^9 with GiB beside. ``activations=NUMBER`` adds the peak of a step, from what one step was seen to
need (the ``memory`` callback measures it). See docs/ledger.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # recipes are importable from anywhere

from lightning_fuse.reports.ledger import Counted, bare, counted, ledger_of  # noqa: E402
from lightning_fuse.reports.ledger_table import (  # noqa: E402
    Section,
    batch_section,
    gradient_section,
    of_tensors,
    sections,
    show,
)
from lightning_fuse.reports.ledger_words import Asked, parse, setup_of  # noqa: E402


def main(words: Sequence[str]) -> int:
    """Prints what the words ask for; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        show(answer(parse(words)))
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return 0


def answer(asked: Asked) -> list[Section]:
    """The tables of a ledger.

    Args:
        asked: What the words ask for.

    Returns:
        The sections.

    Raises:
        ValueError: It cannot be counted.
        ImportError: The module's package is not there.
    """
    found: list[Section] = []
    if asked.subject == "params":
        ledger = bare(asked.parameters, asked.setup, asked.tensors)
        each = asked.parameters // asked.tensors
        found += sections(ledger, [each] * asked.tensors, asked.activations)
    elif asked.subject:
        tensors, setup = _of_recipe(asked) if asked.subject == "recipe" else (_of_module(asked.what), asked.setup)
        found += of_tensors(tensors, ledger_of(tensors, setup), asked.activations)
    if asked.batch:
        found.append(batch_section(asked.batch))
    if asked.gradient:
        found.append(gradient_section(asked.gradient["gradient"], asked.gradient["loss_scale"]))
    return found


def _of_module(place: str) -> list[Counted]:
    """Builds an importable module on the meta device, where parameters have shapes and no memory."""
    import torch

    name, colon, factory = place.partition(":")
    if not colon:
        raise ValueError(f"module={place}: give PACKAGE.MODULE:FACTORY, for instance torch.nn:Transformer")
    sys.path.insert(0, "")
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
    return counted(module)


def _of_recipe(asked: Asked) -> tuple[list[Counted], Any]:
    """Composes the configuration as train.py does, and builds its recipe on the meta device."""
    import hydra
    import torch
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    from lightning_fuse.config import check, optimizer_factory, resolved

    words = [f"recipe={asked.what}", *asked.rest, "run_folder=none"]
    try:
        with hydra.initialize_config_dir(str(ROOT / "lightning_fuse" / "conf"), version_base="1.3"):
            cfg = hydra.compose("config", words)
    except HydraException as error:
        raise ValueError(str(error)) from error
    check(cfg)
    with torch.device("meta"):
        model = instantiate(cfg.model)
    recipe = instantiate(cfg.recipe.module, _partial_=True)(model, optimizer_factory(cfg), instantiate(cfg.schedule))
    chosen = {"optimizer": resolved(cfg.optimizer), "state": resolved(cfg.state)}
    setup = setup_of({**chosen, "master": cfg.master, "precision": cfg.precision}, asked.shards)
    return counted(recipe, recipe.groups_of_optimizers()), setup


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
