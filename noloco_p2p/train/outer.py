"""NoLoCo around anybody's training loop: after each optimizer step call `outer.step()`, and nothing else.

Every `outer.inner_steps` calls, or with "auto" as often as the link of this peer carries it, it takes the outer step
(arXiv 2506.10911) with what one random live peer has sent, in place on the model. In between the swap of slow weights
and momentum runs in the background.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.gossip.donor import SavedState
from noloco_p2p.gossip.exchange import ThreadedExchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Alone, Half, LonelyCause, Outcome, Swapped
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.train import outer_files
from noloco_p2p.train.admission import Admission, LossCheck
from noloco_p2p.train.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.train.flat import FlatParameters
from noloco_p2p.train.outer_state import OuterState
from noloco_p2p.train.rounds import RoundEnd, Rounds
from noloco_p2p.train.saver import Saver

log = logging.getLogger(__name__)

FETCHED_FILE = "fetched.safetensors"  # the state of a live peer, until it is in memory


class Swarm(Protocol):
    """What the outer step needs of a peer; `noloco_p2p.Peer` is one."""

    @property
    def spec(self) -> RunSpec: ...

    @property
    def exchange(self) -> ThreadedExchange: ...

    @property
    def run_folder(self) -> Path: ...

    @property
    def metrics(self) -> Metrics: ...

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Tell the network which model trains here; with `target`, fetch the state of a live peer into that file."""
        ...

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into that file when most of the swarm is far ahead of `progress`; rounds of
        this peer have `inner_steps`. None when it is not, or nobody gives a newer state."""
        ...

    def serve_state(self, saved: SavedState) -> None: ...

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """An outer step was taken: publish a sketch of these weights, made in the background, where one is due.
        `progress`: of the step, the same for both partners of a swap; `at_rest`: nobody will train them any more."""
        ...

    def weights_change(self) -> None:
        """The slow weights are about to change: a sketch that still reads them is of no use."""
        ...


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What happened in one round; `outcome` tells with whom."""

    round: int  # the round that ended
    outcome: Outcome
    progress: float
    blocked_s: float  # how long the boundary lasted; `step` waits for it
    diverged: bool = False  # own weights were not finite, and went back to those of the round's start


