"""Measure the machine while it trains: its memory use, and the model FLOPs utilisation (MFU) of its accelerator."""

from __future__ import annotations

from collections import deque

import psutil
import torch
from torch import Tensor, nn

from noloco_p2p.devices import describe, peak_bytes
from noloco_p2p.telemetry.metrics import Metrics

# Peak rates for dense bf16 on the matrix cores, in flops per second, from the vendors' data sheets. Each key is a part
# of a device's name, and the first match is used. Without a match, no MFU is reported, because it would be a guess.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 980e12,
    "MI210": 181e12,
}

RECENT_S = 30.0
SHORTEST_S = 1.0  # the shortest time over which a speed is measured


class Gauges:
    """The gauges of a model on one device, or of a model that is sharded over several devices.

    `take` writes them to the metrics with each report.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, sequence_length: int, num_devices: int = 1) -> None:
        self._device = device
        self._flops_per_token = flops_per_token(model, sequence_length=sequence_length)
        peak = peak_flops(describe(device)) if device.type == "cuda" else None
        self._peak = peak and peak * num_devices
        self._waited_s = 0.0

    def take(self, metrics: Metrics, *, gradient_norm: Tensor | None, waited_s: float) -> None:
        """Update the gauges in `metrics`, whose `tokens_per_s` must be current. This synchronises with the accelerator.

        `waited_s` is the total time that training has waited for data.
        """
        metrics.data_wait_s, self._waited_s = waited_s - self._waited_s, waited_s
        metrics.gradient_norm = None if gradient_norm is None else float(gradient_norm)
        if self._peak:
            metrics.mfu = metrics.tokens_per_s * self._flops_per_token / self._peak
        if self._device.type == "cpu":
            metrics.memory_bytes = psutil.Process().memory_info().rss
        else:
            metrics.memory_bytes = peak_bytes(self._device)


class RecentSpeed:
    """The rate at which counters have grown over the last RECENT_S seconds. All times must come from the same clock."""

    def __init__(self, now_s: float, *counts: int) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque([(now_s, counts)])

    def at(self, now_s: float, *counts: int) -> tuple[float, ...]:
        """Record the counts at `now_s`, and return the growth of each count per second."""
        samples = self._samples
        samples.append((now_s, counts))
        while samples[1][0] <= now_s - RECENT_S and len(samples) > 2:
            samples.popleft()
        began_s, before = samples[0]
        elapsed_s = max(now_s - began_s, SHORTEST_S)
        return tuple((now - then) / elapsed_s for now, then in zip(counts, before, strict=True))


def flops_per_token(model: nn.Module, *, sequence_length: int) -> float:
    """Return the number of flops per token of a forward and a backward pass.

    Every weight of a matrix product counts as 6 flops if it is trained. It counts as 4 if it is frozen, because its
    gradient is not computed. Causal attention adds 6 x layers x width x tokens, because the masked half of its matrix
    is not counted. Input embeddings do not count, because they are looked up, not multiplied. A tied embedding counts
    as the head. Recomputation by activation checkpointing is not counted.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    flops = 0.0
    for param in model.parameters():
        if id(param) not in embedded or id(param) in multiplied:
            flops += param.numel() * (6 if param.requires_grad else 4)
    config = getattr(getattr(model, "base_model", model), "config", None)
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return flops + 6.0 * layers * width * sequence_length


def peak_flops(device_name: str) -> float | None:
    """Look up the peak rate of an accelerator by name. Return None if it is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)
