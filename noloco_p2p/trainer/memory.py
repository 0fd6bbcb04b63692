"""Find out how much memory is free, and how many sequences fit into it at a time, by measuring a single sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from noloco_p2p.devices import free_and_total_bytes, free_memory, has_own_memory

USED_SHARE = 0.8  # share of the free memory that is used, because allocators lose some to fragmentation
MOMENT_BYTES = 8  # per trainable parameter; the optimizer allocates them at its first step
# The peak of a forward and backward pass, relative to the memory that is kept between the two. It is used on devices
# that do not report the peak.
TEMPORARY = 1.5


def free_bytes(device: torch.device, *, num_parameters: int, has_moments: bool) -> int:
    """Return the bytes on `device` that remain free for activations once the optimizer has allocated its moments.

    `has_moments` says whether the moments are on that device.
    """
    moments = MOMENT_BYTES * num_parameters if has_moments else 0
    if device.type == "cpu":
        return max(0, free_memory() - moments)
    free, _ = free_and_total_bytes(device)
    if not has_own_memory(device):
        free = min(free, free_memory())
    return max(0, free - moments)


def sequence_bytes(backward: Callable[[Tensor], object], sequence: Tensor, device: torch.device) -> int:
    """Return the memory that the forward and backward passes of one sequence, of shape (1, tokens), need.

    Weights and gradients are not included. On an accelerator, the result is the measured peak. The CPU and MPS do not
    measure a peak, so the result is 1.5 times the memory that autograd keeps between the two passes.
    """
    if not has_own_memory(device):
        with torch.compiler.set_stance("force_eager"):
            return max(1, int(TEMPORARY * _kept_bytes(backward, sequence)))
    accelerator = torch.get_device_module(device)
    backward(sequence)  # allocates gradients, workspaces and compiled code, whatever the number of sequences
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    backward(sequence)
    return max(1, accelerator.max_memory_allocated(device) - before)


def fitting(free_bytes: int, sequence_bytes: int, *, largest: int) -> int:
    """Return the number of sequences that fit into memory at a time, from 1 to `largest`."""
    return max(1, min(largest, int(USED_SHARE * free_bytes) // sequence_bytes))


def _kept_bytes(backward: Callable[[Tensor], object], sequence: Tensor) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not whole.is_leaf:  # weights, views of them and inputs exist anyway
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backward(sequence)
    return sum(kept.values())
