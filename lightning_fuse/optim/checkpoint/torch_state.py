"""States that do not say what they are: those of torch's own optimizers, and bitsandbytes' under the same keys."""

from __future__ import annotations

from torch import Tensor

from lightning_fuse.formats import MASTERS
from lightning_fuse.formats.floating import Float32
from lightning_fuse.kernels.kernel import ParamSpec
from lightning_fuse.optim.checkpoint.convert import LoadItem
from lightning_fuse.optim.checkpoint.foreign import BnbMoment
from lightning_fuse.optim.checkpoint.options import LoadOptions
from lightning_fuse.optim.checkpoint.schema import StateLayout, is_ours

_TORCHS_RULES = ("adamw", "adam", "sgd")
_PARTS = (".codes", ".scale")


def plan_foreign(item: LoadItem, options: LoadOptions) -> None:
    """Checks another library's state of one parameter, and says how it is kept.

    Args:
        item: The parameter; its layout stays None where it was never stepped.
        options: What may be done where it does not fit exactly.

    Raises:
        ValueError: It is another rule's, of another shape, or damaged.
    """
    spec, state = item.spec, item.state
    _check_kind(spec, item)
    moments = spec.rule.moments
    if not any(state.get(moment.name) is not None for moment in moments) and not (state and not moments):
        return
    kept = [state.get(moment.name) for moment in moments]
    shapes = {tuple(value.shape) for value in kept if isinstance(value, (Tensor, BnbMoment))}
    if len(shapes) == 1 and shapes != {spec.local_shape}:
        item.fresh = reshaped(spec, shapes.pop(), options)
        return
    if any(moment.normalizer for moment in moments) and "step" not in state:
        raise ValueError(
            f"checkpoint holds no step for {spec.name}, and the rule {spec.rule.name} corrects its moments by it: "
            "it belongs to another optimizer"
        )
    for moment, value in zip(moments, kept, strict=True):
        if isinstance(value, BnbMoment):
            fault = value.validate(signed=moment.signed)
        elif isinstance(value, Tensor) and value.shape == spec.local_shape and value.is_floating_point():
            fault = Float32().validate((value,), signed=moment.signed, finite=options.nonfinite == "refuse")
        else:
            raise ValueError(
                f"checkpoint holds {sorted(map(str, state))} for {spec.name}, the rule {spec.rule.name} needs "
                f"{moment.name} of shape {spec.local_shape}: it belongs to another optimizer or model"
            )
        if fault:
            raise damaged_moment(spec.name, moment.name, fault)
    of_bitsandbytes = any(isinstance(value, BnbMoment) for value in kept)
    if not of_bitsandbytes and moments and spec.rule.name.split("_")[0] not in _TORCHS_RULES:
        item.notes.append(f"moments of another rule go on under {spec.rule.name}")
    whose = "of bitsandbytes" if of_bitsandbytes else "of torch"
    item.layout = StateLayout(whose, moments, [Float32()] * len(moments), MASTERS["none"])


def reshaped(spec: ParamSpec, shape: tuple[int, ...], options: LoadOptions) -> str:
    """Refuses a parameter of another shape, unless it may start anew.

    Args:
        spec: The parameter.
        shape: The shape that it had when it was saved.
        options: Whether it may.

    Returns:
        Why it starts anew.

    Raises:
        ValueError: It may not.
    """
    here = spec.local_shape
    if options.shape_mismatch == "refuse":
        raise ValueError(
            f"checkpoint holds {spec.name} of shape {shape}, here it is of shape {here}: it belongs to another model; "
            "build the one that was saved, or start this parameter anew with "
            'LoadOptions(shape_mismatch="fresh")'
        )
    return f"it was of shape {shape} and is of shape {here}"


def damaged_moment(name: str, moment: str, fault: str) -> ValueError:
    """The error for a moment that no step can have left.

    Args:
        name: The parameter.
        moment: The moment.
        fault: What is wrong, as it reads after "holds".

    Returns:
        The error.
    """
    keep = (
        'keep them with LoadOptions(nonfinite="keep") if the run stepped on such gradients'
        if fault.startswith("NaN")
        else "load another one"
    )
    return ValueError(f"checkpoint holds {fault} in {moment} of {name}: it is damaged; {keep}")


def _check_kind(spec: ParamSpec, item: LoadItem) -> None:
    """Refuses a state of ours that nothing describes, and one of another rule, whose moments this one does not know."""
    keys = {key for key in item.state if isinstance(key, str)}
    # torch puts a dict, mostly an empty one, where a flattened state lacks what this optimizer keeps.
    torn = any(isinstance(item.state[key], dict) for key in keys if is_ours(key))
    if torn or any(key in ("master", "remainder") or key.endswith(_PARTS) for key in keys):
        raise ValueError(
            f"checkpoint holds {sorted(keys)} for {spec.name}, which are of lightning_fuse, but not in the format "
            f"that this run asks for (state {spec.state_format.name!r}, master {spec.master.name!r}), and the entry "
            "that says what they are is lost or was cast by another optimizer; load them with the settings that "
            "they were saved with, from a state dict that nobody changed"
        )
    known = {moment.name for moment in spec.rule.moments}
    if known and not known & keys and any(map(is_ours, keys)):
        raise ValueError(
            f"checkpoint holds {sorted(keys)} for {spec.name}, the rule {spec.rule.name} needs {sorted(known)} "
            f"of shape {spec.local_shape}: it belongs to another optimizer or model"
        )
