"""The whole table of choices: every combination trains, or is refused with alternatives that train."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from lightning_fuse.combinations import PRECISIONS, RunOptions, alternatives, find_conflict
from lightning_fuse.config import FAMILIES, ConfigError, check, run_options
from lightning_fuse.formats import MASTERS, STATE_FORMATS
from lightning_fuse.kernels import AUTO, KERNELS
from lightning_fuse.run import Run
from tests.composing import CONF, SMALL, composed

OPTIMIZERS = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
STATES = tuple(STATE_FORMATS)
PARAMETER_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
TORCH = {"adamw_loop", "adamw_foreach", "adamw_torch", "sgd_torch"}


def expected_to_train(optimizer: str, state: str, precision: str) -> bool:
    """The table in words of its own, so that it does not agree with the code by construction."""
    if optimizer.endswith("_fused"):
        return True
    if optimizer == "adamw_bnb":
        return state in ("fp32", "int8")
    if precision == "16-true":
        return False
    return state == ("bf16" if precision == "bf16-true" else "fp32")


TABLE = list(itertools.product(OPTIMIZERS, STATES, PRECISIONS))


@pytest.mark.parametrize(("optimizer", "state", "precision"), [row for row in TABLE if expected_to_train(*row)])
def test_a_combination_trains(optimizer: str, state: str, precision: str, tmp_path: Path) -> None:
    words = [f"optimizer={optimizer}", f"state={state}", f"precision={precision}", "trainer.accelerator=cpu", *SMALL]
    words += ["callbacks.best=null", "callbacks.last=null"]
    if precision in ("16-mixed", "16-true"):
        words.append("callbacks.fuse.init_loss_scale=256")  # low enough that the first steps apply
    run = Run(composed(*words, run_folder=tmp_path / "run"), words)
    before = [p.detach().clone() for p in run.module.parameters()]
    metrics = run.fit()

    assert run.trainer.precision_plugin.precision == precision
    assert run.trainer.precision_plugin.contract.updates == 2
    assert metrics["val/loss"] == pytest.approx(5.5, abs=0.5)  # near ln 256, nothing is learned yet
    after = list(run.module.parameters())
    assert {p.dtype for p in after} == {PARAMETER_DTYPES.get(precision, torch.float32)}
    assert all(torch.isfinite(p).all() for p in after)
    assert any(not torch.equal(old, new.float()) for old, new in zip(before, after, strict=True))
    assert state in _kept(run)


def _kept(run: Run) -> set[str]:
    """The words for what the optimizer really keeps of its matrices."""
    optimizer = run.trainer.optimizers[0]
    if hasattr(optimizer, "formats"):
        return set(optimizer.formats().values())
    p = next(p for p in run.module.parameters() if p.numel() >= 4096)
    tensors = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor) and t.shape == p.shape]
    words = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "int8"}
    assert tensors
    return {words[tensor.dtype] for tensor in tensors}


@pytest.mark.parametrize(("optimizer", "state", "precision"), [row for row in TABLE if not expected_to_train(*row)])
def test_a_combination_is_refused_with_what_works(optimizer: str, state: str, precision: str) -> None:
    words = [f"optimizer={optimizer}", f"state={state}", f"precision={precision}"]
    with pytest.raises(ConfigError) as caught:
        check(composed(*words))
    message = str(caught.value)
    assert f"optimizer={optimizer}" in message
    assert "\n" not in message
    assert caught.value.alternatives
    for alternative in caught.value.alternatives:
        assert alternative in message
        check(composed(*words, *alternative.split()))


def test_the_example_of_the_documentation() -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed("optimizer=adamw_torch", "state=int8"))
    assert str(caught.value) == (
        "optimizer=adamw_torch state=int8 precision=32-true: torch keeps state in the parameter's dtype, fp32 here; "
        "use optimizer=adamw_fused, optimizer=adamw_bnb or state=fp32"
    )


def every_choice() -> list[RunOptions]:
    """All choices that the groups can express."""
    found = []
    for optimizer in OPTIMIZERS:
        start = run_options(composed(f"optimizer={optimizer}"))
        momenta = (0.0, 0.9) if start.momentum is not None else (None,)
        others = itertools.product(STATES, PRECISIONS, MASTERS, (AUTO, *KERNELS), (False, True), momenta)
        for state, precision, master, kernel, patterns, momentum in others:
            changed = replace(start, state=state, precision=precision, master=master, kernel=kernel)
            found.append(replace(changed, patterns=patterns, momentum=momentum))
    return found


def test_every_refusal_leads_to_something_that_works() -> None:
    choices = every_choice()
    refused = [choice for choice in choices if find_conflict(choice) is not None]
    assert len(choices) > len(refused) > 0
    for choice in refused:
        proposed = alternatives(choice)
        assert proposed, choice
        for words in proposed:
            assert find_conflict(_applied(choice, words)) is None, (choice, words)


def _applied(choice: RunOptions, words: str) -> RunOptions:
    for word in words.split():
        key, value = word.split("=")
        name = {"state.patterns": "patterns", "optimizer.momentum": "momentum"}.get(key, key)
        typed = {"patterns": False, "momentum": 0.9}.get(name, value)
        choice = replace(choice, **{name: typed})
        if name == "optimizer":
            choice = replace(choice, family="bnb" if value == "adamw_bnb" else "fused")
    return choice


REFUSED = [
    (("master=split",), "float32 parameters are their own master weights", "precision=bf16-true"),
    (("precision=16-true", "master=split8"), "upper half of a float32 weight", "master=fp32"),
    (("optimizer=adamw_torch", "kernel=reference"), "kernel is a choice of fused optimizers", "kernel=auto"),
    (("optimizer=adamw_bnb", "precision=bf16-true", "master=fp32"), "keep master weights", "optimizer=adamw_fused"),
    (("optimizer=sgd_fused", "optimizer.momentum=0", "state=int8"), "keeps no state", "optimizer.momentum=0.9"),
    (("optimizer=adamw_loop", "state.patterns={*.bias: fp32}"), "formats by name", "state.patterns=null"),
    (("recipe=digits", "model=tiny"), "cannot use model", "model=cnn"),
    (("recipe=byte_lm", "data=digits"), "cannot use data", "data=text"),
    (("callbacks.fuse=null",), "needs the step contract", "callbacks=default"),
    (("callbacks.fuse.init_loss_scale=1024",), "has no loss scale", "precision=16-mixed"),
    (("trainer.max_steps=0",), "is out of range", "give a whole number from 1"),
    (("state.format=int9",), "unknown state format 'int9'", "int8"),
]


@pytest.mark.parametrize(("words", "reason", "advice"), REFUSED)
def test_what_would_have_no_effect_is_refused(words: tuple[str, ...], reason: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*words))
    assert reason in str(caught.value)
    assert advice in str(caught.value)


def test_an_unknown_word_lists_the_known_ones() -> None:
    with pytest.raises(MissingConfigException, match="adamw_fused"):
        composed("optimizer=adamw_fussed")


@pytest.mark.parametrize("word", ["optimizer.lrr=1", "state.pattern={a: b}", "trainer.maxsteps=3", "seeed=1"])
def test_a_misspelt_key_is_refused(word: str) -> None:
    with pytest.raises(ConfigCompositionException):
        composed(word)


@pytest.mark.parametrize("path", sorted((CONF / "optimizer").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_optimizer_is_called_as_its_file(path: Path) -> None:
    cfg = OmegaConf.load(path)
    assert cfg.name == path.stem
    assert str(cfg._target_).split(".")[0] in FAMILIES


def test_every_state_format_has_a_file() -> None:
    assert {path.stem for path in (CONF / "state").glob("*.yaml")} == set(STATES)


@pytest.mark.parametrize(
    ("key", "words"),
    [("master", (*MASTERS,)), ("precision", PRECISIONS), ("kernel", (AUTO, *KERNELS)), ("strategy", ("auto", "ddp"))],
)
def test_a_word_is_known_or_refused_with_the_closest(key: str, words: tuple[str, ...]) -> None:
    comment = next(line for line in (CONF / "config.yaml").read_text().splitlines() if line.startswith(f"{key}:"))
    for word in words:
        assert composed(f"{key}={word}")[key] == word
        assert word in comment
    with pytest.raises(ConfigError, match=f"{key}.*'{words[-1]}x'; known: .*did you mean '{words[-1]}'"):
        check(composed(f"{key}={words[-1]}x"))


def test_a_recipe_brings_its_own_choices_and_gives_way_to_the_users() -> None:
    assert composed("recipe=digits").model._target_ == "lightning_fuse.recipes.digits.CNN"
    assert composed("recipe=digits").trainer.max_steps == composed("recipe=digits").recipe.max_steps
    assert (
        composed("recipe=digits", "schedule=constant").schedule._target_ == "lightning_fuse.recipes.schedules.constant"
    )
    assert composed("model=small", "recipe=byte_lm").model.width == 384
    assert composed("trainer=debug").trainer.max_steps == 2
    assert list(composed("logger=[csv,wandb]").logger) == ["csv", "wandb"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_configured_decay_reaches_the_weights_and_only_them(optimizer: str, tmp_path: Path) -> None:
    words = (f"optimizer={optimizer}", "optimizer.weight_decay=0.25")
    run = Run(composed(*SMALL, "recipe=byte_lm", *words, run_folder=tmp_path / "run"), list(words))
    weights, others = run.module.optimizer_groups()
    assert (weights["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    built = run.module.optimizer_factory([weights, others])
    assert [group["weight_decay"] for group in built.param_groups] == [0.25, 0.0]
