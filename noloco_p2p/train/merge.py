"""States taken out of a run: a checkpoint's, a live peer's, or the mean over the swarm, as one flat vector."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file
from torch import Tensor

from noloco_p2p.errors import CheckpointError, Unreachable
from noloco_p2p.gossip.donor import state_file_bytes
from noloco_p2p.gossip.fetch import fetch_spec, fetch_state
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.session import Session
from noloco_p2p.peer.kept import check_checkpoint_folder
from noloco_p2p.spec import RunSpec
from noloco_p2p.swarm.reader import WHOLE_S, find_somebody, reader
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import Ticket
from noloco_p2p.train.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.train.flat import FlatParameters
from noloco_p2p.train.model import build_model
from noloco_p2p.train.outer_files import check_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class TakenState:
    """Slow weights (flat, fp32) of one or the mean of several peers, and the model that they belong to."""

    spec: RunSpec
    model: PreTrainedModel
    slow_weights: Tensor
    num_peers: int
    num_silent: int = 0  # live peers that were asked and gave none: nothing saved yet, or gone

    def fill_model(self) -> PreTrainedModel:
        FlatParameters(self.model).write(0, self.slow_weights)
        return self.model


def from_checkpoint(folder: Path, *, folders: Mapping[str, str] | None = None) -> TakenState:
    """`folder`: a checkpoint, a folder of checkpoints, or the folder of a run; of several the newest is taken.

    `folders`: of models, by name. Raises CheckpointError, also when the checkpoint is of another model than its spec
    gives here.
    """
    check_checkpoint_folder(folder)
    if (folder / "manifest.json").exists():
        checkpoint = Checkpoint(folder)
    else:
        inner = folder / "checkpoints"
        checkpoint = Checkpoints(inner if inner.is_dir() else folder).newest()
    if checkpoint is None:
        raise CheckpointError(f"{folder}: holds no checkpoint that can be read")
    if "spec" not in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path}: does not say of which run it is; it was not written by `noloco join`"
        )
    spec = RunSpec.from_dict(checkpoint.meta["spec"], origin=str(checkpoint.path))
    model = build_model(spec.model, sequence_length=spec.data.sequence_length, folders=folders)
    check_layout(checkpoint, FlatParameters(model).model_layout)
    return TakenState(spec, model, checkpoint.load("outer")["slow_weights"], 1)


async def from_swarm(
    ticket: Ticket,
    *,
    sample: int | None,
    progress: Progress | None = None,
    folders: Mapping[str, str] | None = None,
) -> TakenState:
    """The mean over all live peers, or over `sample` of them drawn at random. Holds two fp32 vectors: sum and one peer.

    Raises Unreachable when nobody gives a state.
    """
    progress = progress or Progress()
    async with reader(ticket) as directory:
        with progress.task("looking for live peers"):
            await find_somebody(ticket, directory)
            await directory.wait_until_whole(WHOLE_S)
        session = Session(directory.identity, ticket.invitation)
        hello = Hello(directory.peer_id, ticket.run_name, ticket.spec_digest)
        transport = GrpcTransport(lambda: hello, session=session)
        peers = [peer for peer in directory.live() if peer.can_be_called]
        spec = await fetch_spec(transport, peers, expected_digest=ticket.spec_digest)
        model = build_model(spec.model, sequence_length=spec.data.sequence_length, folders=folders)
        parameters = FlatParameters(model)
        random.shuffle(peers)
        total, taken, asked, wanted = None, 0, 0, min(sample or len(peers), len(peers))
        with progress.task("merging", unit="peers") as report:
            for peer in peers:
                report(taken, wanted)
                if taken == wanted:
                    break
                num_bytes = state_file_bytes(parameters.num_elements, spec.outer)
                asked += 1
                state = await _one(transport, peer, parameters, progress, num_bytes=num_bytes)
                if state is None:
                    continue
                total, taken = state if total is None else total.add_(state), taken + 1
            report(taken, wanted)
    if total is None:
        raise Unreachable(f"none of {len(peers)} live peers of {ticket.run_name} gave its state; try again in a minute")
    return TakenState(spec, model, total.div_(taken), taken, num_silent=asked - taken)


async def _one(
    transport: GrpcTransport, peer: Candidate, parameters: FlatParameters, progress: Progress, *, num_bytes: int
) -> Tensor | None:
    """The slow weights of one peer; None when it has no saved state or vanishes."""
    with tempfile.TemporaryDirectory(prefix="noloco-merge-") as folder:
        target = Path(folder) / "state.safetensors"
        with progress.task(f"fetching the state of {named(peer.peer_id)}", unit="bytes") as report:
            manifest = await fetch_state(
                transport,
                [peer],
                layout=parameters.layout(),
                num_elements=parameters.num_elements,
                num_bytes=num_bytes,
                target=target,
                on_progress=report,
            )
        return load_file(target)["slow_weights"] if manifest else None
