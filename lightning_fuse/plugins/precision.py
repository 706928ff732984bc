"""The precision plugin that runs the step contract in a Lightning Trainer.

It wraps the stock plugin of the wanted precision, which still converts modules and inputs and opens autocast, and owns
the five acts itself: ``pre_backward`` scales, ``optimizer_step`` runs the contract, ``clip_gradients`` is folded into
it. Gradients are unscaled in memory only where somebody looks at them: a callback or module with
``on_before_optimizer_step``, a module with its own ``configure_gradient_clipping``, clipping by value, or manual
optimization that calls ``clip_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_fuse.plugins.accumulation import LoopWindows
from lightning_fuse.plugins.closures import check_closure, step_call
from lightning_fuse.plugins.contract_callback import ContractCallback
from lightning_fuse.plugins.grad_scaler_facade import GradScalerFacade
from lightning_fuse.plugins.lightning_compat import Overrides, searches_learning_rate, step_schedulers, window_is_open
from lightning_fuse.plugins.lightning_precision import WrappedPrecision, loss_scale_for, stock_precision
from lightning_fuse.plugins.listeners import looks_at_gradients, module_inside, tell_outcomes
from lightning_fuse.plugins.lr_search import stock_policy
from lightning_fuse.plugins.manual_ddp import GradientAverage, average_by_step
from lightning_fuse.plugins.module_names import ModuleNames
from lightning_fuse.plugins.optimizer_conversion import OptimizerConverter, OptimizerSpec
from lightning_fuse.plugins.schedulers import follow_updates
from lightning_fuse.plugins.wandb_watch import UnscaledWatch
from lightning_fuse.plugins.weight_averaging import follow_applied_updates
from lightning_fuse.step import StepContract
from lightning_fuse.step.grad_stats import unwrapped

STOCK_KEY = "MixedPrecision"  # where Lightning files a loss scale in a checkpoint


class FusePrecision(WrappedPrecision):
    """Runs the step contract for any stock precision.

    Any callback, and the module, may define ``on_step_outcome(trainer, pl_module, outcome)``: it is called once per
    optimizer step with a ``StepOutcome``, right after the step (in manual optimization at the end of the batch, when
    the loss scale has moved).

    Args:
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", or a stock plugin to wrap.
        contract: The contract to run; by default one with a loss scale where the precision needs it.
        spec: What the module's optimizers should be; by default they are kept.
        device: Device type of autocast, where ``precision`` is a word.

    Raises:
        ValueError: The word is unknown.
    """

    def __init__(
        self,
        precision: str | Precision = "32-true",
        contract: StepContract | None = None,
        spec: OptimizerSpec | None = None,
        device: str = "cpu",
    ) -> None:
        self.inner = precision if isinstance(precision, Precision) else stock_precision(precision, device)
        self.contract = contract or StepContract(loss_scale=loss_scale_for(self.inner))
        self.spec = spec or OptimizerSpec(optimizer=None)
        self._converter = OptimizerConverter(self.spec)
        self._module: LightningModule | None = None
        self._windows: LoopWindows | None = None
        self._ranks: GradientAverage | None = None
        self._open_gradients: dict[str, Tensor] = {}  # of a resumed open window, until training starts
        self._folded_clip: float | None = None  # a clip norm to fold into the step under way
        self._folding = False
        self._stepped: set[Optimizer] = set()  # since the last backward
        self._took_its_turn = False  # an optimizer, in the batch under way
        self._watch = UnscaledWatch()
        self._overrides = Overrides()  # of methods of the loop and of callbacks, until the fit ends
        self._callbacks: list[Callback] = []  # the trainer's, until the fit ends

    @property
    def scaler(self) -> GradScalerFacade | None:
        """What module code may ask of a GradScaler; None where the precision has no loss scale, as in stock plugins."""
        scale = self.contract.loss_scale
        return None if scale is None else GradScalerFacade(scale, self._unscale)

    @property
    def last_step_ms(self) -> float | None:
        """Host time of the last optimizer step, verdict included, in milliseconds."""
        return self.contract.last_step_ms

    # The optimizers.

    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Takes over the optimizers and lets schedulers follow applied updates; called by Lightning once per fit.

        Raises:
            ValueError: An optimizer cannot be taken over, or needs a closure that evaluates the model again.
        """
        self._module = module_inside(model)
        self.contract.names = ModuleNames(self._module or model)
        converted = self._convert(optimizers, lr_schedulers)
        self.contract.reset()
        self._join_loop()
        self._optimizers = converted
        return model, converted, lr_schedulers

    def _convert(self, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> list[Optimizer]:
        """What takes the places of optimizers of the user's; their schedulers follow applied updates."""
        for optimizer in optimizers:
            check_closure(optimizer)
        try:
            converted = self._converter.convert(optimizers, self.contract.names, lr_schedulers, self._step_of_owner)
        except TypeError as error:
            raise TypeError(f"{error}; or keep your own optimizer with optimizer=None") from error
        if self.contract.policy.on_nonfinite == "step":
            self._converter.keep_nonfinite(converted)
        follow_updates(lr_schedulers, self.contract)
        return converted

    def _meet_exchanged(self) -> None:
        """Takes over optimizers that somebody has put into the trainer in the middle of training.

        Raises:
            ValueError: One of them cannot be taken over.
        """
        module = self._module
        if module is None:
            return
        strategy, known, current = module.trainer.strategy, self._optimizers, module.trainer.strategy.optimizers
        if len(current) == len(known) and all(map(is_, current, known)):
            return
        bare = [unwrapped(optimizer) for optimizer in current]
        new = [optimizer for optimizer in bare if not any(optimizer is one for one in known)]
        self.contract.names = ModuleNames(module)
        taken = dict(zip(map(id, new), self._convert(new, strategy.lr_scheduler_configs), strict=True))
        strategy.optimizers = self._optimizers = [taken.get(id(optimizer), optimizer) for optimizer in bare]

    def teardown(self) -> None:
        """Leaves optimizers, schedulers, callbacks and loops to the user as they were; called after a fit."""
        self._converter.give_back()
        self._overrides.undo()
        self.contract.window.all_reduce = None
        self._callbacks[:] = [one for one in self._callbacks if not isinstance(one, ContractCallback)]
        self._callbacks = []
        super().teardown()

    def _step_of_owner(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """What ``step`` of an optimizer that the module has kept runs: the contract, in manual optimization."""
        module = self._module
        if module is None or module.automatic_optimization or not module.trainer.training:
            return optimizer.step(closure)
        return self.optimizer_step(optimizer, module, closure or (lambda: None))

    def start_training(self) -> None:
        """Checks the run against its windows and restores the gradients of a resumed open one.

        Raises:
            ValueError: No window of the run can ever close.
        """
        if self._windows is not None:
            self._windows.check_length()
        for p, name in self.contract.names.items():
            if name in self._open_gradients:
                p.grad = self._open_gradients[name].to(p.device)
        self._open_gradients = {}

    def start_batch(self) -> None:
        """Keeps gradients of manual optimization local until they are wanted; called by the contract callback."""
        self._took_its_turn = False
        self._meet_exchanged()
        if self._ranks is not None:
            self._ranks.hold()

    def end_batch(self, trainer: Trainer, model: LightningModule) -> None:
        """Ends a batch of automatic optimization; called by the contract callback.

        A step that a module's own ``optimizer_step`` has left out was vetoed. A short last window is dropped where the
        policy says so.
        """
        if not (self._took_its_turn or window_is_open(trainer)):
            for index, optimizer in enumerate(self._optimizers):
                self.contract.skip_next()
                self.contract.step(optimizer, window=self._window(), index=index)
            self.end_training_step(trainer, model)
        if self._windows is not None:
            self._windows.end_batch()

    def end_epoch(self) -> None:
        """Carries an open window over where the policy says so; called by the contract callback."""
        if self._windows is not None:
            self._windows.end_epoch()

    # The acts.

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss."""
        scale = self.contract.loss_scale
        if scale is not None:
            self._watch.begin(getattr(module.trainer, "loggers", []), scale.inverse)
        return super().pre_backward(self.contract.scale(tensor, self._window()), module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Counts the micro-batch into the open window."""
        self._watch.end()
        self.contract.accumulate()
        self._stepped.clear()  # any optimizer may have got gradients for its next step
        return super().post_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure and the step contract.

        Returns:
            What the optimizer's own step returned, or what the closure did where that is nothing.

        Raises:
            NonFiniteGradientError: See ``StepContract.step``.
        """
        if searches_learning_rate(model.trainer):
            with stock_policy(self.contract):
                return self._step(optimizer, model, closure, kwargs)
        return self._step(optimizer, model, closure, kwargs)

    def _step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], arguments: dict[str, Any]
    ) -> Any:
        optimizer = self._known(unwrapped(optimizer))
        trainer, automatic = model.trainer, model.automatic_optimization
        result = closure()
        # On a GPU what the last step did is known by now; schedulers that follow it must move before this step.
        self.catch_up()
        window = trainer.accumulate_grad_batches if automatic else None
        if looks_at_gradients(trainer, model) and not self.contract.is_unscaled(optimizer):
            self._unscale(optimizer)
        elif self._ranks is not None:
            self._ranks.average(optimizer)
        self._folded_clip, self._folding = None, not is_overridden("configure_gradient_clipping", model)
        self._after_closure(model, optimizer)
        self._folding = False
        returned = self.contract.step(
            optimizer,
            run=step_call(optimizer, result, arguments),
            clip_norm=self._folded_clip,
            window=window,
            index=self._index(optimizer),
            where=f"batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}",
        )
        # Skipped or not, its turn was taken: no reason for torch to warn of a scheduler that comes before it.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._ranks is not None:
            self._ranks.stepped(optimizer)
        self._stepped.add(optimizer)
        self._took_its_turn = True
        if automatic:
            self.end_training_step(trainer, model)
        return result if returned is None else returned

    def give_up(self) -> None:
        """Leaves nothing behind of a backward that failed; called by the contract callback."""
        self._watch.end()

    def end_training_step(self, trainer: Trainer, model: LightningModule) -> None:
        """Moves the loss scale and tells callbacks and the module the outcomes; ends a training step."""
        waiting = [] if model.automatic_optimization else [o for o in self._optimizers if o not in self._stepped]
        tell_outcomes(trainer, model, self.contract.update(waiting))
        self._stepped.clear()

    def catch_up(self) -> None:
        """Tells outcomes that were left on a GPU, and lets schedulers follow them."""
        model = self._module
        if model is None or not self.contract.in_flight:
            return
        trainer = model.trainer
        tell_outcomes(trainer, model, self.contract.flush())
        if model.automatic_optimization:
            # Lightning asked its schedulers when the outcome was not known yet.
            step_schedulers(trainer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips in unscaled units: by norm inside the step where nobody looks before it, else in memory."""
        if not clip_val or clip_val <= 0:
            return
        optimizer = unwrapped(optimizer)
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            if not self.contract.is_unscaled(optimizer):
                self._unscale(optimizer)
            # torch's function refuses a list without a single gradient.
            params = [p for p in self.main_params(optimizer) if p.grad is not None]
            if params:
                torch.nn.utils.clip_grad_value_(params, clip_val)
        elif self._folding:
            self._folded_clip = float(clip_val)
        else:
            if not self.contract.is_unscaled(optimizer):
                self._unscale(optimizer)
            self.contract.clip_norm_(optimizer, float(clip_val))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale, and the gradients of an open window."""
        state = self.contract.state_dict()
        if self._windows is not None:
            grads = {name: p.grad for p, name in self.contract.names.items() if p.grad is not None}
            state["loop_windows"] = self._windows.state_dict()
            state["open_gradients"] = grads if self.contract.contributions else {}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where ``state_dict`` was taken."""
        self.contract.load_state_dict(state_dict)
        if self._windows is not None and "loop_windows" in state_dict:
            self._windows.load_state_dict(state_dict["loop_windows"])
            self._open_gradients = dict(state_dict["open_gradients"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Files the loss scale where a stock Trainer looks for it, too."""
        if self.contract.loss_scale is not None:
            checkpoint[STOCK_KEY] = self.contract.loss_scale.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes over the loss scale and the count of steps of a checkpoint that a stock Trainer wrote."""
        if type(self).__qualname__ in checkpoint:
            return
        steps = int(checkpoint.get("global_step", 0))
        self.contract.resume_counts(steps)
        if self.contract.loss_scale is not None and STOCK_KEY in checkpoint:
            self.contract.loss_scale.load_state_dict(checkpoint[STOCK_KEY])

    def _join_loop(self) -> None:
        """Lets the loop's windows, the ranks and weight averages of this trainer follow the contract."""
        self._overrides.undo()
        module = self._module
        if module is None:
            return
        trainer = module.trainer
        if trainer.world_size > 1:
            strategy = trainer.strategy
            self.contract.window.ranks = trainer.world_size
            self.contract.window.all_reduce = lambda tensor, op: cast(Tensor, strategy.reduce(tensor, reduce_op=op))
        if module.automatic_optimization:
            self._windows = LoopWindows(trainer, self.contract)
            self._windows.install(self._overrides)
        else:
            self._ranks = average_by_step(trainer.strategy.model)
        follow_applied_updates(trainer, self.contract, self.catch_up, self._overrides)
        self._callbacks = cast(list[Callback], trainer.callbacks)  # type: ignore[attr-defined]
        others = [callback for callback in self._callbacks if not isinstance(callback, ContractCallback)]
        self._callbacks[:] = [ContractCallback(self), *others]

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscales in memory what the step would have unscaled in registers, averaged over ranks first."""
        if self._ranks is not None:
            self._ranks.average(optimizer)
        self.contract.unscale_(optimizer, self._window())

    def _window(self) -> int | None:
        module = self._module
        automatic = module is not None and module.automatic_optimization
        return module.trainer.accumulate_grad_batches if module is not None and automatic else None

    def _known(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that steps in the place of one that was put into the trainer inside a training step."""
        if self._module is None or any(map(is_, self._optimizers, repeat(optimizer))):
            return optimizer
        bare = list(map(unwrapped, self._module.trainer.strategy.optimizers))
        self._meet_exchanged()
        return next((new for new, old in zip(self._optimizers, bare, strict=True) if old is optimizer), optimizer)

    def _index(self, optimizer: Optimizer) -> int:
        return next((i for i, known in enumerate(self._optimizers) if known is unwrapped(optimizer)), 0)


def contract_of(trainer: Trainer) -> StepContract | None:
    """The step contract that a trainer runs.

    Args:
        trainer: Any trainer.

    Returns:
        The contract, or None where neither Fuse nor the plugin is installed.
    """
    plugin = trainer.precision_plugin
    return plugin.contract if isinstance(plugin, FusePrecision) else None
