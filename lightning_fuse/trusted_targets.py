"""What a resumed configuration may build: only what the present one could build, too.

The words of a run folder are composed again at a resume, and a word may set a ``_target_``, which Hydra imports and
calls. A folder may come from elsewhere, so its words are data: a target counts only where a configuration file on the
present search path names it, or the present command line does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

from lightning_fuse.config import ConfigError

TARGET = "_target_"
OWN_FILES = Path(__file__).parent / "conf"


def check_targets(resumed: DictConfig, present: DictConfig, folder: Any) -> None:
    """Refuses a configuration with a target that only a run folder names.

    Args:
        resumed: Composed from the words of a run folder and those of now.
        present: Composed from the words of now.
        folder: The run folder, for the error.

    Raises:
        ConfigError: It has such a target; nothing has been imported then.
    """
    trusted = {target for _, target in _targets(OmegaConf.to_container(present, resolve=False))} | _of_search_path()
    for key, target in _targets(OmegaConf.to_container(resumed, resolve=False)):
        if target not in trusted:
            raise ConfigError(
                f"resume: the run folder {folder} asks to build {key}={target!r}, which no configuration file here "
                f"names; give {key}={target} yourself if you trust it, or take another run folder"
            )


def _of_search_path() -> set[str]:
    """The targets of every configuration file that can be chosen by a word."""
    found: set[str] = set()
    if not GlobalHydra.instance().is_initialized():  # composed by a program, from the package's own files
        for path in OWN_FILES.rglob("*.yaml"):
            found.update(target for _, target in _targets(OmegaConf.to_container(OmegaConf.load(path), resolve=False)))
        return found
    loader = GlobalHydra.instance().config_loader()
    for source in loader.get_sources():
        if source.scheme() in ("file", "pkg") and source.available() and source.provider not in ("hydra", "schema"):
            for name in _configs(source, ""):
                content = OmegaConf.to_container(source.load_config(name).config, resolve=False)
                found.update(target for _, target in _targets(content))
    return found


def _configs(source: Any, folder: str) -> Iterator[str]:
    for name in source.list(folder, ObjectType.CONFIG):
        yield f"{folder}/{name}" if folder else name
    for name in source.list(folder, ObjectType.GROUP):
        yield from _configs(source, f"{folder}/{name}" if folder else name)


def _targets(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every target below a value, with its key."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        inner = f"{key}.{name}" if key else str(name)
        if name == TARGET:
            yield inner, str(item)
        else:
            yield from _targets(item, inner)
