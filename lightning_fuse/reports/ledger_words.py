"""The words of ``scripts/ledger.py``: ``params=7B precision=bf16-true master=fp32 state=int8``.

One word says what is counted (``params``, ``recipe`` or ``module``), the others how it is kept. With ``recipe``, every
word of ``train.py`` may be given, and decides as it does there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_fuse.registry import unknown_name
from lightning_fuse.reports.ledger import Setup

SUBJECTS = ("params", "recipe", "module")
POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}

# Words beside those of a setup: of the batch, of a scaled gradient, of a peak.
BATCH = ("devices", "accumulate", "micro_batch")
GRADIENT = ("gradient", "loss_scale")
WHOLE = ("params", "tensors", "shards", "activations", *BATCH, "min_8bit_size")


@dataclass
class Asked:
    """What the words ask for.

    Attributes:
        subject: "params", "recipe" or "module".
        what: The number, the recipe's word, or ``package.module:factory``.
        setup: How it is kept, for params and module.
        tensors: Tensors that ``params`` are spread over.
        shards: Devices that share state.
        activations: Bytes that one step was seen to need beside what is counted, or None.
        batch: devices, accumulate and micro_batch, as far as given.
        gradient: gradient and loss_scale, as far as given.
        rest: With recipe, the words for the configuration.
    """

    subject: str = ""
    what: str = ""
    setup: Setup = field(default_factory=Setup)
    tensors: int = 1
    shards: int = 1
    activations: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    gradient: dict[str, float] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """The number that ``params`` stands for."""
        return whole("params", self.what)


def parse(words: Sequence[str]) -> Asked:
    """Reads the words.

    Args:
        words: ``key=value`` each.

    Returns:
        What they ask for.

    Raises:
        ValueError: A word is no pair, a key is unknown or given twice, a value cannot be read, or nothing is counted.
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{word!r} is no key=value; possible keys: {', '.join(known_keys())}")
        if key in values:
            raise ValueError(f"{key} is given twice ({values[key]} and {value}); give it once")
        values[key] = value
    subjects = [key for key in SUBJECTS if key in values]
    if len(subjects) != 1 and not (not subjects and set(GRADIENT) <= values.keys()):
        for key in () if subjects else values:
            if key not in known_keys():  # most likely a subject with a slip of the pen
                raise ValueError(unknown_name("key", key, known_keys()))
        given = " and ".join(subjects) or "nothing to count"
        raise ValueError(f"{given}; give one of params=NUMBER, recipe=NAME, module=PACKAGE.MODULE:FACTORY")
    asked = Asked(subject=subjects[0] if subjects else "", what=values.pop(subjects[0]) if subjects else "")
    if asked.subject == "params":
        whole("params", asked.what)
    settings = _split(asked, values)
    if asked.subject != "recipe":
        asked.setup = Setup(**settings)
    return asked


def known_keys() -> list[str]:
    """Every key that may be given."""
    return [
        *SUBJECTS,
        "tensors",
        *(f.name for f in fields(Setup) if f.name != "patterns"),
        "activations",
        *BATCH,
        *GRADIENT,
    ]


def whole(key: str, text: str) -> int:
    """A whole number as people write it: ``1000``, ``1_000``, ``1e9``, ``7B``, ``0.5M``.

    Args:
        key: What it is for.
        text: The number.

    Returns:
        The number.

    Raises:
        ValueError: It is none, or not whole, or smaller than 1.
    """
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)(?:e\+?([0-9]{1,2}))?([KMBGT]?)", text.strip(), re.IGNORECASE)
    if found:
        digits, power, letter = found.group(1).replace("_", ""), int(found.group(2) or 0), found.group(3).upper()
        before, _, after = digits.partition(".")
        scale = 10**power * POWERS[letter]
        number, left = divmod(int(before + after) * scale, 10 ** len(after))
        if not left and number >= 1:
            return number
    raise ValueError(f"{key}={text} is no whole number from 1; write for instance 1000, 1_000_000, 1e9, 7B or 1.5M")


def setup_of(config: Mapping[str, Any], shards: int = 1) -> Setup:
    """The choices of a composed configuration, as ``train.py`` runs it and a manifest keeps it.

    Args:
        config: Resolved: optimizer, state, master and precision.
        shards: Devices that share state.

    Returns:
        The choices.

    Raises:
        ValueError: One of them is unknown here.
    """
    optimizer, state = config["optimizer"], config["state"]
    return Setup(
        optimizer=optimizer["name"],
        state=state["format"],
        patterns=tuple((str(pattern), str(word)) for pattern, word in (state.get("patterns") or {}).items()),
        master=config["master"],
        precision=str(config["precision"]),
        shards=shards,
        amsgrad=bool(optimizer.get("amsgrad", False)),
        momentum=float(optimizer.get("momentum", 0.9)),
        min_8bit_size=int(optimizer.get("min_8bit_size", 4096)),
    )


def _split(asked: Asked, values: Mapping[str, str]) -> dict[str, Any]:
    """Files every value where it belongs; returns those of the setup."""
    settings: dict[str, Any] = {}
    known = {f.name for f in fields(Setup)} - {"patterns"}
    for key, value in values.items():
        if key in BATCH:
            asked.batch[key] = whole(key, value)
        elif key in GRADIENT:
            asked.gradient[key] = _number(key, value)
        elif key in ("tensors", "activations"):
            if key == "tensors" and asked.subject != "params":
                raise ValueError(f"tensors={value} goes with params alone; leave it out")
            setattr(asked, key, whole(key, value))
        elif key == "shards":
            asked.shards = settings["shards"] = whole(key, value)
        elif asked.subject == "recipe":
            asked.rest.append(f"{key}={value}")
        elif key in known:
            settings[key] = _setting(key, value)
        else:
            raise ValueError(unknown_name("key", key, known_keys()))
    if asked.gradient and set(asked.gradient) != set(GRADIENT):
        raise ValueError(f"{next(iter(asked.gradient))} alone says nothing; give gradient=2e-8 loss_scale=32768")
    return settings


def _setting(key: str, text: str) -> Any:
    if key == "amsgrad":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"amsgrad={text}: give true or false")
        return text.lower() == "true"
    if key == "momentum":
        return _number(key, text)
    return whole(key, text) if key in WHOLE else text


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}={text} is no number; write for instance 2e-8") from None
