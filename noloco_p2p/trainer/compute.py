"""Choose how this machine computes an inner step. Apart from rounding, these settings do not change the result.

How many sequences fit into memory at a time is found out by measuring a single one. The FLOPs of a model and the peak
rates of accelerators give the model FLOPs utilisation (MFU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from noloco_p2p.devices import free_and_total_bytes, free_memory, has_fast_bf16, has_own_memory
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import DEVICE, DEVICES, PeerSettings
from noloco_p2p.spec import TrainerSpec

USED_SHARE = 0.8  # share of the free memory that is used, because allocators lose some to fragmentation
# The peak of a forward and backward pass, relative to the memory that is kept between the two. It is used on devices
# that do not report the peak.
TEMPORARY = 1.5
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


def choose_device(name: str, gpu: int | None = None) -> torch.device:
    """Return the torch device for `name`, which is auto, cpu, mps, cuda or cuda:N.

    For "auto", this is a CUDA or ROCm device if there is one. Otherwise, it is Apple's MPS if a single process trains
    the model, or else the CPU. If several processes share a model, `gpu` is the index of this process's GPU. Raises
    SettingsError if the device does not exist.
    """
    if not DEVICE.fullmatch(name):
        raise SettingsError(f"--device {name!r} is not a known device; use {DEVICES}")
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("mps" if gpu is None and torch.backends.mps.is_available() else "cpu")
    if name != "cpu" and gpu is not None:
        if name not in ("auto", "cuda"):
            raise SettingsError(f"--device {name} names one GPU, but this peer has several processes; use auto or cpu")
        name = f"cuda:{gpu}"
    device = torch.device("cuda" if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"--device {name}: torch found {torch.cuda.device_count()} CUDA devices on this machine; "
            "use --device cpu or auto"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        lacks = "found no Apple GPU on this machine" if torch.backends.mps.is_built() else "was built without MPS"
        raise SettingsError(f"--device mps: torch {lacks}; use --device cpu or auto")
    return device


@dataclass(frozen=True, slots=True)
class Compute:
    """The settings with which this machine computes an inner step.

    `precision` is "bf16" (autocast over fp32 weights), "fp32" or "auto", which selects bf16 on a CUDA or ROCm device
    that is fast at it. `micro_batch` is the number of sequences per forward and backward pass; gradients are summed
    over the passes. If `micro_batch` is 0, a pass processes the whole batch, or as many sequences as fit into memory.
    `rank` is the index of this process among the `num_ranks` processes that share a model. Each process computes its
    share of the rows of a batch.
    """

    precision: str = "auto"
    micro_batch: int = 0
    compile: bool = False
    liger: bool = False
    activation_checkpointing: bool = False
    offload_optimizer: bool = False
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, settings: PeerSettings, *, rank: int = 0, num_ranks: int = 1) -> Compute:
        """Create an instance from the settings of the peer. Raises SettingsError if two of them conflict."""
        if settings.offload_optimizer and num_ranks > 1:
            raise SettingsError(
                "--offload-optimizer works only with one GPU; several GPUs already split the optimizer's moments"
            )
        if settings.liger and choose_device(settings.device).type != "cuda":
            raise SettingsError("--liger works only on NVIDIA and AMD GPUs, and this peer does not use one; omit it")
        return cls(
            precision=settings.precision,
            micro_batch=settings.micro_batch,
            compile=settings.compile,
            liger=settings.liger,
            activation_checkpointing=settings.activation_checkpointing,
            offload_optimizer=settings.offload_optimizer,
            rank=rank,
            num_ranks=num_ranks,
        )

    def is_bf16(self, device: torch.device) -> bool:
        """Return whether the forward and backward passes use bf16.

        All ranks get the same answer, because they exchange tensors of the same dtype. If `precision` is "auto", the
        slowest GPU of all ranks decides.
        """
        if self.precision != "auto":
            return self.precision == "bf16"
        if device.type != "cuda":
            return False
        gpus = [device] if self.num_ranks == 1 else [torch.device("cuda", gpu) for gpu in range(self.num_ranks)]
        return all(has_fast_bf16(gpu) for gpu in gpus)

    def warnings(self, device: torch.device, spec: TrainerSpec) -> list[str]:
        """Return warnings about settings that are slow or ignored on this machine."""
        warnings = []
        if self.offload_optimizer and not has_own_memory(device):
            warnings.append(f"--offload-optimizer is ignored, because the device {device} uses main memory anyway")
        if device.type == "mps" or has_fast_bf16(device):  # it is unknown whether MPS is fast
            return warnings
        cost = "a step takes 3 to 20 times as long as with fp32" if device.type == "cpu" else "it emulates them slowly"
        slow = f"{device} has no bf16 instructions, so {cost};"
        if self.is_bf16(device):
            warnings.append(f"{slow} --precision fp32 is faster on this machine")
        if spec.model.lora.rank and spec.model.lora.base_dtype != "fp32":
            warnings.append(f"{slow} the model uses bf16 because of model.lora.base_dtype")
        return warnings


def switch_on(model: nn.Module, compute: Compute, *, by_block: bool = False) -> None:
    """Enable fused kernels, activation checkpointing and compilation if `compute` asks for them. Parameters keep their
    names.

    The model is compiled as a whole, or block by block if `by_block` is true or several ranks share it. Raises
    SettingsError if the model has no blocks to checkpoint, or if the kernels are not installed.
    """
    if compute.liger:
        try:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance as use  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise SettingsError("--liger requires the package liger-kernel: pip install liger-kernel") from None
        use(model=model)  # pyright: ignore[reportArgumentType] - as transformers does; it replaces the forward function
    if compute.activation_checkpointing:
        layers = blocks(model)
        if not layers:
            raise SettingsError("--activation-checkpointing cannot be used, because this model has no repeated layers")
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if compute.compile:
        for module in blocks(model) if by_block or compute.num_ranks > 1 else [model]:
            module.compile()


def local(values: Tensor) -> Tensor:
    """Return this rank's part of a tensor. If the tensor is not sharded, return all of it."""
    return values.to_local() if isinstance(values, DTensor) else values


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, which are the members of its outermost module lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += child if isinstance(child, nn.ModuleList) else blocks(child)
    return found


