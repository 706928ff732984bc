"""State formats and master weights: how one tensor of state is kept. ``format.py`` is the contract."""

from lightning_fuse.formats.floating import BFloat16Signed, BFloat16Unsigned, Float32
from lightning_fuse.formats.format import Codec, DitherKey, StateFormat, TensorSpec
from lightning_fuse.formats.int8 import Int8Signed, Int8Unsigned
from lightning_fuse.formats.master import CopyMaster, MasterFormat, NoMaster, Split8Master, SplitMaster
from lightning_fuse.registry import Registry

STATE_FORMATS: Registry[StateFormat] = Registry(
    "state format",
    [
        StateFormat("fp32", signed=Float32(), unsigned=Float32()),
        StateFormat("bf16", signed=BFloat16Signed(), unsigned=BFloat16Unsigned()),
        StateFormat("int8", signed=Int8Signed(), unsigned=Int8Unsigned()),
        StateFormat("int8_bf16", signed=Int8Signed(), unsigned=BFloat16Unsigned()),
    ],
)

MASTERS: Registry[MasterFormat] = Registry(
    "master weight format", [NoMaster(), CopyMaster(), SplitMaster(), Split8Master()]
)

__all__ = ["MASTERS", "STATE_FORMATS", "Codec", "DitherKey", "MasterFormat", "StateFormat", "TensorSpec"]
