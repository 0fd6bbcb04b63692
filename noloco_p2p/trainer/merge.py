"""Get the state of a run as one flat vector: from a checkpoint, from a live peer, or as the mean over the swarm.

In a run with stages, each stage has its own state, and the states of all stages form a whole model.

Peers are strangers. Every state is checked by `transfer/fetch.py`, and the states of several peers are compared
with each other (`outer/robust_mean.py`). The states are stored on disk, so that memory holds only the mean and a chunk
of each state.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from noloco_p2p.errors import CheckpointError, Unreachable
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints, Vector
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.robust_mean import RobustMean, leave_out_far, robust_mean
from noloco_p2p.outer.saved_state import STATE_FILE, check_layout, read_state, vector_in
from noloco_p2p.outer.weights import WEIGHTS, check_vectors, vectors_of
from noloco_p2p.peer.run_folder import check_checkpoint_folder, stage_folder
from noloco_p2p.peer_name import named
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.directory import WHOLE_S, find_somebody, reader
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import Ticket
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.model import build_model, build_outline
from noloco_p2p.trainer.stage import build_part
from noloco_p2p.transfer.fetch import Admission, fetch_spec, fetch_state, forget

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Judge = Callable[[Mapping[str, Vector]], RobustMean]
COMPARED = 5  # states from which a fork picks the one in the middle; two of them may be forged


@dataclass(frozen=True, slots=True)
class TakenState:
    """The weights (flat, fp32) of one peer, or the mean of several, with their model or stage.

    A stage, or a model of which the state holds every tensor, is built without memory for its weights. `notices` holds
    a sentence for each peer whose state was left out, and one for all states that were clipped.
    """

    spec: TrainerSpec
    model: PreTrainedModel
    weights: Tensor
    num_peers: int = 1
    notices: Sequence[str] = ()

    def by_name(self) -> dict[str, Tensor]:
        """Return views of the weights with the names and shapes of the parameters."""
        return FlatParameters(self.model).by_name(self.weights)

    def fill_model(self) -> PreTrainedModel:
        FlatParameters(self.model).write(0, self.weights)
        return self.model


def from_checkpoint(folder: Path, *, stage: int | None = None, folders: Mapping[str, str] | None = None) -> TakenState:
    """Load the weights of a checkpoint.

    `folder` is a checkpoint, a folder of checkpoints, or the folder of a run; the newest checkpoint in it is used.
    `stage` is the stage that the checkpoint must hold. `folders` maps the names of bound models to their folders.

    Raises CheckpointError if no checkpoint can be read, if the checkpoint does not match the model of its spec, or if
    it holds a stage although a whole model is wanted.
    """
    checkpoint = _newest(folder, stage)
    spec = _spec_in(checkpoint)
    if stage is None and spec.pipeline.stages > 1:
        raise CheckpointError(
            f"{checkpoint.path} contains only one of the {spec.pipeline.stages} stages of the run {spec.name}, "
            "not a whole model; if every stage has a live peer, export the whole model with "
            "`noloco export TICKET DIR --merge`, or fork the run with `noloco fork TICKET NEW.toml`"
        )
    model = _build(spec, stage, folders)
    parameters = FlatParameters(model)
    check_layout(checkpoint.meta["outer"], parameters.model_layout, origin=str(checkpoint.path))
    tensors = checkpoint.load(STATE_FILE)
    try:
        check_vectors(tensors, vectors_of(spec.outer, parameters.num_elements))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    return TakenState(spec, model, tensors[WEIGHTS])


def spec_of(folder: Path) -> TrainerSpec:
    """Return the spec of a checkpoint, named as for `from_checkpoint`. Raises CheckpointError as it does."""
    return _spec_in(_newest(folder, None))


def _spec_in(checkpoint: Checkpoint) -> TrainerSpec:
    if "spec" not in checkpoint.meta:
        raise CheckpointError(f"{checkpoint.path} does not name its run; it was not written by `noloco join`")
    return TrainerSpec.from_dict(checkpoint.meta["spec"], origin=str(checkpoint.path))


def _newest(folder: Path, stage: int | None) -> Checkpoint:
    check_checkpoint_folder(folder)
    if (folder / "manifest.json").exists():
        return Checkpoint(folder)
    kept = folder.glob("stage-*") if stage is None else [stage_folder(folder, stage)]
    for place in (folder / "checkpoints", *kept, folder):
        if checkpoint := Checkpoints(place).newest():
            return checkpoint
    raise CheckpointError(f"{folder} contains no readable checkpoint")


def _build(spec: TrainerSpec, stage: int | None, folders: Mapping[str, str] | None) -> PreTrainedModel:
    length = spec.data.sequence_length
    if stage is None:
        build = build_model if spec.model.pretrained or spec.model.lora.rank else build_outline
        return build(spec.model, sequence_length=length, folders=folders)
    return build_part(spec.model, cut_of(spec), index=stage, sequence_length=length, folders=folders)


class LiveRun:
    """A run that peers are training, as seen from outside.

    `folders` maps the names of bound models to their folders.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        transport: Transport,
        *,
        live: Callable[[], Sequence[Candidate]],
        progress: Progress,
        folders: Mapping[str, str] | None,
    ) -> None:
        self.spec = spec
        self.progress = progress
        self.folders = folders
        self._transport = transport
        self._live = live

    def stages(self) -> Sequence[int | None]:
        """Return the stages that together form a whole model, or [None] if each peer holds the whole model."""
        num_stages = self.spec.pipeline.stages
        return range(num_stages) if num_stages > 1 else [None]

    def check_stages(self) -> None:
        """Raise Unreachable if there is a stage that no reachable peer holds. Call this before any download."""
        held = {peer.stage for peer in self._live() if peer.can_be_called}
        for stage in range(self.spec.pipeline.stages):
            if stage not in held:
                raise Unreachable(_nobody(self.spec, stage))

    async def take(self, stage: int | None, *, sample: int | None, judge: Judge = robust_mean) -> TakenState:
        """Fetch the states of all live peers, or of `sample` peers drawn at random, and return what `judge` makes of
        them.

        In a run with stages, only the peers of `stage` count. Raises Unreachable if no peer serves a state, and
        CheckpointError if it cannot be decided which states are wrong, or if the disk is full.
        """

        def live() -> list[Candidate]:
            return [peer for peer in self._live() if stage is None or peer.stage == stage]

        spec = self.spec
        model = _build(spec, stage, self.folders)
        layout = FlatParameters(model).model_layout
        check_file = partial(read_state, expected=vectors_of(spec.outer, layout.num_elements))
        admission = Admission(spec, self._transport, layout, live=live, check_file=check_file)
        peers = [peer for peer in live() if peer.can_be_called]
        random.shuffle(peers)
        wanted = min(sample or len(peers), len(peers))
        states: dict[str, Vector] = {}  # in files
        num_asked = 0
        with (
            tempfile.TemporaryDirectory(prefix="noloco-states-") as folder,
            self.progress.task("fetching states", unit="peers") as report_peers,
        ):
            _check_room(Path(folder), wanted * admission.num_bytes, num_peers=wanted)
            for peer in peers:
                report_peers(len(states), wanted)
                if len(states) == wanted:
                    break
                num_asked += 1
                target = Path(folder, f"{num_asked}.safetensors")
                try:
                    with self.progress.task(
                        f"fetching the state of {named(peer.peer_id, peer.name)}", unit="bytes"
                    ) as report:
                        manifest = await fetch_state(
                            self._transport, [peer], admission, target=target, on_progress=report
                        )
                except OSError as error:
                    why = f"the states fetched from peers cannot be written to {folder}: {error}"
                    raise CheckpointError(why) from None
                if manifest:
                    states[peer.peer_id] = vector_in(target, WEIGHTS)
                else:
                    forget(target)
            report_peers(len(states), wanted)
            if not states:
                refused = "; ".join(f"{named(peer)}: {why}" for peer, why in admission.refused.items())
                raise Unreachable(
                    f"none of the {len(peers)} live peers of {_part(spec, stage)} provided a usable state"
                    + (f" ({refused})" if refused else "; try again in a minute")
                    if peers
                    else _nobody(spec, stage)
                )
            found = await asyncio.to_thread(judge, states)
        left_out = {peer: why for peer, why in admission.refused.items() if peer not in states}
        num_silent = num_asked - len(states) - len(left_out)
        for peer, share in found.left_out.items():
            distance = f"{_percent(share)} of the median's norm"
            left_out[peer] = f"its weights are too far from the median of the peers ({distance})"
        notices = [f"the state of {named(peer)} was left out: {why}" for peer, why in left_out.items()]
        if found.shortened:
            clipped = ", ".join(f"{named(peer)} ({_percent(share)})" for peer, share in found.shortened.items())
            far = "these states were clipped because they are far from the median (distances relative to its norm)"
            notices.append(f"{far}: {clipped}")
        if num_silent:
            notices.append(
                f"peers that have no state yet: {num_silent} (a peer has a state seconds after it begins to train; "
                "try again in a minute)"
            )
        return TakenState(spec, model, found.weights, len(found.admitted), notices)


