"""Runs of one configuration and several seeds form a group; one group is the baseline, the others are candidates.

Runs belong together when their whole configuration is the same but for the seed, the folders and what only watches. A
group is called by the words that tell it from the others: optimizer, state, master, precision first, then whatever else
differs (``optimizer.lr=0.001``), so two settings never hide in one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fuse.records.manifest import flattened
from lightning_fuse.registry import unknown_name
from lightning_fuse.reports.reading import Run, word

# The word of a group, and where the configuration has it.
WORDS = {"optimizer": "name", "state": "format", "master": "", "precision": "", "kernel": "", "recipe": "name"}
TITLE = ("optimizer", "state", "master", "precision", "kernel")
# What says where a run is written, or only watches it.
WATCHING = ("seed", "resume", "run_folder", "logger", "callbacks.progress", "callbacks.profile", "callbacks.memory")
WATCHING_ENDS = (".dirpath", ".folder", ".save_dir", ".enable_progress_bar", ".sample_bytes", ".enable_model_summary")

EXECUTION = ("optimizer.foreach", "optimizer.fused")  # what the words adamw_loop, adamw_foreach, adamw_torch mean


class NotComparable(ValueError):
    """Runs that cannot stand in one comparison; the message says which, and what to do."""


@dataclass
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        label: What tells it from the other groups, for people: ``adamw_fused int8``.
        words: Word by name, those of ``WORDS``.
        settings: The other settings, dotted key to value.
        runs: In the order in which they were given.
    """

    label: str
    words: dict[str, str]
    settings: dict[str, Any]
    runs: list[Run]

    @property
    def seeds(self) -> list[int | None]:
        """Its seeds, each once, in order."""
        return list(dict.fromkeys(run.seed for run in self.runs))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Sorts runs into groups.

    Args:
        runs: At least one.

    Returns:
        Groups, in the order of their first runs.
    """
    groups: list[Group] = []
    for run in runs:
        words, settings = _words(run.config), _settings(run.config)
        for group in groups:
            if group.words == words and group.settings == settings:
                group.runs.append(run)
                break
        else:
            groups.append(Group("", words, settings, [run]))
    for group, label in zip(groups, _labels(groups), strict=True):
        group.label = label
    return groups


def choose_baseline(groups: Sequence[Group], wanted: Sequence[str] = ()) -> Group:
    """The group that the others are compared with.

    Args:
        groups: At least one.
        wanted: ``KEY=WORD`` each, for instance ``optimizer=adamw_torch``; a key is one of ``WORDS`` or a dotted key of
            the configuration. Without any: torch's fused optimizer with fp32 state, else torch's with any state, else
            fp32 state, else the first group.

    Returns:
        The group.

    Raises:
        NotComparable: No group has these words, or several have.
    """
    if not wanted:
        return _usual_baseline(groups)
    pairs = []
    for text in wanted:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise NotComparable(f"--baseline {text!r} is not KEY=WORD; give for instance optimizer=adamw_torch")
        if key not in WORDS and not any(key in group.settings for group in groups):
            known = [*WORDS, "any dotted key of the configuration"]
            raise NotComparable(f"--baseline {text}: {unknown_name('key', key, known)}")
        pairs.append((key, value))
    found = [g for g in groups if all(str(g.words.get(k, g.settings.get(k))) == value for k, value in pairs)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"'{group.label}'" for group in found or groups)
    said = " ".join(wanted)
    if found:
        raise NotComparable(f"--baseline {said} fits {len(found)} groups: {names}; add a word that tells them apart")
    raise NotComparable(f"--baseline {said} fits no group; there are {names}")


def check_data(runs: Sequence[Run]) -> list[str]:
    """Why runs cannot be compared: other recipes or other data.

    Args:
        runs: Those to be compared.

    Returns:
        One sentence per kind of difference; none where everything fits. A run without a hash fits any data.
    """
    faults = []
    for what, values in (
        ("recipes", [run.recipe for run in runs]),
        ("data hashes", [run.data_hash for run in runs if run.data_hash]),
    ):
        kinds = list(dict.fromkeys(values))
        if len(kinds) > 1:
            counts = ", ".join(f"{_short(kind)} ({values.count(kind)} runs)" for kind in kinds)
            faults.append(f"the runs have {len(kinds)} {what}: {counts}")
    return faults


def same_data(one: Run, other: Run) -> bool:
    """Whether the losses of two runs measure the same thing."""
    hashes = {run.data_hash for run in (one, other)} - {None}
    return one.recipe == other.recipe and len(hashes) <= 1


def setting_differences(baseline: Group, candidate: Group) -> list[str]:
    """Settings that differ, apart from the words and from arguments that only one of two optimizers has.

    Args:
        baseline: One group.
        candidate: The other.

    Returns:
        ``optimizer.lr 0.002 against 0.001``, the candidate's value first.
    """
    ours, theirs = candidate.settings, baseline.settings
    other_optimizer = baseline.words["optimizer"] != candidate.words["optimizer"]
    found = []
    for key in sorted({*ours, *theirs}):
        only_one = key not in ours or key not in theirs
        own_argument = other_optimizer and key.startswith("optimizer.") and (only_one or key in EXECUTION)
        if ours.get(key) == theirs.get(key) or own_argument:
            continue
        found.append(f"{key} {ours.get(key)} against {theirs.get(key)}")
    return found


def _words(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: word(config.get(name), key) for name, key in WORDS.items()}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = flattened(config)
    named = {f"{name}.{key}" if key else name for name, key in WORDS.items()}
    return {
        key: value
        for key, value in flat.items()
        if key not in named
        and not key.endswith(("._target_", "._partial_", *WATCHING_ENDS))
        and not any(key == name or key.startswith(f"{name}.") for name in WATCHING)
        and not key.startswith("recipe.takes.")
    }


def _labels(groups: Sequence[Group]) -> list[str]:
    """Optimizer and state always; other words where they differ; settings where words do not tell groups apart."""
    shown = [name for name in TITLE if name in ("optimizer", "state") or _differ(g.words[name] for g in groups)]
    if _differ(group.words["recipe"] for group in groups):
        shown.insert(0, "recipe")
    labels = [" ".join(_spoken(name, group.words[name]) for name in shown) for group in groups]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [i for i, one in enumerate(labels) if one == label]
        keys = sorted({key for i in alike for key in groups[i].settings})
        telling = [key for key in keys if _differ(str(groups[i].settings.get(key)) for i in alike)]
        for i in alike:
            labels[i] = " ".join([label, *(f"{key}={groups[i].settings.get(key)}" for key in telling)])
    return labels


def _spoken(name: str, value: str) -> str:
    return f"{value} {name}" if name in ("master", "kernel") else value


def _differ(values: Iterable[str]) -> bool:
    return len(set(values)) > 1


def _usual_baseline(groups: Sequence[Group]) -> Group:
    def rank(group: Group) -> tuple[bool, bool]:
        return (not group.words["optimizer"].endswith("_torch"), group.words["state"] != "fp32")

    return min(groups, key=rank)  # the first of equals


def _short(text: object) -> str:
    return str(text)[:16] + "…" if len(str(text)) > 20 else str(text)
