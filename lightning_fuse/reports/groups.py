"""Runs of one configuration and several seeds form a group; one group is the baseline, the others are candidates.

Runs belong together when their whole configuration is the same but for the seed, the folders and what only watches. A
group is called by what tells it from the others: optimizer and state first, then whatever else differs
(``optimizer.lr=0.001``), so two settings never hide in one group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fuse.records.manifest import flattened
from lightning_fuse.registry import unknown_name
from lightning_fuse.reports.run import UNKNOWN, Run
from lightning_fuse.reports.validation import group_word, shorten

# The word of a group, and where the configuration has it.
WORDS = {"optimizer": "name", "state": "format", "master": "", "precision": "", "kernel": "", "recipe": "name"}
TITLE = ("optimizer", "state", "master", "precision", "kernel")
# The end of an optimizer's word, and what people call it; the rest of the word is the rule.
MAKERS = {"fused": "ours", "torch": "torch fused", "loop": "torch loop", "foreach": "torch foreach"}
MAKERS |= {"bnb": "bitsandbytes"}
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
        label: What tells it from the other groups, for people: ``ours int8``.
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
    """Sorts runs into groups, in the order of their first runs.

    Args:
        runs: At least one.

    Returns:
        Groups, each with a label of its own.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        words = {name: group_word(run.config.get(name), key) for name, key in WORDS.items()}
        settings = _settings(run.config)
        key = json.dumps([run.label, words, settings], sort_keys=True, default=str)
        groups.setdefault(key, Group(run.label, words, settings, [])).runs.append(run)
    found = list(groups.values())
    for group, label in zip(found, _labels(found), strict=True):
        group.label = label
    return found


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
        return min(groups, key=lambda g: (not g.words["optimizer"].endswith("_torch"), g.words["state"] != "fp32"))
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
    names = ", ".join(
        f"'{g.label}' (optimizer={g.words['optimizer']} state={g.words['state']})" for g in found or groups
    )
    said = " ".join(wanted)
    if found:
        raise NotComparable(f"--baseline {said} fits {len(found)} groups: {names}; add a word that tells them apart")
    raise NotComparable(f"--baseline {said} fits no group; there are {names}")


def check_data(runs: Sequence[Run]) -> list[str]:
    """Why runs cannot be compared: other recipes or other data.

    Args:
        runs: Those to be compared.

    Returns:
        One sentence per kind of difference. A run without a recipe or a hash fits any.
    """
    faults = []
    for what, values in (
        ("recipes", [run.recipe for run in runs if run.recipe != UNKNOWN]),
        ("data hashes", [run.data_hash for run in runs if run.data_hash]),
    ):
        kinds = list(dict.fromkeys(values))
        if len(kinds) > 1:
            counts = ", ".join(f"{str(kind)[:20]} ({values.count(kind)} runs)" for kind in kinds)
            faults.append(f"the runs have {len(kinds)} {what}: {counts}")
    return faults


def same_data(one: Run, other: Run) -> bool:
    """Whether the losses of two runs measure the same thing."""
    return not check_data([one, other])


def setting_differences(baseline: Group, candidate: Group) -> list[str]:
    """Settings that differ, apart from the words and from arguments that only one of two optimizers has.

    Args:
        baseline: One group.
        candidate: The other.

    Returns:
        ``optimizer.lr 0.001 against 0.002``, the candidate's value first.
    """
    ours, theirs = candidate.settings, baseline.settings
    other_optimizer = baseline.words["optimizer"] != candidate.words["optimizer"]
    found = []
    for key in sorted({*ours, *theirs}):
        only_one = key not in ours or key not in theirs
        own_argument = other_optimizer and key.startswith("optimizer.") and (only_one or key in EXECUTION)
        if str(ours.get(key)) != str(theirs.get(key)) and not own_argument:
            found.append(f"{key} {shorten(ours.get(key))} against {shorten(theirs.get(key))}")
    return found


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"{name}.{key}" if key else name for name, key in WORDS.items()}
    return {
        key: value
        for key, value in flattened(config).items()
        if key not in named
        and key not in WORDS
        and not key.endswith(("._target_", "._partial_", *WATCHING_ENDS))
        and not any(key == name or key.startswith(f"{name}.") for name in WATCHING)
        and not key.startswith(("recipe.takes.", "recipe.requires."))
    }


def _labels(groups: Sequence[Group]) -> list[str]:
    """Optimizer and state always; other words where they differ; settings where words do not tell groups apart."""
    shown = [name for name in TITLE if name in ("optimizer", "state") or _differ(g.words[name] for g in groups)]
    if _differ(group.words["recipe"] for group in groups):
        shown.insert(0, "recipe")
    one_rule = not _differ(group.words["optimizer"].rpartition("_")[0] for group in groups)
    labels = [" ".join(_spoken(name, group.words[name], one_rule) for name in shown) for group in groups]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [i for i, one in enumerate(labels) if one == label]
        keys = sorted({key for i in alike for key in groups[i].settings})
        telling = [key for key in keys if _differ(str(groups[i].settings.get(key)) for i in alike)]
        for i in alike:
            labels[i] = " ".join([label, *(f"{key}={_setting(groups[i].settings.get(key))}" for key in telling)])
    for i, group in enumerate(groups):
        if group.label:  # of a CSV, which has only the label for what settings differ
            word = group.words["optimizer"]
            labels[i] = group.label.replace(word, _spoken("optimizer", word, one_rule), 1)
    return [label if labels.count(label) == 1 else f"{label} #{i}" for i, label in enumerate(labels)]


def _setting(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 60 else shorten(value)


def _spoken(name: str, value: str, one_rule: bool) -> str:
    if name in ("master", "kernel"):
        return f"{value} {name}"
    rule, _, maker = value.rpartition("_")
    if name != "optimizer" or not rule or maker not in MAKERS:
        return value
    return MAKERS[maker] if one_rule else f"{rule} {MAKERS[maker]}"


def _differ(values: Iterable[str]) -> bool:
    return len(set(values)) > 1