def state_in_the_middle(states: Mapping[str, Vector]) -> RobustMean:
    """Return the state nearest to the coordinate-wise median. Raises the same errors as `robust_mean`."""
    distances, far = leave_out_far(states)
    nearest = min(distances, key=distances.__getitem__)
    whole = states[nearest].read(0, states[nearest].num_elements)
    return RobustMean(whole, [nearest], far, {})


@asynccontextmanager
async def live_run(ticket: Ticket, *, progress: Progress, folders: Mapping[str, str] | None) -> AsyncIterator[LiveRun]:
    """Find the live peers of the run that `ticket` names. Raises Unreachable if there are none."""
    async with reader(ticket) as directory:
        with progress.task("looking for live peers"):
            await find_somebody(ticket, directory)
            await directory.wait_until_whole(WHOLE_S)
        transport = GrpcTransport.from_outside(ticket, directory.identity, directory.node.guard)
        peers = [peer for peer in directory.live() if peer.can_be_called]
        spec = TrainerSpec.of(await fetch_spec(transport, peers, expected_digest=ticket.spec_digest))
        yield LiveRun(spec, transport, live=directory.live, progress=progress, folders=folders)


def _part(spec: TrainerSpec, stage: int | None) -> str:
    return spec.name if stage is None else f"stage {stage} of {spec.name}"


def _nobody(spec: TrainerSpec, stage: int | None) -> str:
    return f"no peer of {_part(spec, stage)} can be reached at the moment; try again in a minute"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _check_room(folder: Path, num_bytes: int, *, num_peers: int) -> None:
    """Raise CheckpointError if the states do not fit on the disk. Call this before gigabytes are transferred."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"{num_peers} states need {num_bytes / 1e9:.3g} GB, but {folder.parent} has only {free / 1e9:.3g} GB free; "
            "set TMPDIR to a folder with more space, or fetch fewer states with `export --sample`"
        )
