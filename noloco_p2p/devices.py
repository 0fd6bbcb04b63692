"""What torch's devices differ in: CUDA, ROCm (its devices are called cuda, too), Apple's MPS and the CPU.

MPS is written from torch's sources and tested with doubles: nobody has run it on a Mac.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

# MPS has no error class of its own. The second one: a single tensor that is larger than any Metal buffer may be.
MPS_OUT_OF_MEMORY = ("MPS backend out of memory", "Invalid buffer size")
CGROUP = Path("/sys/fs/cgroup")
CACHES = ("inactive_file ", "active_file ")  # file caches count as used, and the kernel frees them on demand
BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"})  # as torch names them: x86, ARM


def has_own_memory(device: torch.device) -> bool:
    """Whether it has memory beside main memory, and streams and pinned memory to copy while it computes.

    MPS has streams of its own only inside torch, and nothing to gain: its memory is main memory.
    """
    return device.type not in ("cpu", "mps")


def synchronize(device: torch.device) -> None:
    """Returns when all that the device was asked to do is done."""
    if device.type == "mps":
        torch.mps.synchronize()  # takes no device
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give what torch keeps for later tensors back to the device."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of an accelerator; that of main memory is not told from others by torch, and the system then ends a process."""
    return isinstance(error, torch.OutOfMemoryError) or str(error).startswith(MPS_OUT_OF_MEMORY)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """(free, in all) of an accelerator for this process; what torch keeps for later tensors counts as free.

    On MPS the total is what Metal recommends; torch refuses at 1.7 times that by default, and the machine is slow then.
    """
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.current_allocated_memory()), total
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device), total


def peak_bytes(device: torch.device) -> int:
    """The most that tensors took since the start. On MPS, which does not count it, what its allocator holds."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.get_device_module(device).max_memory_allocated(device)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether it multiplies in bf16 by instructions of its own, at least as fast as in fp32.

    CUDA: Ampere and newer. ROCm: torch says yes for every card. MPS: no, as nobody has measured it.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # the question is about the current one
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.9
            return torch.cpu._is_avx512_bf16_supported()
        return any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)
    return False


def describe(device: torch.device) -> str:
    """Its name as the maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")()
    return "the processor"


def free_memory() -> int:
    """Bytes of free main memory of the machine, or of the container where that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = container_limit()
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(CACHES))
    except (OSError, ValueError, IndexError):
        return free
    return free if limit is None else min(free, max(0, limit - used + cached))


def total_memory() -> int:
    """Bytes of main memory and swap space of the machine, or of main memory of the container where that is less."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    limit = container_limit()
    return total if limit is None else min(total, limit)


def container_limit() -> int | None:
    """Bytes of main memory that the container may use; None where nobody has set it."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # "max"
        return None
