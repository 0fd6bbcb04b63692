"""One inner step: forward, backward, clip, optimizer. The trainer takes it, and so does every simulated replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from noloco_p2p.optim.inner import make_inner_optimizers
from noloco_p2p.optim.schedule import learning_rate
from noloco_p2p.spec import TrainSpec
from noloco_p2p.train.model import hidden_matrices


class InnerStep:
    """The inner optimization of one model, on the device where its parameters are."""

    def __init__(self, model: nn.Module, train: TrainSpec) -> None:
        self.model = model
        self.train = train
        self.trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.optimizers = make_inner_optimizers(self.trainable.values(), train, matrices=hidden_matrices(model))
        self.device = next(iter(self.trainable.values())).device
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping, where it lies

    def __call__(self, batch: Tensor, *, progress: float) -> Tensor:
        """`batch`: token ids, (sequences, tokens), on any device. `progress`: place in the schedule.

        Returns the loss where it lies: reading it would wait for the accelerator.
        """
        loss = self.backward(batch)
        self.update(progress=progress)
        return loss

    def backward(self, batch: Tensor) -> Tensor:
        """Adds the gradients of one batch to those that are there."""
        loss = self.loss(batch.to(self.device, non_blocking=True))
        loss.backward()
        return loss.detach()

    def update(self, *, progress: float) -> None:
        """Clip, step with the learning rate of `progress`, and forget the gradients."""
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.train, progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def loss(self, batch: Tensor) -> Tensor:
        """With its graph; bf16 compute on an accelerator."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(input_ids=batch, labels=batch).loss

    def gradients(self) -> Sequence[Tensor]:
        """Those of the last `backward`, in the order of `trainable`."""
        return [param.grad for param in self.trainable.values() if param.grad is not None]
