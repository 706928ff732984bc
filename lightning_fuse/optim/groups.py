"""Parameter groups by what a parameter is, and settings by name pattern.

Biases and the parameters of normalisation layers are not decayed: pulling them to zero regularises nothing. What counts
as one is decided by the owning module's type and by dimension, never by the luck of a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

# torch's own; any other norm layer is caught by having vectors for parameters.
NORM_MODULES: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
)
BIAS_ROLES = ("bias", "bias_k", "bias_v", "in_proj_bias")


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    lr: float | None = None,
) -> list[dict[str, Any]]:
    """Splits a model's trainable parameters into named groups for any torch optimizer.

    Args:
        model: The model; frozen parameters are left out, tied ones appear once.
        weight_decay: Decay of everything that is not bias-like.
        no_decay: Name patterns (shell style, ``"embed.*"``) of further parameters without decay.
        overrides: Name pattern to settings of its own, for instance
            ``{"head.*": {"lr": 1e-4}, "embed.weight": {"state": "bf16"}}``; the first pattern that matches wins. What
            it does not set is as for any other parameter.
        lr: Learning rate of every group that an override does not change; None leaves it to the optimizer.

    Returns:
        Groups with ``params`` as (name, parameter) pairs, ``weight_decay``, a ``name`` and what the overrides set, in
        the order in which their first parameter appears.

    Raises:
        ValueError: No parameter is trainable, or a pattern matches none.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on some of them")
    overrides = dict(overrides or {})
    names = [name for name, _ in named]
    check_patterns([*no_decay, *overrides], names)
    undecayed = bias_like(model)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for name, parameter in named:
        free = name in undecayed or first_match(no_decay, name) is not None
        kind = "no_decay" if free else "decay"
        pattern = first_match(overrides, name)
        settings: dict[str, Any] = {"weight_decay": 0.0 if free else weight_decay}
        if lr is not None:
            settings["lr"] = lr
        if pattern is not None:
            settings.update(overrides[pattern])
        label = kind if pattern is None else f"{pattern}:{kind}"
        group = groups.setdefault((kind, pattern or ""), {"params": [], "name": label, **settings})
        group["params"].append((name, parameter))
    return list(groups.values())


def bias_like(model: nn.Module) -> set[str]:
    """Names of parameters that decay does not belong to.

    Args:
        model: The model.

    Returns:
        Names of biases, of parameters of normalisation layers, and of all vectors and scalars.
    """
    found = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            is_bias = leaf in BIAS_ROLES and type(module).__module__.startswith("torch.")
            if parameter.dim() <= 1 or is_bias or isinstance(module, NORM_MODULES):
                found.add(f"{prefix}.{leaf}" if prefix else leaf)
    return found


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """The first pattern that matches a parameter's name, or None."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def check_patterns(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuses patterns that match no parameter: they are misspelt, and would be ignored.

    Args:
        patterns: Shell-style name patterns.
        names: The parameters' names.

    Raises:
        ValueError: A pattern matches nothing; the error names what comes close.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:3])
            raise ValueError(f"pattern {pattern!r} matches no parameter; closest: {', '.join(close)}")
