"""Tell what a run costs a machine: memory, disk space, traffic, and the time to fetch a state.

`noloco init`, `noloco doctor` and `noloco join` print the same costs, which docs/generate.py also writes into
docs/reference.md. A run that can never fit on the machine is refused before its model is built. Only functions that
look at the machine import torch, because `noloco init` starts without it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings, parse_memory
from noloco_p2p.spec import ModelSpec, Spec, TrainerSpec, TrainSpec
from noloco_p2p.telemetry.console import count, counted, duration, mib

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4  # per parameter and vector
WEIGHT_BYTES = 8  # per trainable parameter: fp32 weights and gradients
MOMENT_BYTES = 8  # per trainable parameter; the optimizer allocates them at its first step
MOMENT_BYTES_8BIT = 2 + 2 * FP32_BYTES / 256  # two codes, and two scales for each block
NF4_BYTES = 1 / 2 + 1 / 64 + FP32_BYTES / (64 * 256)  # per weight: a code, its scale of 8 bits, and the scale of scales
MUON_BYTES = 5 * FP32_BYTES * (1 << 24)  # copies of a batch of matrices, which it orthogonalizes (optim/muon.py)
SLICE_BYTES = FP32_BYTES * (1 << 24)  # at most (gossip/units.py)
NUM_SLICES = 6  # in memory at a time: two swaps, each with a snapshot, a half-difference and payloads
PROCESS_BYTES = 612 << 20  # Python, its libraries, and the process of the DHT
SENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "modulo": 0.5}  # per parameter; modulo: while partners are close
CARDS_GIB = (8, 12, 16, 24)  # GPUs that people have
DRIVER_BYTES = 1 << 30  # of a GPU's memory: its context, kernels, the screen, and what fragmentation loses
LOGITS_BYTES = 256 << 20  # limit for the fp32 logits of one chunk; the loss and its gradient each need as much again
USUAL_RANK = 16
DAY_S, HOUR_S = 86_400.0, 3600.0
USUAL_BYTES_PER_S = 12.5e6  # assumed for a link of unknown speed: 100 Mbit/s
WIRE = 1.06  # bytes on a link for each byte of a state, with the headers of IP, TCP and TLS
SMALL_PASS_S = 0.5  # models that are sent in less time leave the link idle between swaps (outer.min_inner_steps)
NEWCOMER_S = 9.0  # to load libraries, enter the swarm and take the first step (benchmarks/size.py)


class Counts(NamedTuple):
    """The parameters of a model."""

    num_parameters: int  # those that are trained
    num_matrix_parameters: int = 0  # those of them that belong to matrices which Muon can train
    frozen_bytes: int = 0  # of all others

    @classmethod
    def of_sizes(cls, model: ModelSpec) -> Counts:
        """Count the parameters of a Llama, whose sizes are in the spec, without building it."""
        return cls(model.num_parameters(), model.num_matrix_parameters())


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model with blocks like those of Llama, and what it needs on a GPU in bf16 (autocast)."""

    hidden_size: int
    num_layers: int
    attention_size: int  # of all heads together
    kv_size: int
    mlp_size: int
    vocab_size: int
    is_tied: bool

    @classmethod
    def of(cls, model: ModelSpec, *, folders: Mapping[str, str] | None = None) -> Sizes | None:
        """Return the sizes in the spec, or in the config of the model that it names.

        Return None if the config cannot be read, or is that of another kind of model.
        """
        if not model.pretrained:
            heads = model.num_heads
            kv_size = model.hidden_size // heads * (model.num_kv_heads or heads)
            sizes = model.hidden_size, model.num_layers, model.hidden_size, kv_size, model.mlp_size, model.vocab_size
            return cls(*sizes, model.tied_embeddings)
        from noloco_p2p.trainer.model_source import find_source  # imports the hub's client

        try:
            source = find_source("model.pretrained", model.pretrained, revision=model.revision, folders=folders)
            return cls.of_config(json.loads(source.file("config.json").read_text(encoding="utf-8")))
        except Exception:  # noqa: BLE001 - what reads the model tells why
            return None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Sizes:
        """Read the sizes from a config.json of transformers. Raises KeyError if it has other numbers."""
        text = config.get("text_config", config)
        if any("expert" in key for key in text):
            raise KeyError("experts")
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        head = text.get("head_dim") or hidden // heads
        kv_size = head * (text.get("num_key_value_heads") or heads)
        sizes = hidden, text["num_hidden_layers"], head * heads, kv_size, text["intermediate_size"], text["vocab_size"]
        ties_by_default = str(text.get("model_type", "")).startswith("gemma")
        return cls(*sizes, text.get("tie_word_embeddings", ties_by_default))

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes of the matrices of a block."""
        hidden, attention = self.hidden_size, self.attention_size
        mlp = [(self.mlp_size, hidden), (self.mlp_size, hidden), (hidden, self.mlp_size)]
        return [(attention, hidden), (self.kv_size, hidden), (self.kv_size, hidden), (hidden, attention), *mlp]

    def gpu_bytes(self, spec: TrainerSpec, base: str, *, saves_activations: bool) -> int:
        """Return the bytes that training takes on a GPU, one sequence at a time.

        `base` is the dtype of the weights under adapters, or "" if all weights are trained. With `saves_activations`,
        only the inputs of the blocks are kept for the backward pass.
        """
        tokens, hidden = spec.data.sequence_length, self.hidden_size
        in_blocks = self.num_layers * sum(rows * columns for rows, columns in self.matrices)
        vocabulary = self.vocab_size * hidden
        others = vocabulary * (1 if self.is_tied else 2) + (2 * self.num_layers + 1) * hidden
        rank = spec.model.lora.rank or USUAL_RANK
        adapters = rank * self.num_layers * sum(rows + columns for rows, columns in self.matrices)
        trained, in_matrices = (adapters, 0) if base else (in_blocks + others, in_blocks)
        num_bytes = WEIGHT_BYTES * trained + moment_bytes(spec.train, trained, in_matrices)
        if base in ("bf16", "nf4"):
            largest = max(rows * columns for rows, columns in self.matrices)
            num_bytes += int(NF4_BYTES * in_blocks) + 2 * largest if base == "nf4" else 2 * in_blocks
            num_bytes += 2 * others
        else:
            num_bytes += FP32_BYTES * (in_blocks + others) if base else FP32_BYTES * vocabulary  # of a chunk's gradient
            num_bytes += 2 * (in_blocks + vocabulary)  # copies in bf16, which autocast makes
        # What surrounds the norms is fp32. The rest is bf16: heads, their output, and the parts of the MLP.
        block = tokens * (24 * hidden + 10 * self.attention_size + 8 * self.mlp_size)
        inputs = tokens * FP32_BYTES * hidden
        num_bytes += self.num_layers * inputs + block if saves_activations else self.num_layers * block
        return num_bytes + 3 * min(LOGITS_BYTES, FP32_BYTES * tokens * self.vocab_size) + DRIVER_BYTES

    def lines(self, spec: TrainerSpec) -> list[str]:
        """Say which GPUs can train the model, for each way to keep its weights."""
        rank = spec.model.lora.rank or USUAL_RANK
        cards = f"{', '.join(map(str, CARDS_GIB[:-1]))} and {CARDS_GIB[-1]} GB"
        lines = [
            f"GPUs of {cards} that hold a sequence of {spec.data.sequence_length:,} tokens, without and with "
            "--activation-checkpointing:"
        ]
        for base in ("", "fp32", "bf16", "nf4"):
            how = f"adapters of rank {rank}, base_dtype {base}" if base else "all weights"
            needed = [self.gpu_bytes(spec, base, saves_activations=saves) for saves in (False, True)]
            lines.append(f"  {how}: {' and '.join(f'{mib(each)} ({_card(each)})' for each in needed)}")
        return lines


@dataclass(frozen=True, slots=True)
class Needs:
    num_parameters: int
    model_bytes: int  # on the device of the model, without activations
    activation_bytes: int | None  # on an accelerator, or None if they are unknown
    host_bytes: int  # in main memory: libraries, slices and payloads of swaps, the state of the outer step, and the DHT
    copy_bytes: int  # in main memory, while a checkpoint of a model on an accelerator is written
    checkpoint_bytes: int
    num_checkpoints: int  # on the disk, without the one that is being written
    save_every_s: float
    state_bytes: int  # of a state that a newcomer fetches
    fetch_bytes_per_s: float
    pass_bytes: float  # of all weights, encoded for swaps
    swap_bytes_per_s: float
    is_limited: bool  # whether a setting limits the rate of swaps
    is_on_host: bool  # whether the model is in main memory, too

    @property
    def disk_bytes(self) -> int:
        """The disk space for all checkpoints, one of which is being written. It does not grow with time."""
        return (self.num_checkpoints + 1) * self.checkpoint_bytes

    @property
    def written_bytes_per_day(self) -> float:
        return DAY_S / self.save_every_s * self.checkpoint_bytes

    @property
    def begin_s(self) -> float:
        """The time from the start of a newcomer to the end of its first step."""
        return NEWCOMER_S + WIRE * self.state_bytes / self.fetch_bytes_per_s

    def lines(self, *, for_others: bool = True) -> list[str]:
        """Format the needs for the user, with what newcomers need unless `for_others` is false."""
        known = self.activation_bytes
        activations = " (plus activations)" if known is None else f" and {mib(known)} for activations"
        copy = f" (on a GPU, {mib(self.copy_bytes)} more for a copy during a checkpoint)" if self.copy_bytes else ""
        pass_s = self.pass_bytes / self.swap_bytes_per_s
        hourly = f"{self.swap_bytes_per_s * HOUR_S / 1e9:.3g} GB per hour each way at {_mbit_s(self.swap_bytes_per_s)}"
        is_small = pass_s < SMALL_PASS_S
        swaps = f"up to {hourly}" if self.is_limited or is_small else f"the whole link ({hourly})"
        swaps += ", but far less with a model as small as this one" if is_small else ""
        swaps += "" if self.is_limited else ", unless --max-upload limits them"
        swaps += f"; sending all weights once takes {'less than 1 s' if is_small else duration(pass_s)}"
        newcomers = (
            f"newcomers: fetch {mib(self.state_bytes)}, and train after {duration(self.begin_s)} at "
            f"{_mbit_s(self.fetch_bytes_per_s)}"
        )
        if self.is_on_host:
            whole = f"{mib(self.host_bytes + self.model_bytes + (known or 0))} of memory"
            part = f"{mib(self.model_bytes)} of it for the model"
            memory = f"{whole} plus activations ({part})" if known is None else f"{whole} ({part}{activations})"
        else:
            memory = (
                f"{mib(self.model_bytes)} for the model{activations}, {mib(self.host_bytes)} for libraries and swaps"
            )
        return [
            f"model: {count(self.num_parameters)} trainable parameters",
            f"needs: {memory}{copy}, {mib(self.disk_bytes)} of disk space",
            f"checkpoints: keeps {counted(self.num_checkpoints, 'checkpoint')} of {mib(self.checkpoint_bytes)}, and "
            f"writes {mib(self.written_bytes_per_day)} per day (one every {self.save_every_s / 60:.3g} min)",
            *([newcomers] if for_others else []),
            f"swaps: use {swaps}",
        ]

    def warnings(self, settings: PeerSettings) -> list[str]:
        """Warn if more memory or disk space is needed than is free on this machine."""
        from noloco_p2p.devices import free_memory

        found, folder = list[str](), settings.state_dir
        free = free_memory()
        needed = self.host_bytes + (self.model_bytes if self.is_on_host else 0)  # activations are made to fit
        if needed > free + psutil.Process().memory_info().rss:  # this process is a part of the needs
            found.append(
                f"this run needs {mib(needed)} of main memory, but this machine has {mib(free)} free; the peer may be "
                "killed"
            )
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
        if self.disk_bytes > free:
            found.append(
                f"checkpoints need {mib(self.disk_bytes)} of disk space, but {mib(free)} is free; delete some files, "
                "or use another --state-dir"
            )
        return found


def estimate(
    spec: Spec,
    counts: Counts,
    settings: PeerSettings,
    *,
    has_gpu: bool,
    num_ranks: int = 1,
    activation_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
) -> Needs:
    """Estimate the needs of a run on a machine.

    `has_gpu` says whether the model is in the memory of an accelerator. `activation_bytes` are those of a forward and
    backward pass on one device, or None if they are unknown. `link_bytes_per_s` is the measured rate of the link, or
    None if it is not known.
    """
    num, outer = counts.num_parameters, spec.outer
    train = spec.train if isinstance(spec, TrainerSpec) else TrainSpec()  # a script's own optimizer is unknown
    moments = moment_bytes(train, num, counts.num_matrix_parameters)
    num_muon = counts.num_matrix_parameters if train.inner_optimizer == "muon" else 0
    offloaded = moments if settings.offload_optimizer and has_gpu else 0
    step = min(MUON_BYTES, MUON_BYTES // (1 << 24) * num_muon)
    model_bytes = WEIGHT_BYTES * num + moments - offloaded + counts.frozen_bytes
    slices = NUM_SLICES * min(SLICE_BYTES, FP32_BYTES * num)
    host_bytes = offloaded + slices + _outer_step_bytes(spec) * num + PROCESS_BYTES
    checkpoint_bytes = (1 + outer.has_outer_step + outer.keeps_momentum) * FP32_BYTES * num + moments
    down, up, link = settings.download_bytes_per_s, settings.upload_bytes_per_s, link_bytes_per_s or USUAL_BYTES_PER_S
    return Needs(
        num_parameters=num,
        model_bytes=model_bytes // num_ranks + step,
        activation_bytes=activation_bytes,
        host_bytes=host_bytes,
        copy_bytes=checkpoint_bytes if has_gpu else 0,
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=settings.keep_checkpoints,
        save_every_s=settings.save_every_s,
        state_bytes=(1 + outer.keeps_momentum) * FP32_BYTES * num,
        fetch_bytes_per_s=down or link,
        pass_bytes=SENT_BYTES[spec.codec.weights] * num,
        swap_bytes_per_s=min(up or link, down or link),
        is_limited=bool(up or down),
        is_on_host=not has_gpu,
    )


def check_memory(needs: Needs, spec: Spec, settings: PeerSettings, device: torch.device) -> None:
    """Raise SettingsError if the total memory of this machine is less than the minimum that the run needs.

    The minimum does not include activations and other programs. The message contains both numbers.
    """
    from noloco_p2p.devices import free_and_total_bytes

    on_host = needs.host_bytes + (needs.model_bytes if needs.is_on_host else 0)
    _must_fit(on_host, memory_limit(settings), spec, needs, what="main memory and swap space")
    if device.type != "cpu":
        _must_fit(needs.model_bytes, free_and_total_bytes(device)[1], spec, needs, what=f"memory on {device}")


def memory_limit(settings: PeerSettings) -> int:
    """Return the bytes of main memory and swap space that this peer may use.

    This is all of the machine's memory and swap space, or `max_memory` if that is less.
    """
    from noloco_p2p.devices import total_memory

    return min(total_memory(), parse_memory(settings.max_memory) or total_memory())


def training_bytes(spec: TrainerSpec, *, num_parameters: int, num_matrix_parameters: int) -> int:
    """Return the bytes that training keeps between two steps: weights, gradients, moments and the outer step's state.

    `num_matrix_parameters` are those that Muon would optimize.
    """
    moments = moment_bytes(spec.train, num_parameters, num_matrix_parameters)
    return (WEIGHT_BYTES + _outer_step_bytes(spec)) * num_parameters + moments


def moment_bytes(train: TrainSpec, num_parameters: int, num_matrix_parameters: int) -> int:
    """Return the bytes of the moments. Muon has one for each parameter of a matrix, and AdamW two for all others."""
    if train.inner_optimizer == "adamw8bit":
        return int(MOMENT_BYTES_8BIT * num_parameters)
    num_muon = num_matrix_parameters if train.inner_optimizer == "muon" else 0
    return MOMENT_BYTES * num_parameters - MOMENT_BYTES // 2 * num_muon


def _must_fit(least_bytes: int, total_bytes: int, spec: Spec, needs: Needs, *, what: str) -> None:
    if least_bytes > total_bytes:
        raise SettingsError(
            f"the run {spec.name} trains {count(needs.num_parameters)} parameters and needs at least "
            f"{mib(least_bytes)} of {what}, not counting activations; this machine has {mib(total_bytes)}; join a "
            "smaller run, split the model over several GPUs (--gpus), or use --offload-optimizer with one GPU"
        )


def _outer_step_bytes(spec: Spec) -> int:
    """Return the bytes per parameter of the outer step: slow weights, momentum, and half-differences of slow weights.

    While training waits for a swap of the whole vector, there are also its snapshot and the partner's data.
    """
    outer = spec.outer
    waiting = 2 * (1 + outer.sends_slow_weights + outer.sends_momentum) if outer.wait else 0
    return FP32_BYTES * (outer.has_outer_step + outer.keeps_momentum + outer.sends_slow_weights + waiting)


def _card(num_bytes: int) -> str:
    return next((f"from {gib} GB" for gib in CARDS_GIB if num_bytes <= gib << 30), f"more than {CARDS_GIB[-1]} GB")


def _mbit_s(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:,.4g} Mbit/s"
