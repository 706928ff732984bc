"""Update rules: pure float32 maths, blind to how state is stored. ``rule.py`` is the contract."""

from lightning_fuse.registry import Registry
from lightning_fuse.rules.adam import Adam, AdamAmsgrad
from lightning_fuse.rules.adamw import AdamW, AdamWAmsgrad
from lightning_fuse.rules.ademamix import AdEMAMix
from lightning_fuse.rules.lamb import LAMB
from lightning_fuse.rules.lars import LARS, LARSNesterov
from lightning_fuse.rules.lion import Lion
from lightning_fuse.rules.rule import LayerwiseRule, Moment, UpdateRule
from lightning_fuse.rules.sgd import SGD, SGDMomentum, SGDNesterov

RULES: Registry[UpdateRule] = Registry(
    "rule",
    [
        AdamW(),
        AdamWAmsgrad(),
        Adam(),
        AdamAmsgrad(),
        SGD(),
        SGDMomentum(),
        SGDNesterov(),
        Lion(),
        LARS(),
        LARSNesterov(),
        LAMB(),
        AdEMAMix(),
    ],
)

__all__ = ["RULES", "LayerwiseRule", "Moment", "UpdateRule"]
