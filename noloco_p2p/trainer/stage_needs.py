"""Cut a model into stages for `noloco init`, and compute what a peer of each stage needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import aligned, count, mib
from noloco_p2p.trainer.cut import (
    Part,
    Sizes,
    auto_cut,
    block_range,
    bytes_per_token,
    cut_of,
    filling_tokens,
    link_tokens_per_s,
)
from noloco_p2p.trainer.model import build_on_meta
from noloco_p2p.trainer.needs import training_bytes
from noloco_p2p.trainer.stage import measure

LINKS_MBIT_S = (20, 100, 1000)


@dataclass(frozen=True, slots=True)
class StageNeeds:
    spec: TrainerSpec  # with its cut
    sizes: Sizes

    @classmethod
    def of(cls, spec: TrainerSpec, num_stages: int, *, folders: Mapping[str, str] | None = None) -> StageNeeds:
        """Cut the model of a spec into `num_stages` stages. If the model is given by name, only its config is read.

        Raises SpecError if there are more stages than blocks, and ModelError if the model cannot be cut.
        """
        staged = spec.with_changes(
            {"pipeline.stages": num_stages, "pipeline.cut": "auto", "model.parameter_seeds": True}, origin="--stages"
        )
        sizes = _measured(spec, folders)
        return cls(staged.with_changes({"pipeline.cut": auto_cut(sizes, num_stages)}, origin="--stages"), sizes)

    @classmethod
    def as_cut(cls, spec: TrainerSpec, *, folders: Mapping[str, str] | None = None) -> StageNeeds:
        """Create an instance for a spec that already contains its cut.

        Raises SpecError if the cut is missing, and ModelError if the model cannot be cut.
        """
        cut_of(spec)
        return cls(spec, _measured(spec, folders))

    def part(self, stage: int) -> Part:
        return self.sizes.stage(cut_of(self.spec), stage)

    def memory(self, stage: int) -> int:
        """Return the bytes that a peer of `stage` keeps between two steps, excluding activations and swaps."""
        part = self.part(stage)
        return training_bytes(
            self.spec, num_parameters=part.num_parameters, num_matrix_parameters=part.num_matrix_parameters
        )

    def lines(self) -> list[str]:
        """Format the needs for the user."""
        return [*self._stages(), *self._links(), self._heads()]

    def _stages(self) -> list[str]:
        cut = cut_of(self.spec)
        rows = [("stage", "blocks", "parameters", "memory")]
        for index in range(len(cut)):
            blocks = block_range(cut, index)
            name = f"{index} (head)" if index == 0 else str(index)
            places = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])
            rows.append((name, places, count(self.part(index).num_parameters), mib(self.memory(index))))
        about = "the memory includes weights, gradients and moments, but not activations and swaps"
        return [*aligned(rows, num_left=1), about]

    def _links(self) -> list[str]:
        pipeline, size = self.spec.pipeline, self.sizes.hidden_size
        length = self.spec.data.sequence_length
        rows = [("link, each way", "tokens/s", "smallest batch")]
        for rate in LINKS_MBIT_S:
            carried = link_tokens_per_s(pipeline, size, mbit_s=rate)
            batch = filling_tokens(pipeline, size, sequence_length=length, mbit_s=rate)
            rows.append((f"{rate:,} Mbit/s", f"{carried:,.0f}", f"{batch:,} tokens"))
        forward = f"{bytes_per_token(pipeline.activations, size):,} bytes ({pipeline.activations})"
        back = f"{bytes_per_token(pipeline.gradients, size):,} bytes ({pipeline.gradients})"
        own = self.spec.train.batch_size * length
        return [
            f"for each token, a stage sends {forward} to the next stage and {back} to the previous one",
            *aligned(rows, num_left=1),
            f"with the smallest batch (per replica and step), a link is busy 60 to 70 % of the time; the batch of this "
            f"spec has {own:,} tokens",
            "use links with at least 1 Gbit/s and a delay of at most 5 ms; on slower links, stages learn less per "
            "token (docs/results.md)",
        ]

    def _heads(self) -> str:
        sources = " or ".join(repr(part.source) for part, _ in self.spec.data.parts())
        num_stages = self.spec.pipeline.stages
        return (
            f"a head needs the data ({sources}) and enough memory for stage 0; every other peer can hold stage 1 or "
            f"higher. Training begins when each of the {num_stages} stages has a peer. One machine can run all "
            "stages, each in a process with its own --state-dir"
        )


def _measured(spec: TrainerSpec, folders: Mapping[str, str] | None) -> Sizes:
    length = spec.data.sequence_length
    return measure(build_on_meta(spec.model, sequence_length=length, folders=folders), sequence_length=length)
