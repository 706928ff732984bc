"""Which state format and master weight each parameter gets: decided from its name, dimension and dtype alone.

The decision uses the global shape, never a shard's, so that it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from lightning_fuse.formats import MASTERS, STATE_FORMATS, MasterFormat, StateFormat
from lightning_fuse.kernels.kernel import PARAM_DTYPES, ParamSpec
from lightning_fuse.optim.groups import check_patterns, first_match

StateSpec: TypeAlias = str | Sequence[str | tuple[str, str]]

_EXAMPLE = 'write for instance "int8" or [("*.bias", "fp32"), "int8"]'


class Selection:
    """The user's choice of state formats and master weights.

    Args:
        state: A format's word for all parameters, or a list of (name pattern, word) with a bare word as the default
            of all others. Vectors and scalars stay fp32 under a format with scales unless a pattern names them: their
            state is small and a scale per block would cost more than it saves.
        master: The word of a master weight format, for 16-bit parameters.

    Raises:
        TypeError: ``state`` is neither a word nor such a list.
        ValueError: A word is unknown.
    """

    def __init__(self, state: StateSpec, master: str) -> None:
        self.spec = state
        self.master: MasterFormat = MASTERS[master]
        self.patterns: dict[str, StateFormat] = {}
        self.default: StateFormat = STATE_FORMATS["fp32"]
        if not isinstance(state, Sequence):
            raise TypeError(f"state={state!r}: must be a format's name or a list; {_EXAMPLE}")
        defaults = 0
        for entry in [state] if isinstance(state, str) else state:
            if isinstance(entry, str):
                self.default = STATE_FORMATS[entry]
                defaults += 1
            elif isinstance(entry, Sequence) and len(entry) == 2:
                if entry[0] in self.patterns:
                    raise ValueError(f"state={state!r}: the pattern {entry[0]!r} is there twice; the first would win")
                self.patterns[entry[0]] = STATE_FORMATS[entry[1]]
            else:
                raise TypeError(
                    f"state={state!r}: {entry!r} is neither a format nor a (pattern, format) pair; {_EXAMPLE}"
                )
        if defaults > 1:
            raise ValueError(f"state={state!r}: names {defaults} defaults; give one format without a pattern at most")

    def format_of(self, name: str | None, dims: int, override: str | None) -> StateFormat:
        """The format of one parameter.

        Args:
            name: Its name, or None where the optimizer was given none.
            dims: Its number of dimensions.
            override: The word that its group asks for, or None.

        Returns:
            The state format.

        Raises:
            ValueError: ``override`` is unknown.
        """
        if override is not None:
            return STATE_FORMATS[override]
        pattern = first_match(self.patterns, name) if name is not None else None
        if pattern is not None:
            return self.patterns[pattern]
        return STATE_FORMATS["fp32"] if self.default.scaled and dims <= 1 else self.default

    def master_of(self, dtype: torch.dtype) -> MasterFormat:
        """The master weight format of a parameter: float32 parameters are their own master."""
        return MASTERS["none"] if dtype == torch.float32 else self.master

    def check_effect(self, specs: Sequence[ParamSpec], later: Iterable[str] = ()) -> None:
        """Refuses choices that would be ignored.

        Args:
            specs: Every parameter.
            later: Names of parameters that may be added.

        Raises:
            ValueError: A pattern matches nothing or has no names to match, a format has no state to keep, or no
                parameter can have this kind of master weight.
        """
        if self.patterns:
            if any("param_names" not in spec.group for spec in specs):
                raise ValueError("state patterns need parameter names: pass model.named_parameters()")
            check_patterns(self.patterns, [*(spec.name for spec in specs), *later])
        if not any(spec.rule.moments for spec in specs) and (self.patterns or self.default.name != "fp32"):
            raise ValueError(
                f"state={self.default.name!r} has no effect: this optimizer keeps no moments; "
                'leave state="fp32", or use momentum'
            )
        self._check_master({spec.param.dtype for spec in specs} & set(PARAM_DTYPES) - {torch.float32})

    def _check_master(self, narrow: set[torch.dtype]) -> None:
        if self.master.name == "none":
            return
        if not narrow:
            raise ValueError(
                f"master={self.master.name!r} has no effect: every parameter is float32 and its own master; "
                'use master="none", or 16-bit parameters (bf16-true, 16-true)'
            )
        for dtype in narrow - set(self.master.dtypes):
            able = [word for word, master in MASTERS.items() if dtype in master.dtypes]
            raise ValueError(
                f"master={self.master.name!r} does not fit {dtype} parameters; possible: {', '.join(able)}"
            )
