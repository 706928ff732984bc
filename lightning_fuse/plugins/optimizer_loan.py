"""A user's torch optimizer while ours takes its steps, and what it gets back afterwards.

While the loan lasts, the user's object is a thin face of ours: ``step``, ``zero_grad``, ``state_dict``,
``load_state_dict``, ``add_param_group``, ``param_groups`` and ``state`` are those of our optimizer, and a copy of it is
a plain torch optimizer. When the loan ends, the object is what it was before, over the same group dicts, with the state
as torch keeps it. That state is decoded when somebody first looks at it. Where nobody changed it, the next loan goes on
with our own state, so nothing is rounded twice.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_fuse.optim import FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD
from lightning_fuse.optim.checkpoint.export import to_torch_state
from lightning_fuse.optim.settings import EXECUTION_KEYS

# Keys of torch's groups that our optimizers do not keep; "decoupled_weight_decay" has decided the class by then.
TORCH_KEYS = (*EXECUTION_KEYS, "decoupled_weight_decay")
# Optimizers of torch whose state is that of ours, decoded.
SAME_STATE: tuple[tuple[tuple[type, ...], tuple[type, ...]], ...] = (
    ((Adam, AdamW), (FusedAdam, FusedAdamW)),
    ((SGD,), (FusedSGD,)),
)
HOOKS = [
    f"_optimizer_{kind}_hooks"
    for kind in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
]

Step = Callable[[Optimizer, Callable[[], Any] | None], Any]


class Loan:
    """One optimizer of the user's, and ours that steps its parameters.

    Args:
        owner: The user's optimizer. Its hooks are ours, too, from now on.
        fused: Ours, over the same group dicts, from which ``TORCH_KEYS`` have been taken.
        spec: What ours was made by.
        named: Whether the user's groups had names of their own.
        torch_keys: Per group, what was taken from it.

    Attributes:
        fused: Ours.
        spec: What it was made by.
        cls: The class of the user's.
        active: Whether ours takes the steps at the moment.
        bound: Schedulers, and the attributes by which they hold ours meanwhile.
    """

    def __init__(
        self, owner: Optimizer, fused: FusedOptimizer, spec: Any, named: bool, torch_keys: list[dict[str, Any]]
    ) -> None:
        self.fused = fused
        self.spec = spec
        self.active = False
        self._owner = weakref.ref(owner)
        self.cls = type(owner)
        self._named = named
        self._torch_keys = torch_keys
        self._step: Step | None = None
        self.bound: list[tuple[Any, str]] = []
        self._returned: ReturnedState | None = None
        self._dtypes: list[torch.dtype] = []
        for kind in HOOKS:
            setattr(fused, kind, getattr(owner, kind))

    def begin(self, bound: list[tuple[Any, str]], step: Step | None = None) -> None:
        """Makes the user's optimizer a face of ours.

        Args:
            bound: Objects and the attributes by which they hold the user's optimizer (schedulers); they get ours.
            step: What a call of its ``step`` runs, given ours and the closure; None for the step of ours.
        """
        owner = self._owner()
        assert owner is not None  # the caller holds it
        self._step = step
        self.bound += bound
        for holder, name in bound:
            setattr(holder, name, self.fused)
        if self.active:
            return
        self.active = True
        owner.state = defaultdict(dict)
        _LOANS[owner] = self
        owner.__class__ = _face_of(cast(Any, self.cls))

    def end(self) -> None:
        """Gives groups, state and schedulers back; an optimizer that nobody kept needs nothing."""
        owner, bound = self._owner(), self.bound
        self._step, self.bound = None, []
        if not self.active or owner is None:
            return
        self.active = False
        groups = self.fused.param_groups
        self.fused.param_groups = [_copied(group) for group in groups]
        owner.__class__ = self.cls
        owner.param_groups = groups
        for group, taken in zip(groups, self._all_torch_keys(owner, len(groups)), strict=True):
            group.update(taken)
            if not self._named:
                group.pop("param_names", None)
        self._returned = ReturnedState(self.fused, owner)
        self._dtypes = _dtypes(self.fused)
        owner.state = self._returned
        for holder, name in bound:
            if getattr(holder, name, None) is self.fused:
                setattr(holder, name, owner)

    def take_back(self, names: Mapping[Tensor, str]) -> bool:
        """Lets ours have the groups again, with its own state, where nobody changed the user's optimizer meanwhile.

        Args:
            names: Names of the module's parameters now.

        Returns:
            False where the state or the parameters are others; then nothing has been done.
        """
        owner = self._owner()
        if self.active:
            return True
        if owner is None or self._returned is None or owner.state is not self._returned:
            return False
        ours, theirs = self.fused.param_groups, owner.param_groups
        if not self._returned.untouched() or not _same_params(ours, theirs) or _dtypes(self.fused) != self._dtypes:
            return False
        self._torch_keys = [take_torch_keys(group) for group in theirs]
        for mine, group in zip(ours, theirs, strict=False):
            known = zip(mine.get("param_names", ()), group["params"], strict=False)
            group["param_names"] = [names.get(p, name) for name, p in known]
        added = theirs[len(ours) :]
        self.fused.param_groups = theirs
        del theirs[len(ours) :]
        for group in added:
            self.fused.add_param_group(group)
        return True

    def run_step(self, closure: Callable[[], Any] | None) -> Any:
        """Steps ours, through the contract where one runs."""
        return self.fused.step(closure) if self._step is None else self._step(self.fused, closure)

    def as_torch(self, owner: Optimizer) -> dict[str, Any]:
        """What a pickle or a copy of the user's optimizer holds while ours takes its steps."""
        groups = []
        keys = self._all_torch_keys(owner, len(self.fused.param_groups))
        for group, taken in zip(self.fused.param_groups, keys, strict=True):
            own = {key: value for key, value in group.items() if self._named or key != "param_names"}
            groups.append({**own, **taken})
        state = _decoded(self.fused, self.cls, groups)
        return {"defaults": owner.defaults, "state": state, "param_groups": groups}

    def _all_torch_keys(self, owner: Optimizer, count: int) -> list[dict[str, Any]]:
        """What every group gets back; one that was added meanwhile gets torch's defaults."""
        defaults = {key: owner.defaults[key] for key in TORCH_KEYS if key in owner.defaults}
        return [self._torch_keys[index] if index < len(self._torch_keys) else defaults for index in range(count)]


