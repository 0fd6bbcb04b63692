"""Use NoLoCo in the `Trainer` of the transformers library.

A script only has to start a peer and pass a callback to its Trainer.

    Trainer(model, arguments, train_dataset=data, callbacks=[NoLoCoCallback(peer)]).train()
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch import nn
from torch.optim import Optimizer

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError:
    raise ImportError("the transformers Trainer requires accelerate: pip install 'accelerate>=1.10'") from None
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.training_args import ParallelMode

from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.integrations.session import InTrainer, logged_values, no_outer_state, refuse
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.flat import content_digest
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.saved_state import STATE_FILE

log = logging.getLogger(__name__)

FOLDER = "noloco"  # the subfolder of a Trainer checkpoint


class NoLoCoCallback(InTrainer, TrainerCallback):
    """A callback that counts the optimizer steps of the Trainer as inner steps, and swaps weights in the background.

    `peer` is a running `Peer`. `options`, such as `save_every_s` and `on_swap`, are passed to `NoLoCo`. A swap changes
    the Trainer's model in place, after an optimizer step.

    Each checkpoint of the Trainer also contains the outer state, in its subfolder `noloco`. With
    `resume_from_checkpoint`, the run continues from such a checkpoint, which must be in `output_dir`. Without this
    argument, NoLoCo resumes from the newest checkpoint in the peer's folder. This restores the weights, the moments and
    the position in the run, while the Trainer's schedule, data and step count start from scratch. With `resume=False`,
    this machine joins the run as a new peer.

    `noloco leave` ends training after the current step. The Trainer then writes a checkpoint, unless its settings
    disable checkpoints.

    Raises SettingsError for DeepSpeed, FSDP, DDP and DataParallel, and ModelError if the model is on several devices.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_whole(args, state)
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):  # a torch optimizer in name only: it has no hooks
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, Optimizer):
            raise SettingsError(
                f"NoLoCo counts the steps of a torch optimizer, but {type(optimizer).__name__} is not a torch optimizer"
            )
        saved = None
        if state.global_step and "resume" not in self._options:
            saved = load_outer_state(checkpoint_folder(args, state), model)
        self._begin(model, [optimizer], saved=saved)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step_taken()
        if self.peer.leave_requested.is_set():
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the NoLoCo metrics to the Trainer's history, and to the logs that later callbacks get."""
        logs, metrics = kwargs["logs"], self.peer.metrics
        metrics.loss = logs.get("loss", metrics.loss)
        if "eval_loss" in logs:
            metrics.evaluated(logs["eval_loss"])
        if "loss" in logs:
            logs.update(logged_values(metrics))
            state.log_history[-1].update(logged_values(metrics))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        try:
            save_outer_state(checkpoint_folder(args, state), self.outer, kwargs["model"])
        except CheckpointError as error:  # a full disk must not end training
            log.error("%s", error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end:  # the model has the weights of another step, which must not be served
            self.outer.detach()
        else:
            self._end()


def check_whole(args: TrainingArguments, state: TrainerState) -> None:
    """Raise SettingsError if NoLoCo does not support the configuration of the Trainer."""
    if args.n_gpu > 1:
        raise refuse("Trainer", f"DataParallel on {args.n_gpu} GPUs")
    if args.parallel_mode is not ParallelMode.NOT_PARALLEL:
        raise refuse("Trainer", f"torchrun or `accelerate launch` (parallel mode {args.parallel_mode.value})")
    if "lomo" in args.optim:
        raise SettingsError(f"--optim {args.optim} does not take optimizer steps that NoLoCo can count")
    if state.is_hyper_param_search:
        raise SettingsError("a peer can train only one model in one run; run the hyperparameter search without NoLoCo")


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the Trainer's checkpoint for this step.

    The Trainer does not say from which folder it has resumed, so `output_dir` is assumed.
    """
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def save_outer_state(folder: Path, outer: NoLoCo, model: nn.Module) -> None:
    """Add the outer state to a checkpoint of the Trainer, atomically. Raises CheckpointError if that fails."""
    state = outer.state_dict()
    meta = {"place": state.pop("place"), "weights": weights_digest(model)}
    Checkpoints(folder / FOLDER, keep=1).save(outer.num_steps, files={STATE_FILE: state}, meta=meta)


def load_outer_state(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Load the outer state that `save_outer_state` has written.

    Raises CheckpointError if there is none, or if it was saved with weights that differ from the weights of `model`. In
    the second case, the Trainer has resumed from a checkpoint of the same step in another folder.
    """
    saved: Checkpoint | None = Checkpoints(folder / FOLDER, keep=1).newest()
    if saved is None:
        raise no_outer_state(str(folder))
    if saved.meta["weights"] != weights_digest(model):
        raise CheckpointError(
            f"the weights in {folder} differ from the model's, so the Trainer has resumed from another checkpoint; "
            "move that checkpoint to output_dir, the only folder in which NoLoCo looks for its state"
        )
    return {**saved.load(STATE_FILE), "place": saved.meta["place"]}


def weights_digest(model: nn.Module) -> str:
    hasher = blake3()
    for param in model.parameters():
        hasher.update(content_digest(param).encode())
    return hasher.hexdigest()
