"""Decide what a peer of each stage needs, which stage a peer takes, and when it switches to another one.

A newcomer draws its stage at random, weighted by need, so that peers that arrive together do not all take the same one.
A peer switches only if that helps the whole run considerably, because it then has to fetch the state of the other
stage.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from blake3 import blake3

from noloco_p2p.data.sources import check_bindings
from noloco_p2p.errors import DataError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.records import SERVING
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
from noloco_p2p.trainer.needs import memory_limit, training_bytes
from noloco_p2p.trainer.stage import measure

WORTH = 1.25  # after a switch, both stages must have this many times the capacity that the poorer one had before
LEFT_BEHIND = 2  # a stage that a peer leaves must keep at least this many replicas
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
        sizes = _measured(spec, folders)
        changes = {"pipeline.cut": auto_cut(sizes, num_stages), "model.parameter_seeds": True}
        return cls(spec.with_changes({"pipeline.stages": num_stages, **changes}, origin="--stages"), sizes)

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

    def unfit(self, settings: PeerSettings) -> dict[int, str]:
        """Return the stages that this machine cannot hold, with the reasons.

        A stage must fit into memory. The head also requires that its data is available.
        """
        reasons, limit = dict[int, str](), memory_limit(settings)
        for stage in range(len(cut_of(self.spec))):
            if (needed := self.memory(stage)) > limit:
                reasons[stage] = f"stage {stage} needs at least {mib(needed)} of memory, but the limit is {mib(limit)}"
            elif stage == 0:
                try:
                    check_bindings(self.spec.data, settings.data)
                except DataError as error:
                    reasons[stage] = f"stage 0 reads the data, but {error}"
        return reasons

    def lines(self) -> list[str]:
        """Format the needs for the user."""
        pipeline, size, length = self.spec.pipeline, self.sizes.hidden_size, self.spec.data.sequence_length
        cut = cut_of(self.spec)
        stages = [("stage", "blocks", "parameters", "memory")]
        for index in range(len(cut)):
            blocks = block_range(cut, index)
            name = f"{index} (head)" if index == 0 else str(index)
            places = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])
            stages.append((name, places, count(self.part(index).num_parameters), mib(self.memory(index))))
        links = [("link, each way", "tokens/s", "smallest batch")]
        for rate in LINKS_MBIT_S:
            carried = link_tokens_per_s(pipeline, size, mbit_s=rate)
            batch = filling_tokens(pipeline, size, sequence_length=length, mbit_s=rate)
            links.append((f"{rate:,} Mbit/s", f"{carried:,.0f}", f"{batch:,} tokens"))
        forward = f"{bytes_per_token(pipeline.activations, size):,} bytes ({pipeline.activations})"
        back = f"{bytes_per_token(pipeline.gradients, size):,} bytes ({pipeline.gradients})"
        sources = " or ".join(repr(part.source) for part, _ in self.spec.data.parts())
        return [
            *aligned(stages, num_left=1),
            "the memory includes weights, gradients and moments, but not activations and swaps",
            f"for each token, a stage sends {forward} to the next stage and {back} to the previous one",
            *aligned(links, num_left=1),
            "with the smallest batch (per replica and step), a link is busy 54 to 72 % of the time; the batch of this "
            f"spec has {self.spec.train.batch_size * length:,} tokens",
            "use links with at least 1 Gbit/s and a delay of at most 5 ms; at 100 Mbit/s, stages were slower, and "
            "swaps were not measured to scale (docs/results.md)",
            f"a head needs the data ({sources}) and enough memory for stage 0; every other peer can hold stage 1 or "
            f"higher. Training begins when each of the {pipeline.stages} stages has a peer. One machine can run all "
            "stages, each in a process with its own --state-dir",
        ]


def _measured(spec: TrainerSpec, folders: Mapping[str, str] | None) -> Sizes:
    length = spec.data.sequence_length
    return measure(build_on_meta(spec.model, sequence_length=length, folders=folders), sequence_length=length)


def capacities(members: Sequence[Candidate], num_stages: int) -> list[float]:
    """Return the total capacity of the live peers of each stage, in tokens/s.

    A peer that has not measured its capacity counts as an average one. If no peer has measured it, each counts as 1.
    """
    serving = [peer for peer in members if peer.state in SERVING]
    measured = [peer.capacity for peer in serving if peer.capacity > 0]
    usual = fmean(measured) if measured else 1.0
    found = [0.0] * num_stages
    for peer in serving:
        if peer.stage < num_stages:
            found[peer.stage] += peer.capacity or usual
    return found


def missing_stages(members: Sequence[Candidate], *, own: int | None, num_stages: int) -> list[int]:
    """Return the stages that no peer holds. `own` is the stage of this peer."""
    held = {peer.stage for peer in members if peer.state in SERVING}
    return [stage for stage in range(num_stages) if stage not in held and stage != own]


def draw_stage(members: Sequence[Candidate], fitting: Collection[int], *, num_stages: int, rng: random.Random) -> int:
    """Draw one of the stages in `fitting` at random.

    Halving the capacity of a stage makes it four times as likely to be drawn. An empty stage counts as if it had half
    the capacity of an average peer.
    """
    assert fitting, "no stage fits"
    found = capacities(members, num_stages)
    num_peers = sum(peer.state in SERVING for peer in members)
    least = sum(found) / num_peers / 2 if num_peers else 1.0
    stages = sorted(fitting)
    weights = [1 / max(found[stage], least) ** 2 for stage in stages]
    return rng.choices(stages, weights)[0]


def needier_stage(
    members: Sequence[Candidate], own: Candidate, fitting: Collection[int], *, num_stages: int, epoch: int
) -> int | None:
    """Return the stage to which the peer `own` should switch, or None if it should stay.

    `members` are the other peers. `epoch` is a number that is the same for all peers and changes from time to time.
    Only one peer of a stage may switch in each epoch. Otherwise, two peers that see the same need could both leave.
    """
    mates = [peer.peer_id for peer in members if peer.stage == own.stage and peer.state in SERVING]
    if len(mates) < LEFT_BEHIND:
        return None
    if min([own.peer_id, *mates], key=lambda peer: blake3(f"{epoch} {peer}".encode()).digest()) != own.peer_id:
        return None
    now = capacities([*members, own], num_stages)
    target = now.index(min(now))
    then = list(now)
    then[own.stage] -= own.capacity
    then[target] += own.capacity
    # Comparing the minimum of all stages would not work: if two stages are equally poor, no single switch raises it.
    is_worth_it = min(then[own.stage], then[target]) >= WORTH * now[target]
    return target if target in fitting and target != own.stage and is_worth_it else None
