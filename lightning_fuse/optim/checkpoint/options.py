"""What a load may do where a checkpoint does not fit exactly, and what it did: ``LoadOptions`` and ``LoadReport``.

Options are set on the optimizer before anybody calls ``load_state_dict`` with one argument, as Lightning does::

    optimizer.load_options = LoadOptions(rename={"encoder.*": "backbone.*"}, missing="fresh", formats="convert")
    trainer.fit(..., ckpt_path=...)
    print(optimizer.last_load)

Every default refuses: nothing is converted, started anew or left out unless somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, fields

from lightning_fuse.registry import unknown_name

# Field of LoadOptions -> the words that it takes, the default first.
CHOICES: dict[str, tuple[str, ...]] = {
    "missing": ("refuse", "fresh"),
    "unexpected": ("refuse", "leave_out"),
    "shape_mismatch": ("refuse", "fresh"),
    "formats": ("refuse", "convert"),
    "nonfinite": ("refuse", "keep"),
}


@dataclass(frozen=True)
class LoadOptions:
    """What ``load_state_dict`` may do where a checkpoint and an optimizer differ.

    Attributes:
        rename: A parameter's name in the checkpoint -> its name here. ``"encoder.*": "backbone.*"`` renames everything
            that begins so; an exact name wins over it.
        missing: Parameters here that the checkpoint does not hold (new ones): "refuse", or "fresh" state.
        unexpected: Parameters in the checkpoint that are not here (removed): "refuse", or "leave_out".
        shape_mismatch: Parameters whose shape is another one: "refuse", or "fresh" state.
        formats: State formats and master weights other than the checkpoint's: "refuse", or "convert".
        nonfinite: NaN or infinite moments: "refuse", or "keep". They are legitimate only in a run that steps on
            non-finite gradients.
        override: Hyperparameters ("lr", "weight_decay", ...) that stay as they are here; all others come from the
            checkpoint. "lr" stands for "initial_lr" too, where a scheduler left one.

    Raises:
        TypeError: ``rename`` is no mapping of names, ``override`` a bare word, or an option has its old name (``extra``
            is called ``unexpected``, ``reshaped`` ``shape_mismatch``).
        ValueError: A word is unknown, or two names are renamed to one.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    missing: str = "refuse"
    unexpected: str = "refuse"
    shape_mismatch: str = "refuse"
    formats: str = "refuse"
    nonfinite: str = "refuse"
    override: tuple[str, ...] = ()
    extra: InitVar[object] = None
    reshaped: InitVar[object] = None

    def __post_init__(self, extra: object, reshaped: object) -> None:
        for old, new, value in (("extra", "unexpected", extra), ("reshaped", "shape_mismatch", reshaped)):
            if value is not None:
                raise TypeError(f"LoadOptions has no option {old!r} any more: write {new}={value!r}")
        for key, words in CHOICES.items():
            if getattr(self, key) not in words:
                raise ValueError(unknown_name(f"value of {key}", str(getattr(self, key)), words))
        given: object = self.override
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"override={given!r}: must be a list of hyperparameters; write for instance ['lr']")
        object.__setattr__(self, "override", tuple(self.override))
        if not isinstance(self.rename, Mapping):
            raise TypeError(f"rename={self.rename!r}: must map a name in the checkpoint to a name here")
        for old, new in self.rename.items():
            if not isinstance(new, str) or old.endswith("*") != new.endswith("*"):
                raise ValueError(
                    f"rename {old!r} to {new!r}: must be two names, or two beginnings that both end in '*'; "
                    "write for instance 'encoder.*': 'backbone.*'"
                )

    def renamed(self, name: str) -> str:
        """The name here of a parameter that the checkpoint knows by ``name``."""
        if name in self.rename:
            return self.rename[name]
        for old, new in self.rename.items():
            if old.endswith("*") and name.startswith(old[:-1]):
                return new[:-1] + name[len(old) - 1 :]
        return name

    def unused(self, names: list[str]) -> list[str]:
        """The keys of ``rename`` that stand for none of the checkpoint's names."""
        return [
            old
            for old in self.rename
            if not any(name == old or (old.endswith("*") and name.startswith(old[:-1])) for name in names)
        ]

    def keeps(self, key: str) -> bool:
        """Whether a hyperparameter stays as it is here."""
        return key in self.override or (key == "initial_lr" and "lr" in self.override)


@dataclass(frozen=True)
class LoadReport:
    """What a load did, by name; ``str()`` of it is for people.

    Attributes:
        matched: Parameters whose state came from the checkpoint.
        converted: "name: what was converted and what was lost", for those whose format or master is another one.
        fresh: "name: why" of parameters that start anew.
        left_out: Parameters of the checkpoint that are not here.
        taken_over: "group: lr 0.01 from the checkpoint, configured 0.1": settings where the checkpoint won.
        overridden: "group: lr 0.1 as configured, checkpoint 0.01": settings where the configuration won.
        warnings: What a person should look at.
    """

    matched: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether everything came from the checkpoint, bit for bit, and nothing was left there."""
        return not (self.converted or self.fresh or self.left_out or self.overridden or self.warnings)

    def lines(self, most: int = 8) -> Iterator[str]:
        """The report as lines of text.

        Args:
            most: Entries to show of each kind before "and N more".

        Yields:
            One line with counts, then one for each entry of every kind but ``matched``.
        """
        counts = {entry.name.replace("_", " "): getattr(self, entry.name) for entry in fields(self)}
        yield "optimizer state: " + ", ".join(
            f"{len(entries)} {kind}" for kind, entries in counts.items() if entries or kind == "matched"
        )
        for kind, entries in list(counts.items())[1:]:
            yield from (f"  {kind}: {entry}" for entry in entries[:most])
            if len(entries) > most:
                yield f"  {kind}: and {len(entries) - most} more"

    def __str__(self) -> str:
        return "\n".join(self.lines())