def micro_batches(
    num_sequences: int, *, at_once: int, rank: int = 0, num_ranks: int = 1
) -> Iterator[tuple[slice, float]]:
    """Yield the rows of each forward and backward pass of `rank`, with their share of the batch.

    Each pass is collective, so all ranks run the same number of passes. A rank that has no rows left computes the first
    row of the batch with a share of 0. `at_once` is the largest number of rows per pass, or 0 for no limit. Every row
    of the batch counts in exactly one pass.
    """
    first, last = _cut(num_sequences, num_ranks, rank), _cut(num_sequences, num_ranks, rank + 1)
    most = -(-num_sequences // num_ranks)
    num_parts = -(-most // at_once) if at_once else 1
    for part in range(num_parts):
        start = first + _cut(last - first, num_parts, part)
        stop = first + _cut(last - first, num_parts, part + 1)
        yield (slice(start, stop), (stop - start) / num_sequences) if start < stop else (slice(0, 1), 0.0)


def _cut(num: int, num_parts: int, part: int) -> int:
    """Return the index at which part number `part` begins when `num` items are split as evenly as possible."""
    return num * part // num_parts


def free_bytes(device: torch.device, *, moment_bytes: int) -> int:
    """Return the bytes on `device` that remain free for activations once the optimizer has allocated its moments."""
    if device.type == "cpu":
        return max(0, free_memory() - moment_bytes)
    free, _ = free_and_total_bytes(device)
    if not has_own_memory(device):
        free = min(free, free_memory())
    return max(0, free - moment_bytes)


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


def flops_per_token(model: nn.Module, *, sequence_length: int) -> float:
    """Return the number of flops per token of a forward and a backward pass.

    Every weight of a matrix product counts as 6 flops if it is trained. It counts as 4 if it is frozen, because its
    gradient is not computed. Causal attention adds 6 x layers x width x tokens, because the masked half of its matrix
    is not counted. Input embeddings do not count, because they are looked up, not multiplied. A tied embedding counts
    as the head. Recomputation by activation checkpointing is not counted.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    multiplied = {id(module.weight): module.in_features * module.out_features for module in linear}  # also if packed
    flops = 0.0
    for param in model.parameters():
        if id(param) not in embedded or id(param) in multiplied:
            flops += multiplied.get(id(param), param.numel()) * (6 if param.requires_grad else 4)
    config = getattr(getattr(model, "base_model", model), "config", None)
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return flops + 6.0 * layers * width * sequence_length


def peak_flops(device_name: str) -> float | None:
    """Look up the peak rate of an accelerator by name. Return None if it is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)
