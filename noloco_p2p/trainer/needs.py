"""Estimate how much memory, disk space and traffic a run needs on a machine before it trains.

A run that can never fit on the machine is refused before its model is built.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from noloco_p2p.devices import free_and_total_bytes, free_memory, has_own_memory, total_memory
from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.units import MOST_ELEMENTS
from noloco_p2p.settings import PeerSettings, parse_memory
from noloco_p2p.spec import Spec, TrainerSpec
from noloco_p2p.telemetry.console import count, mib
from noloco_p2p.trainer.compute import MOMENT_BYTES, Compute

CPU = torch.device("cpu")
FP32_BYTES = 4  # per parameter and vector
WEIGHT_BYTES = 8  # per parameter: fp32 weights and gradients, without the moments of AdamW
NUM_SLICES = 6  # in memory at a time: two swaps, each with a snapshot, a half-difference and payloads
PROCESS_BYTES = 512 << 20  # Python and its libraries
NETWORK_BYTES = 100 << 20  # the process of the DHT


@dataclass(frozen=True, slots=True)
class Needs:
    num_parameters: int
    model_bytes: int  # on an accelerator, without activations
    activation_bytes: int | None  # on an accelerator, or None if they are unknown
    host_bytes: int  # in main memory: libraries, slices and payloads of swaps, the state of the outer step, and the DHT
    checkpoint_bytes: int
    num_checkpoints: int  # on the disk at a time, one of which is being written
    save_every_s: float
    memory_free_bytes: int
    memory_used_bytes: int  # by this process, which is a part of its needs
    disk_free_bytes: int
    is_on_host: bool  # whether the model is in main memory, too

    @property
    def disk_bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes

    def lines(self) -> list[str]:
        """Format the needs for the user."""
        return [
            f"model: {count(self.num_parameters)} trainable parameters",
            f"needs: {self.summary()}",
            f"writes a checkpoint of {mib(self.checkpoint_bytes)} every {self.save_every_s / 60:.3g} min",
            "swaps use the whole link, unless --max-upload and --max-download limit them",
            f"free on this machine: {mib(self.memory_free_bytes)} of memory, {mib(self.disk_free_bytes)} of disk space",
        ]

    def summary(self) -> str:
        known = self.activation_bytes
        activations = " (plus activations)" if known is None else f" and {mib(known)} for activations"
        return (
            f"{mib(self.model_bytes)} for the model{activations}, {mib(self.host_bytes)} for libraries and "
            f"swaps, {mib(self.disk_bytes)} of disk space"
        )

    def warnings(self) -> list[str]:
        warnings = []
        needed = self.host_bytes + (self.model_bytes if self.is_on_host else 0)  # activations are made to fit
        if needed > self.memory_free_bytes + self.memory_used_bytes:
            warnings.append("this run needs more memory than is free on this machine; the peer may be killed")
        if self.disk_bytes > self.disk_free_bytes:
            warnings.append(
                "checkpoints need more disk space than is free; delete some files, or use another --state-dir"
            )
        return warnings


def estimate(
    spec: Spec,
    *,
    num_parameters: int,
    num_matrix_parameters: int = 0,
    frozen_bytes: int = 0,
    activation_bytes: int | None = None,
    folder: Path,
    settings: PeerSettings,
    compute: Compute | None = None,
    device: torch.device = CPU,
) -> Needs:
    """Estimate the needs of a run on this machine.

    `num_parameters` counts the trainable parameters, of which Muon optimizes `num_matrix_parameters`, and
    `frozen_bytes` is the size of all others. `activation_bytes` are those of a forward and backward pass on one
    device, or None if they are unknown.
    """
    compute = compute or Compute()
    moments = _moments(num_parameters, num_matrix_parameters)
    offloaded = moments if compute.offload_optimizer else 0
    model_bytes = WEIGHT_BYTES * num_parameters + moments - offloaded + frozen_bytes
    return Needs(
        num_parameters=num_parameters,
        model_bytes=model_bytes // compute.num_ranks,
        activation_bytes=activation_bytes,
        host_bytes=offloaded + _host_bytes(spec, num_parameters),
        checkpoint_bytes=_checkpoint_vectors(spec) * FP32_BYTES * num_parameters + moments,
        num_checkpoints=settings.keep_checkpoints + 1,
        save_every_s=settings.save_every_s,
        memory_free_bytes=free_memory(),
        memory_used_bytes=psutil.Process().memory_info().rss,
        disk_free_bytes=shutil.disk_usage(folder).free,
        is_on_host=not has_own_memory(device),
    )


def check_memory(
    spec: TrainerSpec,
    settings: PeerSettings,
    *,
    num_parameters: int,
    frozen_bytes: int,
    compute: Compute,
    device: torch.device,
) -> None:
    """Raise SettingsError if the total memory of this machine is less than the minimum that the run needs.

    The minimum does not include activations and other programs. The message contains both numbers.
    """
    moments = MOMENT_BYTES if spec.train.inner_optimizer == "adamw" else MOMENT_BYTES // 2  # Muon mostly keeps one
    offloaded = moments if compute.offload_optimizer else 0
    model_bytes = frozen_bytes + (WEIGHT_BYTES + moments - offloaded) * num_parameters
    host_bytes = offloaded * num_parameters + _host_bytes(spec, num_parameters)
    on_host = host_bytes if has_own_memory(device) else model_bytes + host_bytes
    _must_fit(on_host, memory_limit(settings), spec, num_parameters, what="main memory and swap space")
    if device.type == "cpu":
        return
    _, total = free_and_total_bytes(device)
    _must_fit(model_bytes // compute.num_ranks, total, spec, num_parameters, what=f"memory on {device}")


def memory_limit(settings: PeerSettings) -> int:
    """Return the bytes of main memory and swap space that this peer may use.

    This is all of the machine's memory and swap space, or `max_memory` if that is less.
    """
    return min(total_memory(), parse_memory(settings.max_memory) or total_memory())


def training_bytes(spec: TrainerSpec, *, num_parameters: int, num_matrix_parameters: int) -> int:
    """Return the bytes that training keeps between two steps: weights, gradients, moments and the outer step's state.

    Muon keeps one moment instead of two for each of the `num_matrix_parameters` that it optimizes.
    """
    is_muon = spec.train.inner_optimizer == "muon"
    moments = _moments(num_parameters, num_matrix_parameters if is_muon else 0)
    return (WEIGHT_BYTES + _outer_step_bytes(spec)) * num_parameters + moments


def _moments(num_parameters: int, num_matrix_parameters: int) -> int:
    """Return the bytes of the moments. Muon has one for each of its matrices, and AdamW two for everything else."""
    return MOMENT_BYTES * num_parameters - MOMENT_BYTES // 2 * num_matrix_parameters


def _must_fit(least_bytes: int, total_bytes: int, spec: Spec, num_parameters: int, *, what: str) -> None:
    if least_bytes > total_bytes:
        raise SettingsError(
            f"the run {spec.name} trains {count(num_parameters)} parameters and needs at least {mib(least_bytes)} of "
            f"{what}, not counting activations; this machine has {mib(total_bytes)}; join a smaller run, split the "
            "model over several GPUs (--gpus), or use --offload-optimizer with one GPU"
        )


def _host_bytes(spec: Spec, num_parameters: int) -> int:
    """Return the main memory for everything but the model: libraries, slices, the state of the outer step, the DHT."""
    slices = NUM_SLICES * FP32_BYTES * min(num_parameters, MOST_ELEMENTS)
    return slices + _outer_step_bytes(spec) * num_parameters + PROCESS_BYTES + NETWORK_BYTES


def _outer_step_bytes(spec: Spec) -> int:
    """Return the bytes per parameter of the outer step: slow weights, momentum, and half-differences of slow weights.

    While training waits for a swap of the whole vector, there are also its snapshot and the partner's data.
    """
    outer = spec.outer
    waiting = 2 * (1 + outer.sends_slow_weights + outer.sends_momentum) if outer.wait else 0
    return FP32_BYTES * (outer.has_outer_step + outer.keeps_momentum + outer.sends_slow_weights + waiting)


def _checkpoint_vectors(spec: Spec) -> int:
    """Return the number of vectors besides the moments: with an outer step, there are also the slow weights."""
    return 1 + spec.outer.has_outer_step + spec.outer.keeps_momentum
