"""Measure how fast the machine trains: the speed of a pipeline, and the FLOPs utilisation (MFU) of an accelerator."""

from __future__ import annotations

from collections import deque

from torch import nn

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
