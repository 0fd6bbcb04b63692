"""Hide the differences between torch's devices: CUDA, ROCm (which torch also calls cuda), Apple's MPS and the CPU.

The MPS code is based on torch's source code. It is tested only with test doubles, and has never been run on a Mac.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

# MPS has no error class of its own. It reports the second text for a tensor that is larger than the largest Metal
# buffer.
MPS_OUT_OF_MEMORY = ("MPS backend out of memory", "Invalid buffer size")
CGROUP = Path("/sys/fs/cgroup")
CACHES = ("inactive_file ", "active_file ")  # file caches count as used, but the kernel frees them on demand
BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"})  # torch's names on x86 and ARM


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device both has its own memory and can copy data while it computes (streams, pinned memory).

    MPS shares main memory, so copying would gain nothing there.
    """
    return device.type not in ("cpu", "mps")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "mps":
        torch.mps.synchronize()  # takes no device argument
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Release the device memory that torch has cached."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether `error` means that an accelerator ran out of memory.

    Main memory is not covered, because the system kills the process when main memory runs out.
    """
    return isinstance(error, torch.OutOfMemoryError) or str(error).startswith(MPS_OUT_OF_MEMORY)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the memory of an accelerator for this process in bytes, as (free, total). Memory that torch has cached
    counts as free.

    On MPS, the total is the amount that Metal recommends. By default, torch raises an error only at 1.7 times that
    amount, when the machine is already slow.
    """
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.current_allocated_memory()), total
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device), total


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory that tensors have used since the start, in bytes.

    MPS does not record a peak, so the result there is the memory that the allocator holds now.
    """
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return torch.get_device_module(device).max_memory_allocated(device)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether bf16 matrix products are at least as fast as fp32 ones on this device.

    CUDA devices qualify if they are Ampere or newer. ROCm devices always qualify, because torch reports support for
    every card. MPS does not qualify, because it has not been measured.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # torch checks the current device
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        if not hasattr(torch.cpu, "get_capabilities"):  # missing in torch 2.9
            return torch.cpu._is_avx512_bf16_supported()
        return any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)
    return False


def describe(device: torch.device) -> str:
    """Return the manufacturer's name for the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")()
    return "the processor"


def free_memory() -> int:
    """Return the free main memory of the machine, or of the container if that is less, in bytes."""
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
    """Return the main memory and swap of the machine, or the container's memory limit if that is less, in bytes."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    limit = container_limit()
    return total if limit is None else min(total, limit)


def container_limit() -> int | None:
    """Return the container's memory limit in bytes, or None if there is no limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # the file says "max"
        return None
