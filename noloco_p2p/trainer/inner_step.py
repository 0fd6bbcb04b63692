"""Take one inner step: forward and backward passes, gradient clipping, and the optimizer step.

The trainer and the simulated replicas use this code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from noloco_p2p.data.samples import num_targets
from noloco_p2p.devices import empty_cache, has_own_memory, is_out_of_memory
from noloco_p2p.errors import ModelError
from noloco_p2p.optim.inner import learning_rate, make_inner_optimizers
from noloco_p2p.optim.muon import Muon, flops
from noloco_p2p.outer.optimizer_state import flatten_optimizers, restore_optimizers
from noloco_p2p.spec import TrainSpec
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.compute import (
    TEMPORARY,
    Compute,
    fitting,
    flops_per_token,
    free_bytes,
    local,
    micro_batches,
    sequence_bytes,
)
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.model import causal_lm_loss, hidden_matrices
from noloco_p2p.trainer.needs import FP32_BYTES, moment_bytes

log = logging.getLogger(__name__)

# Bytes of parameters that are stepped together. The accelerator holds two or three times as many bytes of moments.
BUCKET_BYTES = 64 << 20
MOST_MUON = 0.5  # of the flops of the forward and backward passes


class InnerStep:
    """The inner optimization of one model, on the device of its parameters.

    A step consists of a `backward` and an `update`. `loss` is a function that returns the mean loss over the targets
    of a batch on the model's device, with its autograd graph.

    `micro_batch` is the number of sequences per forward and backward pass, or 0 for a whole batch. Gradients are summed
    over the passes, so the result of a step does not depend on `micro_batch`.

    `weights_lock` is held while the optimizer changes the weights, so that another thread can copy them in between.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainSpec,
        compute: Compute | None = None,
        *,
        loss: Callable[[nn.Module, Tensor], Tensor] = causal_lm_loss,
    ) -> None:
        self.model = model
        self.train = train
        self.compute = compute or Compute()
        self._loss = loss
        self.trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.optimizers = make_inner_optimizers(self.trainable.values(), train, matrices=hidden_matrices(model))
        self.device = next(iter(self.trainable.values())).device
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping; it stays on the device
        self.micro_batch = self.compute.micro_batch
        self.activation_bytes: int | None = None  # of a pass, beside gradients, if `fit` has measured a sequence
        self.weights_lock: AbstractContextManager[object] = nullcontext()
        self._is_bf16 = self.compute.is_bf16(self.device)
        self._is_offloaded = self.compute.offload_optimizer and has_own_memory(self.device)
        self._steppers = [OffloadedOptimizer(one) if self._is_offloaded else one for one in self.optimizers]

    def __call__(self, batch: Tensor, *, progress: float, seed: int | None = None) -> Tensor:
        """Take one step, and return its loss as a tensor on the device, because reading the value would wait for it.

        `batch` holds token ids of shape (sequences, tokens), on any device. `progress` is the position in the schedule.
        """
        loss = self.backward(batch, seed=seed)
        self.update(progress=progress)
        return loss

    def backward(self, batch: Tensor, *, seed: int | None = None) -> Tensor:
        """Compute the gradients of one batch in place of any earlier ones, and return its loss on the device.

        `seed` seeds the model's random draws (dropout), so that a step is the same after a restart. If an accelerator
        runs out of memory, the number of sequences per pass is halved from then on. Raises ModelError if a single
        sequence does not fit.
        """
        self._forget()
        return self._backward_alone(batch, seed=seed)

    def update(self, *, progress: float) -> None:
        """Clip the gradients, update the parameters with the learning rate at `progress`, and drop the gradients.

        If there are no gradients, the parameters and the state of the optimizers stay unchanged.
        """
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip_norm)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self.train, progress)
        with self.weights_lock:
            for stepper in self._steppers:
                stepper.step()
        self._forget()

    def forget(self) -> None:
        """Drop the gradients."""
        self._forget()

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss with its autograd graph. `batch` must be on the device of the model."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_bf16):
            return self._loss(self.model, batch)

    def evaluate(self, batches: Sequence[Tensor], *, progress: Progress | None = None) -> float:
        """Return the loss of a language model on held-out batches (see `evaluate_loss`)."""
        return evaluate_loss(self.model, batches, progress=progress)

    def fit(self, batch: Tensor) -> int:
        """Return how many sequences of `batch` fit into memory at a time, and use that number in later steps.

        The number is estimated from one measured sequence, unless the settings of the machine fix it or there is only
        one. Gradients are dropped. Call this before the first step.
        """
        if not self.compute.micro_batch and self._largest(batch) > 1:
            casts, largest = self._cast_bytes(), self._largest(batch)
            one = max(1, sequence_bytes(self._backward_alone, batch[:1], self.device) - casts)
            kept = [sum(local(each).numel() for each in all_) for all_ in (self.trainable.values(), self.muon_matrices)]
            free = free_bytes(self.device, moment_bytes=0 if self._is_offloaded else moment_bytes(self.train, *kept))
            self.micro_batch = self._agree(fitting(free - casts, one, largest=largest))
            used = casts + one * self.micro_batch
            # During a step's only pass, gradients take the place of activations.
            self.activation_bytes = max(0, used - FP32_BYTES * kept[0]) if self.micro_batch == largest else used
            self._forget()
        return min(self.micro_batch or self._largest(batch), self._largest(batch))

    def _cast_bytes(self) -> int:
        """Return the bytes of the copies in bf16 that a pass keeps of the weights, for any number of sequences."""
        if not self._is_bf16 or self.compute.num_ranks > 1:  # FSDP frees them after each block
            return 0
        weights = {id(each.weight): each.weight for each in self.model.modules() if isinstance(each, nn.Linear)}
        num_elements = sum(weight.numel() for weight in weights.values() if weight.dtype is torch.float32)
        return int(2 * num_elements * (1.0 if has_own_memory(self.device) else TEMPORARY))

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients that `backward` has accumulated, in the order of `trainable`."""
        return [param.grad for param in self.trainable.values() if param.grad is not None]

    @property
    def muon_matrices(self) -> list[Tensor]:
        groups = [group for one in self.optimizers if isinstance(one, Muon) for group in one.param_groups]
        return [param for group in groups for param in group["params"]]

    def warnings(self, sequence_length: int) -> list[str]:
        """Warn if Muon is slow with so few tokens per step, because its cost does not depend on their number."""
        num_tokens = self.train.batch_size * sequence_length
        passes = num_tokens * flops_per_token(self.model, sequence_length=sequence_length)
        muon = sum(flops(*param.shape) for param in self.muon_matrices)
        if muon <= MOST_MUON * passes:
            return []
        return [
            f"with {num_tokens:,} tokens per step, Muon computes {muon / passes:.0%} as much as the forward and "
            "backward passes; increase train.batch_size, or set train.inner_optimizer to 'adamw'"
        ]

    # optimizer state

    def state(self) -> dict[str, Tensor]:
        """Return the optimizers' state as named tensors, without copying them (see `outer/optimizer_state.py`)."""
        return flatten_optimizers(self.optimizers, self.trainable)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load an optimizer state that `state` has returned. If there are no tensors, reset the optimizers.

        Raises CheckpointError if a tensor does not match the model.
        """
        restore_optimizers(self.optimizers, self.trainable, tensors, keep_on_cpu=self._is_offloaded)

    def _backward_alone(self, batch: Tensor, *, seed: int | None = None) -> Tensor:
        while True:
            try:
                if seed is not None:
                    torch.manual_seed(seed + self.compute.rank)
                return self._accumulate(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(len(batch), error)

    def _forget(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, batch: Tensor) -> Tensor:
        total: Tensor | None = None
        compute, num_all = self.compute, num_targets(batch)
        for rows, share in micro_batches(
            len(batch), at_once=self.micro_batch, rank=compute.rank, num_ranks=compute.num_ranks
        ):
            part = batch[rows]
            weight = num_targets(part) / num_all if share else 0.0  # in text, every row has the same number
            loss = self.loss(part.to(self.device, non_blocking=has_own_memory(self.device))) * weight
            (loss * compute.num_ranks).backward()  # because ranks average their gradients
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "the batch is empty"
        if compute.num_ranks > 1:
            distributed.all_reduce(total)
        return total

    def _largest(self, batch: Tensor) -> int:
        """Return the largest number of rows of a batch that a rank computes."""
        return -(-len(batch) // self.compute.num_ranks)

    def _agree(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        if self.compute.num_ranks == 1:
            return number
        smallest = torch.tensor(number, device=self.device)
        distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
        return int(smallest)

    def _halve(self, num_sequences: int, error: RuntimeError) -> None:
        at_once = min(self.micro_batch or num_sequences, num_sequences)
        if at_once <= 1 or self.compute.num_ranks > 1:
            offload = ", --offload-optimizer" if has_own_memory(self.device) else ""
            raise ModelError(
                f"the accelerator ran out of memory with a micro-batch size of {at_once}; try --micro-batch 1, "
                f"--activation-checkpointing{offload}, or free some of the accelerator's memory"
            ) from error
        self.micro_batch = -(-at_once // 2)
        self._forget()  # drop the gradients of a part of the batch
        error.__traceback__ = None  # it would keep the activations in memory
        empty_cache(self.device)
        log.warning("out of memory with a micro-batch size of %d; using %d from now on", at_once, self.micro_batch)


class OffloadedOptimizer:
    """An optimizer whose moments are in main memory, for accelerators that can hold only weights and gradients.

    A step processes the parameters bucket by bucket. The moments of a bucket are copied to the device of the weights,
    used, and copied back. The arithmetic runs on the same device as without offloading, with bitwise identical results.
    Between steps, the state is in pinned CPU memory, where checkpoints read it. Each step moves 16 bytes per parameter
    over the bus.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.optimizer = optimizer
        self._kept: dict[tuple[Tensor, str], Tensor] = {}
        self._buckets: list[list[Tensor]] = []
        num_bytes = bucket_bytes
        for group in optimizer.param_groups:
            for param in group["params"]:
                if num_bytes >= bucket_bytes:
                    self._buckets.append([])
                    num_bytes = 0
                self._buckets[-1].append(param)
                num_bytes += param.nbytes

    def step(self) -> None:
        """Take a step and drop the gradients.

        Each gradient becomes None as soon as it is used, so that its memory is free for the next bucket.
        """
        gradients = {param: param.grad for bucket in self._buckets for param in bucket}
        for param in gradients:
            param.grad = None  # an optimizer skips parameters without a gradient
        for bucket in self._buckets:
            for param in bucket:
                param.grad = gradients.pop(param)
                self._fetch(param)
            self.optimizer.step()
            for param in bucket:
                param.grad = None
                self._put_back(param)
        if self._buckets and (device := self._buckets[0][0].device).type != "cpu":
            torch.accelerator.synchronize(device)  # a checkpoint may read the moments as soon as this returns

    def _fetch(self, param: Tensor) -> None:
        for field, value in self._state(param).items():
            if value.ndim:  # the step count stays on its device
                self._kept[param, field] = value
                self._state(param)[field] = value.to(param.device, non_blocking=True)

    def _put_back(self, param: Tensor) -> None:
        for field, value in self._state(param).items():
            if value.ndim:
                kept = self._kept.pop((param, field), None)
                if kept is None:
                    kept = torch.empty_like(value, device="cpu", pin_memory=has_own_memory(param.device))
                self._state(param)[field] = kept if kept is value else kept.copy_(value, non_blocking=True)

    def _state(self, param: Tensor) -> dict[str, Any]:
        return self.optimizer.state[param]
