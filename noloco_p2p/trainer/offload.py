"""Keep the moments of an optimizer in main memory, for accelerators that can hold only weights and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noloco_p2p.devices import has_own_memory

# Bytes of parameters that are stepped together. The accelerator holds two or three times as many bytes of moments.
BUCKET_BYTES = 64 << 20


class OffloadedOptimizer:
    """An optimizer whose moments are in main memory. A step processes the parameters bucket by bucket.

    For each bucket, the moments are copied to the device of the weights, used, and copied back. The arithmetic runs on
    the same device as without offloading, with bitwise identical results. Between steps, the state is in pinned CPU
    memory, where checkpoints read it. Each step moves 16 bytes per parameter over the bus.
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