class NoLoCo:
    """The outer optimizer of one peer.

    model: its trainable parameters are one flat vector, in the order of `named_parameters()`; they may be on any one
        device and of any floating dtype. Frozen parameters must be the same on all peers (their content is compared),
        and never travel. Buffers stay each peer's own; a checkpoint keeps the persistent ones.
    peer: a running `Peer`; it trains one model, that of the NoLoCo that was made last. When it enters a swarm that
        already trains, the model takes the swarm's state; otherwise the model's own weights are the start. Peers that
        start apart must start equal: seed the model.
    save_every_rounds: how often the state that newcomers fetch is written; 0 = the caller does it (`save`), and until
        it did newcomers keep their own weights. Where nobody gives a newcomer a state and this folder has one, as after
        a restart of the only peer, the model goes on from that.
    end_at: progress at which no other round is opened, as nobody will train it.
    loss_check: None = off.
    resume: a checkpoint that `save` wrote; the model and the place in the round are then as they were.
    parameters: how to read and write the model's parameters, when it is not whole on one device.
    follows_caller: `progress`, the place in the schedule, is the caller's to set; steps and swaps do not move it.

    Slow weights and outer momentum (`OuterState`) are fp32 on the CPU: 8 bytes a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        peer: Swarm,
        *,
        save_every_rounds: int = 10,
        resume: Checkpoint | None = None,
        end_at: float = math.inf,
        loss_check: LossCheck | None = None,
        parameters: FlatParameters | None = None,
        follows_caller: bool = False,
    ) -> None:
        self.spec = peer.spec
        self._peer = peer
        self._exchange = peer.exchange
        self._model = model
        self._state = OuterState(parameters or model, self.spec.outer)
        admission = Admission(self._state, peer.metrics, loss_check, on_change=peer.weights_change)
        self._rounds = Rounds(self.spec, self._exchange, self._state, admission, follows_caller=follows_caller)
        self._save_every_rounds = save_every_rounds
        self._saver = Saver()
        self._checkpoints = Checkpoints(peer.run_folder / "served", keep=1) if save_every_rounds else None
        self._served_round = -1  # which round's start was written last
        self.entered = False  # took the state of a live peer
        self._end_at = end_at
        self._trainable = _trainable(model) if parameters is None else None  # FSDP puts others there at times
        self._exchange.owner = self
        self._enter(resume)

    @property
    def progress(self) -> float:
        """Fraction of the run's schedule; the learning rate follows it."""
        return self._rounds.progress

    @progress.setter
    def progress(self, progress: float) -> None:
        self._rounds.progress = progress

    @property
    def round(self) -> int:
        """Outer steps of this replica, and of those it descends from."""
        return self._rounds.round

    @property
    def inner_steps(self) -> int:
        """Length of the current round."""
        return self._rounds.inner_steps

    @property
    def is_between_rounds(self) -> bool:
        """No inner step was taken since the last outer step: the model equals its slow weights."""
        return self._rounds.steps == 0

    def step(self) -> RoundResult | None:
        """Call after every optimizer step. Returns what a round brought at its end, None in between. Never raises for
        a fault of another peer; blocks at most `outer.max_wait_s`, and only at the end of a round.

        SettingsError: another NoLoCo was made for this peer, or a boundary is polled. ModelError: other parameters are
        trained than at first.
        """
        self._check_step()
        try:
            if not self._take_step():
                return None
            end = self._finish_waiting()
        except BaseException:  # an interrupt, or a loss check that failed: the next step comes to the boundary again
            self._rounds.give_up()
            raise
        return self._ended(end)

    def advance(self) -> bool:
        """As `step`, without waiting. True = the round is at its boundary: `poll` until it gives the result.

        Until then gradients may be computed, with weights that do not change, and no optimizer step may be taken.
        """
        self._check_step()
        return self._take_step()

    def _check_step(self) -> None:
        if self._exchange.owner is not self:
            raise SettingsError(
                "another NoLoCo was made for this peer, which trains one model: put several into one nn.ModuleDict"
            )
        if self._rounds.is_at_boundary:
            raise SettingsError("the round is at its boundary: `poll` until it has ended, and take the next step then")

    def _take_step(self) -> bool:
        if not self._rounds.is_open:
            self._open()
        if not self._rounds.step_taken():
            return False
        self._rounds.reach_boundary()
        return True

    def _finish_waiting(self) -> RoundEnd:
        return self._rounds.finish(self._exchange.collect(self._rounds.wait_left_s))

    def poll(self) -> RoundResult | None:
        """At a boundary: the result of the round once it is over, within `outer.max_wait_s`; None while it is not.

        The model has taken its outer step when there is a result, and the next round is open. Never waits.
        """
        if not self._rounds.is_at_boundary:
            return None
        end = self._rounds.poll()
        return self._ended(end) if end else None

    def closing_round(self, *, wait_s: float) -> RoundResult:
        """A round without inner steps, once training is done: this peer and its partner go to the middle between them.

        After about log2 of the number of peers, and three more, each is nearly where the mean of all is, without any
        of them having to know the others. Blocks at most `wait_s`, most of all for those who still train: the last
        partner is met again only where nobody else is alive. The progress of this peer does not change.
        """
        assert self.is_between_rounds, "inner steps were taken since the last outer step"
        try:
            self._open(patience_s=wait_s, is_closing=True)
            self._rounds.reach_boundary(wait_s=wait_s)
            end = self._finish_waiting()
        except BaseException:
            self._rounds.give_up()
            raise
        return self._count(end, is_closing=True)

    def withdraw(self) -> RoundResult | None:
        """Before a pause: from now on no partner waits for this peer; the next `step` seeks one again.

        A round that has a partner ends here, with fewer inner steps and without the outer gradients: its result is
        returned. Any other goes on after the pause.
        """
        end = self._rounds.withdraw()
        return self._count(end) if end else None

    def save(self, checkpoints: Checkpoints, *, files: dict[str, dict[str, Tensor]], meta: dict[str, Any]) -> Path:
        """Write a checkpoint with the outer state in it, and serve it to newcomers.

        Between two rounds the model equals its slow weights; within a round it is written too. Raises CheckpointError;
        the last good checkpoint is then intact and still served.
        """
        self._saver.wait()  # there is one writer
        files, meta = self._content(files, meta)
        folder = checkpoints.save(self.round, files=files, meta=meta)
        self._serve(folder, meta["outer"])
        return folder

    def save_in_background(
        self,
        checkpoints: Checkpoints,
        *,
        content: Callable[[], tuple[dict[str, dict[str, Tensor]], dict[str, Any]]] = lambda: ({}, {}),
        done: Callable[[Path], None] = lambda folder: None,
    ) -> bool:
        """As `save`, of the state of now, while training goes on; False when the last one is not written yet.

        `content()` gives files and meta; it is not called then. `done` gets the folder, on the thread that wrote it. A
        failure is logged.
        """
        place = self._place()

        def written(folder: Path) -> None:
            self._serve(folder, place)
            done(folder)

        return self._saver.begin(checkpoints, self.round, content=lambda: self._content(*content()), done=written)

    def _place(self) -> dict[str, Any]:
        """Where this peer stands, as JSON values."""
        return {
            "round": self.round,
            "progress": self.progress,
            "steps": self._rounds.steps,
            "inner_steps": self.inner_steps,
            "layout": self._state.layout,
            "tensors": self._state.parameters.model_layout.as_json().decode(),
        }

    def _content(
        self, files: dict[str, dict[str, Tensor]], meta: dict[str, Any]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What a checkpoint holds: the outer state beside what the caller gives."""
        own = outer_files.tensors_of(self._state, self._model, is_within_round=not self.is_between_rounds)
        return {**own, **files}, {**meta, "outer": self._place()}

    # entering

    def _enter(self, resume: Checkpoint | None) -> None:
        target = None if resume else self._peer.run_folder / FETCHED_FILE
        layout = self._state.parameters.model_layout
        manifest = self._peer.enter(layout=layout, target=target)
        if resume:
            self._resume(resume)
        elif manifest and target and self._take_fetched(target):
            self._rounds.restart(round_index=manifest.round, progress=manifest.progress)
            self.entered = True
        elif self._checkpoints and (served := self._checkpoints.newest()):
            log.warning("nobody gives the state of the run: this peer goes on from the one that it served last")
            self._resume(served)
            self._served_round = self.round
        self._peer.metrics.round, self._peer.metrics.progress = self.round, self.progress

    def _catch_up(self) -> None:
        """A peer that stood still, or loaded an old checkpoint, would drag its partners back: it goes where they are.

        The steps of a round that was begun are given up with it. The inner optimizer keeps its moments.
        """
        target = self._peer.run_folder / FETCHED_FILE
        manifest = self._peer.catch_up(progress=self.progress, inner_steps=self.inner_steps, target=target)
        if manifest and self._take_fetched(target):
            self._exchange.forget()
            self._rounds.restart(round_index=manifest.round, progress=manifest.progress)
            self._peer.metrics.round, self._peer.metrics.progress = self.round, self.progress
            self._peer.metrics.catch_ups += 1

    def _take_fetched(self, target: Path) -> bool:
        """False, and told, when what a donor gave is no state: its digests only say that it came as it was sent."""
        self._peer.weights_change()
        try:
            self._state.take(load_file(target))
        except (CheckpointError, SafetensorError) as error:
            log.error("the state of a peer cannot be used: %s; this peer goes on with what it has", error)
            return False
        finally:
            target.unlink()
        return True

    def _resume(self, checkpoint: Checkpoint) -> None:
        place = outer_files.put_back(checkpoint, self._state, self._model)
        self._rounds.restart(round_index=place["round"], progress=place["progress"], steps=place["steps"])
        if "inner_steps" in place:  # older ones are of runs with a fixed length
            self._rounds.length.resume(place["inner_steps"])
        self._serve(checkpoint.path, place)

    def _open(self, *, patience_s: float = 0.0, is_closing: bool = False) -> None:
        if self._trainable is not None and _trainable(self._model) != self._trainable:
            raise ModelError(
                "parameters of the model were replaced, frozen or unfrozen since this NoLoCo was made: "
                "make another one, as it swaps those of then"
            )
        self._catch_up()
        self._rounds.open(patience_s=patience_s, is_closing=is_closing)
        self._peer.metrics.inner_steps = self.inner_steps
        self._write_served()

    def _write_served(self) -> None:
        """Where this NoLoCo writes what newcomers fetch, and it is time for that: once in a round."""
        if not self._checkpoints or self.round == self._served_round or self.round % self._save_every_rounds:
            return
        self._served_round = self.round
        self.save_in_background(self._checkpoints)

    def _serve(self, folder: Path, place: dict[str, Any]) -> None:
        self._peer.serve_state(outer_files.for_newcomers(folder, self._state, place))

    # the end of a round

    def _ended(self, end: RoundEnd) -> RoundResult:
        result = self._count(end)
        if self.progress < self._end_at:
            self._open()  # now, not at the next step: the early part travels while the caller reads its next batch
        return result

    def _count(self, end: RoundEnd, *, is_closing: bool = False) -> RoundResult:
        at_rest = is_closing or self.progress >= self._end_at
        self._peer.sketch(self._state.slow_weights, progress=end.swap_progress, at_rest=at_rest)
        result = RoundResult(end.round, end.outcome, self.progress, end.boundary_s, end.diverged)
        metrics = self._peer.metrics
        metrics.round, metrics.progress = self.round, self.progress
        metrics.rounds_here += 1
        if result.diverged:
            metrics.diverged += 1
            log.error("round %d | own weights were not finite: they go back to the round's start", result.round)
        metrics.blocked_s = result.blocked_s
        metrics.last_outcome = describe_outcome(result.outcome)
        match result.outcome:
            case Swapped():
                metrics.swaps += 1
            case Half():
                metrics.halves += 1
            case Alone(reason, cause):
                metrics.alone += 1
                metrics.count_lonely(cause)
                if cause is LonelyCause.REFUSED_STATE:
                    log.warning("round %d | %s | own weights kept", result.round, reason)
                return result
        received = result.outcome.received
        metrics.swap_hidden_s = max(0.0, received.seconds - result.blocked_s)
        metrics.spread = self._state.spread
        metrics.last_partner = received.partner
        metrics.lateness_s, metrics.transfer_s = received.lateness_s, received.transfer_s
        return result


def _trainable(model: nn.Module) -> list[int]:
    """Which parameters are trained: the tensors themselves, whatever is in them."""
    return [id(param) for param in model.parameters() if param.requires_grad]


def describe_outcome(outcome: Outcome) -> str:
    """The outcome in one phrase for a log line."""
    match outcome:
        case Alone(reason):
            return f"alone: {reason}"
        case Half(received, reason):
            return f"half with {named(received.partner)}: {reason}"
        case Swapped(received):
            return f"swapped with {named(received.partner)}"
