"""Every wrong value is refused before anything is built, with key, value and what is possible."""

from __future__ import annotations

import pytest

from lightning_fuse.config import ConfigError, check
from lightning_fuse.recipes.byte_lm import printable
from tests.composing import CONF, composed

WHOLE = "give a whole number from 1"
# Words with a wrong value -> what the message says beside the key: what is possible, or the closest word.
WRONG = {
    "trainer.max_steps=abc": WHOLE,
    "trainer.max_steps=0": WHOLE,
    "trainer.max_steps=1e3": "is a number with a point; give a whole number from 1",
    "trainer.max_steps=[3]": "is a list; give a whole number",
    "data.batch_size=abc": WHOLE,
    "data.batch_size=0": "is out of range; give a whole number from 1",
    "data.batch_size=true": "is true or false; give a whole number",
    "data.batch_size=1.5": WHOLE,
    "data.num_workers=-1": "give a whole number from 0",
    "data.num_workers=null": "is null; give a whole number",
    "data.validation=abc": "give a number above 0 and below 1",
    "data.validation=1": "give a number above 0 and below 1",
    "data.path=''": "give text (not empty)",
    "data.path=[a,b]": "is a list; give text",
    "seed=x": "give a whole number from 0 to 4,294,967,295",
    "seed=-1": "is out of range; give a whole number from 0",
    "seed=1.5": "give a whole number from 0",
    "seed=true": "give a whole number from 0",
    "seed=99999999999999999999": "to 4,294,967,295",
    "callbacks.target.targets=abc": "give a list of numbers or null",
    "callbacks.target.targets=[1,a]": "give a list of numbers",
    "callbacks.target.targets=[1,nan]": "give a list of numbers",
    "callbacks.target.target=inf": "give a number",
    "callbacks.target.mode=least": "known: max, min",
    "callbacks.last.every=0": WHOLE,
    "callbacks.last=3": "give a table of settings",
    "callbacks.fuse=abc": "give a table of settings",
    "callbacks.fuse.on_nonfinite=skipp": "did you mean 'skip'?",
    "callbacks.fuse.window=meen": "did you mean 'mean'?",
    "callbacks.fuse.init_loss_scale=-1": "give a number above 0 or null",
    "callbacks.fuse.max_updates=0": WHOLE,
    "trainer.accumulate_grad_batches=x": WHOLE,
    "trainer.accumulate_grad_batches=0": WHOLE,
    "recipe.val_every=0": WHOLE,
    "recipe.val_every=x": WHOLE,
    "recipe.mode=least": "known: max, min",
    "recipe.module=abc": "give a table of settings",
    "recipe.module.sample_bytes=-1": "give a whole number from 0",
    "trainer.gradient_clip_val=-1": "give a number from 0 or null",
    "trainer.gradient_clip_val=nan": "give a number from 0 or null",
    "trainer.gradient_clip_val=x": "is text; give a number from 0 or null",
    "trainer.devices=0": "a whole number from 1",
    "trainer.devices=abc": "give auto or",
    "trainer.limit_val_batches=-1": "give a whole number from 0",
    "trainer.limit_val_batches=1.5": "a number from 0 to 1",
    "trainer.log_every_n_steps=0": WHOLE,
    "trainer.enable_progress_bar=3": "give true or false",
    "+trainer.limit_val_batch=3": "did you mean 'limit_val_batches'?",
    "+trainer.limit_train_batches=abc": "is text; give a whole number from 0",
    "optimizer.lr=-1": "is out of range; give a number from 0",
    "optimizer.lr=abc": "give a number from 0",
    "optimizer.lr=inf": "give a number from 0",
    "optimizer.lr=true": "give a number from 0",
    "optimizer.betas=0.9": "give a list of numbers from 0 and below 1",
    "optimizer.betas=[0.9,1.0]": "give a list of numbers from 0 and below 1",
    "optimizer.amsgrad=maybe": "give true or false",
    "model.width=[1]": "is a list; give a whole number",
    "model.layers=0": WHOLE,
    "model.dropout=2": "give a number from 0 and below 1",
    "+model.widht=3": "did you mean 'width'?",
    "model._target_=torch.nope": "has no attribute 'nope'",
    "model._target_=3": "no dotted path",
    "schedule.warmup=abc": "give a number from 0 and below 1",
    "schedule.final=2": "give a number from 0 to 1",
    "state.patterns=abc": "give a table",
    "state.format=int9": "did you mean 'int8'?",
    "keep_last=0": WHOLE,
    "keep_best=x": WHOLE,
    "ledger=maybe": "give true or false",
    "restore.mode=weights": "did you mean 'weights_only'?",
    "restore.formats=x": "known: convert, refuse",
    "restore.override=lr": "give a list of words",
    "resume=''": "give text (not empty)",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_value_is_refused_with_what_is_possible(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(word))
    message = str(caught.value)
    key, _, value = word.lstrip("+").partition("=")
    assert all(part in message for part in key.split(".") if part != "format"), message
    assert value.strip("'[]").split(",")[0].replace("1e3", "1000.0") in message
    assert WRONG[word] in message
    assert "\n" not in message


def test_what_the_user_typed_is_named_before_what_follows_from_it() -> None:
    with pytest.raises(ConfigError, match=r"^recipe\.val_every=x is text"):
        check(composed("recipe.val_every=x"))  # trainer.val_check_interval takes its value from there


RIGHT = [
    *(
        "trainer.devices=2",
        "trainer.devices=auto",
        "trainer.devices=[0]",
        "trainer.devices='0,1'",
        "trainer.devices=-1",
    ),
    *("trainer.limit_val_batches=1.0", "trainer.limit_val_batches=3", "trainer.gradient_clip_val=null"),
    *("trainer.gradient_clip_val=2", "optimizer.lr=1", "optimizer.lr=0", "optimizer.betas=[0.9,0.99]"),
    *("callbacks.target.targets=[1,2.5]", "callbacks.best=null", "+trainer.max_time='00:01:00:00'", "seed=4294967295"),
    *("state.patterns={head.*: fp32}", "trainer.val_check_interval=0.5", "recipe.target=1", "+trainer.profiler=simple"),
]


@pytest.mark.parametrize("word", RIGHT)
def test_a_right_value_passes(word: str) -> None:
    check(composed(word))


@pytest.mark.parametrize(
    "word",
    sorted(
        f"{path.parent.name}={path.stem}"
        for path in CONF.glob("*/*.yaml")
        if path.parent.name in ("recipe", "optimizer", "schedule", "callbacks", "logger", "trainer")
    ),
)
def test_every_shipped_file_passes(word: str) -> None:
    check(composed(word))


def test_every_model_and_data_that_help_lists_is_of_a_recipe() -> None:
    for group in ("model", "data"):
        left = {path.stem for path in (CONF / group).glob("*.yaml")}
        for recipe in (path.stem for path in (CONF / "recipe").glob("*.yaml")):
            for word in composed(f"recipe={recipe}").recipe.requires[group].words:
                check(composed(f"recipe={recipe}", f"{group}={word}"))
                left.discard(word)
        assert left == set()


def test_a_sample_of_raw_bytes_is_printed_escaped() -> None:
    assert printable(b"a line\n\x1b[31mred\x07 \xff\xfe \xc3\xa4") == "a line\n\\x1b[31mred\\x07 \\xff\\xfe ä"
    assert printable("\u202e\u2028".encode()) == "\\u202e\\u2028"
    assert printable(b"\r\x00") == "\\r\\x00"
