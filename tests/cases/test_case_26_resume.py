"""Cases 26 and 30: what a checkpoint decides, what the configuration decides, and stock checkpoints both ways."""

from __future__ import annotations

import pytest
import torch

from lightning_fuse import Fuse
from lightning_fuse.plugins import contract_of
from tests.cases import Four, adamw, half, one_bad, quiet_trainer, train

EXECUTIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def module_with(**settings):
    return Four(lambda ps: adamw(ps, **{"weight_decay": 5.0, **settings}))


def saved(path, module, *callbacks, loader=None, **settings):
    trainer, _ = train(module, one_bad(3) if loader is None else loader, *callbacks, **settings)
    trainer.save_checkpoint(path)
    return path


def resumed(path, module, *callbacks, count=3, **settings):
    trainer = quiet_trainer(*callbacks, max_epochs=2, **settings)
    trainer.fit(module, one_bad(count), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("resume", EXECUTIONS)
@pytest.mark.parametrize("save", EXECUTIONS)
def test_case_26_execution_comes_from_the_configuration(save, resume, precision, tmp_path):
    settings = {"precision": half() if precision == "16-mixed" else precision, "gradient_clip_val": 1.0}
    path = saved(tmp_path / "a.ckpt", module_with(**EXECUTIONS[save]), Fuse(optimizer=None), **settings)
    module = module_with(**EXECUTIONS[resume])
    settings["precision"] = half() if precision == "16-mixed" else precision
    trainer = resumed(path, module, Fuse(optimizer=None), **settings)
    group = trainer.optimizers[0].param_groups[0]
    assert {key: group[key] for key in EXECUTIONS[resume]} == EXECUTIONS[resume]
    assert bool(group["fused"]) == (resume == "fused")
    assert float(trainer.optimizers[0].state[module.w]["step"]) == 6
    whole = module_with()
    train(whole, one_bad(3), max_epochs=2)
    torch.testing.assert_close(module.w, whole.w, rtol=1e-5, atol=1e-6)


def test_case_26_stock_takes_execution_from_the_checkpoint(tmp_path):
    path = saved(tmp_path / "a.ckpt", module_with(foreach=False))
    trainer = resumed(path, module_with(fused=True))
    assert not trainer.optimizers[0].param_groups[0]["fused"]


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_case_26_numbers_come_from_the_checkpoint(fuse, tmp_path):
    path = saved(tmp_path / "a.ckpt", module_with(lr=0.02), Fuse(**fuse))
    trainer = resumed(path, module_with(lr=0.5), Fuse(**fuse))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.02


def six_good():
    """Batches after which the scale is 512 and the growth counter 6."""
    return one_bad(7, 0)


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_case_30_a_stock_checkpoint_resumes_here(fuse, tmp_path):
    path = saved(tmp_path / "a.ckpt", module_with(), loader=six_good(), precision=half(1024.0))
    module, stock = module_with(), module_with()
    trainer = resumed(path, module, Fuse(**fuse), count=1, precision=half(1024.0))
    scale = contract_of(trainer).loss_scale
    assert (scale.value, scale.growth_counter) == (512.0, 7)
    assert contract_of(trainer).global_step == 8
    resumed(path, stock, count=1, precision=half(1024.0))
    torch.testing.assert_close(module.w, stock.w, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fuse", [{}, {"optimizer": None}])
def test_case_30_ours_resumes_in_stock(fuse, tmp_path):
    path = saved(tmp_path / "a.ckpt", module_with(), Fuse(**fuse), loader=six_good(), precision=half(1024.0))
    module, again = module_with(), module_with()
    trainer = resumed(path, module, count=1, precision=half(1024.0))
    scaler = trainer.precision_plugin.scaler
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 7)
    assert float(trainer.optimizers[0].state[module.w]["step"]) == 7
    assert trainer.optimizers[0].param_groups[0]["decoupled_weight_decay"]
    resumed(path, again, Fuse(**fuse), count=1, precision=half(1024.0))
    torch.testing.assert_close(module.w, again.w, rtol=1e-6, atol=1e-7)


def test_case_30_stock_loses_the_scale_of_a_plugin_with_another_name(tmp_path):
    class Renamed(type(half())):
        pass

    plugin = Renamed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    path = saved(tmp_path / "a.ckpt", module_with(), loader=six_good(), precision=plugin)
    trainer = resumed(path, module_with(), count=1, precision=half(4096.0))
    assert trainer.precision_plugin.scaler.get_scale() == 4096.0


@pytest.mark.parametrize("first", ["32-true", "bf16-mixed"])
def test_a_checkpoint_without_a_scale_resumes_with_one_and_back(first, tmp_path):
    path = saved(tmp_path / "a.ckpt", module_with(), Fuse(), precision=first)
    trainer = resumed(path, module_with(), Fuse(), precision=half(256.0))
    assert contract_of(trainer).loss_scale.value == 256.0
    assert contract_of(trainer).updates == 6
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    back = quiet_trainer(Fuse(), precision=first, max_epochs=3)
    back.fit(module_with(), one_bad(3), ckpt_path=tmp_path / "b.ckpt")
    assert contract_of(back).updates == 9
