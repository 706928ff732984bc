"""The words of ``lightning-fuse ledger``: ``params=7B precision=bf16-true master=fp32 state=int8``.

One word says what is counted (``params``, ``recipe`` or ``module``), a few how it is spread; all others are those of
``train`` and decide as they do there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

SUBJECTS = ("params", "recipe", "module")
POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BATCH = ("devices", "accumulate", "micro_batch")
GRADIENT = ("gradient", "loss_scale")
# Settings of an optimizer that may be given without its name.
SHORT = {key: f"optimizer.{key}" for key in ("amsgrad", "momentum", "min_8bit_size")}


@dataclass
class Query:
    """What the words ask for.

    Attributes:
        subject: "params", "recipe", "module", or "" where only a gradient is asked about.
        what: The number, the recipe's word, or ``package.module:factory``.
        tensors: Tensors that ``params`` are spread over.
        shards: Devices that share state.
        activations: Bytes that one step was seen to need beside what is counted, or None.
        batch: devices, accumulate and micro_batch, as far as given.
        gradient: gradient and loss_scale, as far as given.
        words: Those of ``train``.
    """

    subject: str = ""
    what: str = ""
    tensors: int = 1
    shards: int = 1
    activations: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    gradient: dict[str, float] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


def parse(words: Sequence[str]) -> Query:
    """Reads the words.

    Args:
        words: ``key=value`` each.

    Returns:
        What they ask for.

    Raises:
        ValueError: A word is no pair, a key is given twice, a value cannot be read, or nothing is counted.
    """
    query, seen = Query(), dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{word!r} is no key=value; give for instance params=7B state=int8")
        if key in seen:
            raise ValueError(f"{key} is given twice ({seen[key]} and {value}); give it once")
        seen[key] = value
        if key in SUBJECTS:
            query.subject, query.what = key, value
        elif key in BATCH:
            query.batch[key] = whole(key, value)
        elif key in GRADIENT:
            query.gradient[key] = _number(key, value)
        elif key in ("tensors", "shards", "activations"):
            setattr(query, key, whole(key, value))
        else:
            query.words.append(f"{SHORT.get(key, key)}={value}")
    given = [key for key in SUBJECTS if key in seen]
    if len(given) > 1 or not (given or set(GRADIENT) <= seen.keys()):
        raise ValueError(
            f"{' and '.join(given) or 'nothing to count'}; give one of params=NUMBER, recipe=NAME, "
            "module=PACKAGE.MODULE:FACTORY"
        )
    if query.subject == "params":
        whole("params", query.what)
    elif "tensors" in seen:
        raise ValueError(f"tensors={seen['tensors']} goes with params alone; leave it out")
    if query.gradient and set(query.gradient) != set(GRADIENT):
        raise ValueError(f"{next(iter(query.gradient))} alone says nothing; give gradient=2e-8 loss_scale=32768")
    return query


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


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}={text} is no number; write for instance 2e-8") from None
