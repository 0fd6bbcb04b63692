"""Use NoLoCo in the `Trainer` of Lightning (the package `lightning`).

A script only has to start a peer and pass a callback to its Trainer.

    Trainer(devices=1, callbacks=[NoLoCoCallback(peer)]).fit(module, data)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise ImportError("this callback requires Lightning: pip install 'lightning>=2.5'") from None
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy

from noloco_p2p.integrations.session import Host, InTrainer, logged_values, no_outer_state, refuse
from noloco_p2p.outer.flat import FlatParameters


class NoLoCoCallback(InTrainer, Callback):
    """A callback that counts the optimizer steps of the Trainer as inner steps, and swaps weights in the background.

    `peer` is a running `Peer`. `options`, such as `save_every_s` and `on_swap`, are passed to `NoLoCo`. A swap changes
    the Trainer's module in place, after an optimizer step. If there are several optimizers, each step of the last one
    in `configure_optimizers` is an inner step.

    Lightning's checkpoints contain the outer state, and `fit(ckpt_path=...)` continues from it. Without `ckpt_path`,
    NoLoCo resumes from the newest checkpoint in the peer's folder. This restores the weights, the moments and the
    position in the run, while the Trainer's epochs, schedule and step count start from scratch. With `resume=False`,
    this machine joins the run as a new peer.

    `noloco leave` ends training after the current batch, regardless of `min_steps` and `min_epochs`.

    Raises SettingsError for a strategy with several devices, and ModelError if the model is on several devices.
    """

    def __init__(self, peer: Host, **options: Any) -> None:
        super().__init__(peer, **options)
        self._saved: dict[str, Any] | None = None  # Lightning loads it, and it is used when training begins
        self._losses: list[Tensor] = []
        self._num_steps = 0  # the number of steps when this callback last checked

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise refuse("Trainer", type(trainer.strategy).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step and self._saved is None and self._outer is None and "resume" not in self._options:
            raise no_outer_state(f"the checkpoint {trainer.ckpt_path}")
        optimizers = [one.optimizer if isinstance(one, LightningOptimizer) else one for one in trainer.optimizers]
        # With manual optimization, `toggle_optimizer` freezes parameters around a step. They are still trainable.
        more = {} if pl_module.automatic_optimization else {"parameters": FlatParameters(pl_module)}
        self._begin(pl_module, optimizers, saved=self._saved, **more)
        self._saved, self._losses, self._num_steps = None, [], self.outer.num_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)  # undo the division by Lightning
        # The number is the same while Lightning accumulates gradients.
        if self.outer.num_steps > self._num_steps and self._step_taken():
            self._log(trainer)
        self._num_steps = self.outer.num_steps
        if self.peer.leave_requested.is_set():
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._outer:
            self.outer.detach()

    def state_dict(self) -> dict[str, Any]:
        return self.outer.state_dict() if self._outer else self._saved or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def _log(self, trainer: Trainer) -> None:
        """Update the loss, and log the NoLoCo metrics."""
        if self._losses:
            self.peer.metrics.loss = float(torch.stack(self._losses).mean())  # waits for the GPU
            self._losses.clear()
        for logger in trainer.loggers:
            logger.log_metrics(logged_values(self.peer.metrics), step=trainer.global_step)
