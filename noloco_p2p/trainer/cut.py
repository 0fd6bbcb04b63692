"""Decide where a model is cut into stages, and compute how much data the stages send.

This needs only the sizes of the model, not the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noloco_p2p.errors import SettingsError, SpecError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import PipelineSpec, TrainerSpec

HOP_S = 0.1  # assumed latency and compute time of a microbatch at one stage, without its transfer
LATE_SHARE = 4  # a quarter of a batch may be in flight
# Random paths cross, and microbatches wait for each other. With about four times as many in flight as a single path
# holds, pipelines over 20 and 100 Mbit/s reached 72 % and 59 % of the predicted tokens/s (docs/results.md).
CROSSING = 4


class Part(NamedTuple):
    """One block, or all parts of the head that are not blocks: embedding, final norm and LM head."""

    num_parameters: int
    num_matrix_parameters: int  # the ones that Muon optimizes
    flops: float  # per token: forward and backward pass, and a second forward pass where a stage recomputes it


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model with identical blocks."""

    num_blocks: int
    block: Part
    vocabulary: Part
    hidden_size: int

    def stage(self, cut: Sequence[int], index: int) -> Part:
        return self.part(cut[index], is_head=index == 0)

    def part(self, num_blocks: int, *, is_head: bool) -> Part:
        sizes = zip(self.block, self.vocabulary, strict=True)
        parameters, matrix_parameters, flops = (num_blocks * block + is_head * other for block, other in sizes)
        return Part(int(parameters), int(matrix_parameters), flops)


def auto_cut(sizes: Sizes, num_stages: int) -> tuple[int, ...]:
    """Choose the number of blocks of each stage so that the largest stage is as small as possible.

    The size of a stage is its share of the parameters or of the compute, whichever is larger. The block counts of the
    inner stages differ by at most one. Among equally good cuts, the one with the smallest head is chosen, because a
    head also holds logits. Raises SpecError if there are more stages than blocks.
    """
    if num_stages > sizes.num_blocks:
        raise SpecError(f"pipeline.stages is {num_stages}, but the model has only {sizes.num_blocks} blocks")
    if num_stages == 1:
        return (sizes.num_blocks,)
    whole = sizes.part(sizes.num_blocks, is_head=True)

    def largest(cut: tuple[int, ...]) -> float:
        stages = [sizes.stage(cut, index) for index in range(num_stages)]
        return max(max(s.num_parameters / whole.num_parameters, s.flops / whole.flops) for s in stages)

    most = sizes.num_blocks - (num_stages - 1)
    cuts = [(head, *_deal(sizes.num_blocks - head, num_stages - 1)) for head in range(1, most + 1)]
    return min(cuts, key=largest)  # min returns the first of equal items


def cut_of(spec: TrainerSpec) -> tuple[int, ...]:
    """Return the number of blocks of each stage. Raises SpecError if the spec does not contain the numbers yet."""
    if spec.pipeline.cut == "auto":
        raise SpecError(
            "pipeline.cut is 'auto', but all peers must use the same cut; "
            f"`noloco init --stages {spec.pipeline.stages}` writes a spec that contains one"
        )
    return spec.pipeline.cut


def block_range(cut: Sequence[int], index: int) -> range:
    """Return the indices of a stage's blocks in the whole model."""
    first = sum(cut[:index])
    return range(first, first + cut[index])


def bytes_per_token(codec: str, hidden_size: int) -> int:
    """Return how many bytes the activations of one token, or their gradients, take between two stages."""
    # This imports torch, which `join` loads only after it has checked the spec.
    from noloco_p2p.codec import get_activation_codec

    return get_activation_codec(codec).num_bytes((1, hidden_size))


def link_tokens_per_s(pipeline: PipelineSpec, hidden_size: int, *, mbit_s: float) -> float:
    """Return how many tokens per second a stage can pass on if its link carries `mbit_s` in each direction.

    Activations travel in one direction, and their gradients in the other, so a peer sends as much as it receives.
    """
    num_bytes = sum(bytes_per_token(codec, hidden_size) for codec in (pipeline.activations, pipeline.gradients))
    return mbit_s * 1e6 / 8 / num_bytes


def filling_tokens(pipeline: PipelineSpec, hidden_size: int, *, sequence_length: int, mbit_s: float) -> int:
    """Return the smallest batch of a replica, in tokens, that keeps a link busy most of the time.

    A quarter of the batch may be in flight in the pipeline.
    """
    rate = link_tokens_per_s(pipeline, hidden_size, mbit_s=mbit_s)
    in_flight = pipeline.stages * (pipeline.microbatch * sequence_length + 2 * HOP_S * rate)
    return round(LATE_SHARE * CROSSING * in_flight)


def check_stages(spec: TrainerSpec, settings: PeerSettings) -> None:
    """Check the settings that concern stages. Raises SettingsError or SpecError if they are invalid."""
    if spec.pipeline.stages == 1:
        if settings.stage is not None:
            raise SettingsError(f"--stage {settings.stage} cannot be used: the run {spec.name} has no stages")
        return
    if settings.revive_from and settings.stage is None:
        raise SettingsError("--revive-from requires --stage: specify the stage whose weights the folder contains")
    cut_of(spec)
    if settings.gpus > 1:
        raise SettingsError("--gpus is not yet supported in a run with stages")


def _deal(number: int, num_parts: int) -> tuple[int, ...]:
    return tuple(number * (part + 1) // num_parts - number * part // num_parts for part in range(num_parts))
