"""The moments of an optimizer in main memory: for accelerators that hold weights and gradients, and no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noloco_p2p.devices import has_own_memory

BUCKET_BYTES = 64 << 20  # parameters stepped together: of the moments the accelerator holds two or three times it


class OffloadedOptimizer:
    """Steps an optimizer a bucket of parameters at a time: moments come, are used where the weights lie, and go back.

    The arithmetic is the optimizer's own, where it would be without offload: the same bits. Between steps its state is
    on the CPU (pinned), where a checkpoint finds it. Costs 16 bytes a parameter over the bus, each step.
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
        """Uses up the gradients: they are None afterwards, so that their memory is free for the next bucket."""
        gradients = {param: param.grad for bucket in self._buckets for param in bucket}
        for param in gradients:
            param.grad = None  # an optimizer passes over parameters without one
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
            if value.ndim:  # the count of steps stays where the optimizer has it
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