class ReturnedState(defaultdict):
    """The state of a user's optimizer after a loan: decoded when somebody first looks.

    Args:
        fused: Where it is decoded from.
        owner: The user's optimizer, with its groups.
    """

    def __init__(self, fused: FusedOptimizer, owner: Optimizer) -> None:
        super().__init__(dict)
        self._source: FusedOptimizer | None = fused
        self._owner = weakref.ref(owner)
        self._decoded: dict[Tensor, dict[str, tuple[Any, int]]] = {}

    def fill(self) -> None:
        """Decodes, the first time."""
        source, owner = self._source, self._owner()
        self._source = None
        if source is None or owner is None:
            return
        for p, values in _decoded(source, type(owner), owner.param_groups).items():
            defaultdict.__setitem__(self, p, values)
            self._decoded[p] = {key: (value, _version(value)) for key, value in values.items()}

    def untouched(self) -> bool:
        """Whether this is still what our optimizer holds."""
        if self._source is not None:
            return True
        held = {p: values for p, values in self.items() if values or p in self._decoded}
        return held.keys() == self._decoded.keys() and all(
            values.keys() == self._decoded[p].keys()
            and all(values[key] is one and _version(one) == version for key, (one, version) in self._decoded[p].items())
            for p, values in held.items()
        )

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _filled(name: str) -> Any:
    method = getattr(defaultdict, name)

    def filled(self: ReturnedState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    filled.__name__ = name
    return filled


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__"),
    *("__or__", "__ior__", "__reversed__", "get", "keys", "values", "items", "pop", "popitem", "setdefault", "update"),
    *("clear", "copy", "__copy__"),
):
    setattr(ReturnedState, _name, _filled(_name))


class _Face(Optimizer):
    """How an optimizer behaves whose steps ours takes; see the module."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return _LOANS[self].fused.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        _LOANS[self].fused.param_groups = groups

    @property
    def state(self) -> Any:
        return _LOANS[self].fused.state

    @state.setter
    def state(self, state: Any) -> None:
        _LOANS[self].fused.state = state

    @property
    def _opt_called(self) -> bool:
        return bool(getattr(_LOANS[self].fused, "_opt_called", False))

    @_opt_called.setter
    def _opt_called(self, called: bool) -> None:
        _LOANS[self].fused._opt_called = called  # type: ignore[attr-defined]

    @property
    def step(self) -> Any:
        # A property, because schedulers have left a step of their own on the object.
        loan = _LOANS[self]

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return loan.run_step(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    @step.setter
    def step(self, step: Any) -> None:
        _LOANS[self].fused.step = step  # type: ignore[method-assign]

    def zero_grad(self, set_to_none: bool = True) -> None:
        _LOANS[self].fused.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return _LOANS[self].fused.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _LOANS[self].fused.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _LOANS[self].fused.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return _LOANS[self].as_torch(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (_LOANS[self].cls,), self.__getstate__()


_LOANS: weakref.WeakKeyDictionary[Optimizer, Loan] = weakref.WeakKeyDictionary()


def loan_of(optimizer: Optimizer) -> Loan | None:
    """The loan of a user's optimizer, under way or over; None where there was none."""
    return _LOANS.get(optimizer)


def _blank(cls: type[Optimizer]) -> Optimizer:
    return cls.__new__(cls)


def take_torch_keys(group: dict[str, Any]) -> dict[str, Any]:
    """Takes from a group what torch alone keeps in it.

    Args:
        group: Changed in place.

    Returns:
        What was taken.
    """
    return {key: group.pop(key) for key in TORCH_KEYS if key in group}


@cache
def _face_of(cls: type[Optimizer]) -> type[Optimizer]:
    return type(cls.__name__, (_Face, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {**copied, "params": list(group["params"])}


def _dtypes(fused: FusedOptimizer) -> list[torch.dtype]:
    return [p.dtype for group in fused.param_groups for p in group["params"]]


def _same_params(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether their groups begin with ours."""
    return len(ours) <= len(theirs) and all(
        list(map(id, mine["params"])) == list(map(id, group["params"]))
        for mine, group in zip(ours, theirs, strict=False)
    )


def _decoded(fused: FusedOptimizer, cls: type[Optimizer], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Our state in torch's words; nothing where the user's optimizer is of another rule, and so begins anew."""
    if not any(issubclass(cls, torchs) and isinstance(fused, ours) for torchs, ours in SAME_STATE):
        return {}
    state = to_torch_state(fused)["state"]
    params = [p for group in fused.param_groups for p in group["params"]]
    on_device = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    result = {}
    for index, values in state.items():
        p = params[index]
        if p in on_device and "step" in values:
            values["step"] = values["step"].to(p.device, torch.float32)
        result[p] = values
    return result


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0
