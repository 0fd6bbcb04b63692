"""NoLoCo in any training loop: it counts the steps of the inner optimizer, and needs no other call.

Every `outer.inner_steps` steps, or with "auto" as often as this peer's link allows, it takes the outer step
(arXiv 2506.10911) with what one random live peer has sent, in place on the model. In between, the swap of slow weights
and momentum runs in the background.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.gossip.exchange import ThreadedExchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Alone, Half, LonelyCause, Outcome, Swapped
from noloco_p2p.optim.gates import gate_limits
from noloco_p2p.outer import saved_state
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.optimizer_state import InnerState, inner_state, is_skipped
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.outer.rounds import RoundEnd, Rounds
from noloco_p2p.outer.saver import Saver
from noloco_p2p.outer.update_filter import LossCheck, UpdateFilter
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.transfer.donor import SavedState

log = logging.getLogger(__name__)

FETCHED_FILE = "fetched.safetensors"  # holds the state of a live peer until it is loaded


class Membership(Protocol):
    """What the outer step needs from the network besides swaps."""

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Announce which model trains here; with `target`, fetch the state of a live peer into that file."""
        ...

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into that file if most of the swarm is far ahead of `progress`.

        inner_steps: length of this peer's rounds. Returns None if it is not behind, or no peer serves a newer state.
        """
        ...

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on."""
        ...

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """Note an outer step: if a sketch of these weights is due, make it in the background and publish it.

        progress: of the step, the same for both partners of a swap. at_rest: the weights will not be trained any more.
        """
        ...

    def weights_change(self) -> None:
        """The slow weights are about to change: a sketch that is still reading them becomes useless."""
        ...


class Swarm(Protocol):
    """What the outer step needs of a peer; `noloco_p2p.Peer` implements it."""

    @property
    def spec(self) -> Spec: ...

    @property
    def exchange(self) -> ThreadedExchange: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def run_folder(self) -> Path: ...

    @property
    def metrics(self) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one round. `outcome` says with whom this peer swapped."""

    round: int  # the round that ended
    outcome: Outcome
    progress: float
    blocked_s: float  # duration of the boundary; `step` waits for it
    diverged: bool = False  # this peer's weights were not finite, and were reset to the start of the round


class NoLoCo:
    """The outer optimizer of one peer.

    The slow weights and the outer momentum are fp32 on the CPU: 4 bytes per parameter for each. Raises ModelError when
    the optimizers train parameters that do not belong to the model.

    Args:
        model: Its trainable parameters form one flat vector, in the order of `named_parameters()`. They are on one
            device, and have any floating dtype. Frozen parameters never travel and must be the same on all peers, which
            compare their content. Each peer keeps its own buffers; a checkpoint holds the persistent ones.
        optimizer: One optimizer, or several in the order in which they step. A step of the last one is an inner step,
            unless a GradScaler skipped it: batches whose gradients are accumulated count once. With None, or an
            `InnerState` that is no torch optimizer, call `step` after each inner step. Checkpoints keep the state of
            all optimizers, and a round whose weights are not finite resets it.
        peer: A running `Peer`. It trains the model of the last NoLoCo that was made for it. When the peer enters a
            swarm that is already training, the model takes the state of the swarm. Otherwise training starts from the
            model's own weights. Peers that start at the same time must have equal weights: seed the model.
        resume: True resumes from the newest of `checkpoints`, if there is one: the model, the inner optimizer and the
            position in the round. A mapping from `state_dict` restores the outer state and the position in the run;
            the caller loads the model and the inner optimizer. False starts afresh.
        save_every_rounds: Rounds between two checkpoints, which are also served to newcomers. With 0 the caller calls
            `save`; newcomers keep their own weights until then.
        checkpoints: None keeps the last two, in the peer's folder of the run.
        meta: Called for each checkpoint. It returns JSON values of the caller, such as the state of a scheduler, which
            `resumed.meta` holds after a restart.
        on_round: Called with the result at the end of each round, within `optimizer.step()` or `step()`.
        end_at: No round opens at or above this `progress`.
        loss_check: Undoes swaps that raise the loss; None turns it off.
        parameters: Reads and writes the parameters of a model that is not on one device as a whole.
        follows_caller: True leaves `progress`, the position in the schedule, to the caller: steps and swaps do not
            change it.

    Attributes:
        spec: The run spec of the peer.
        entered: Whether the model took the state of a live peer.
        resumed: The checkpoint that it resumed from, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | InnerState | None,
        peer: Swarm,
        *,
        resume: bool | Mapping[str, Any] = True,
        save_every_rounds: int = 10,
        checkpoints: Checkpoints | None = None,
        meta: Callable[[], Mapping[str, Any]] = dict,
        on_round: Callable[[RoundResult], None] | None = None,
        end_at: float = math.inf,
        loss_check: LossCheck | None = None,
        parameters: FlatParameters | None = None,
        follows_caller: bool = False,
    ) -> None:
        self.spec = peer.spec
        self.entered = False
        self.resumed: Checkpoint | None = None
        self._peer = peer
        self._exchange = peer.exchange
        self._model = model
        self._inner, self._hooked = inner_state(optimizer, model)
        self._state = OuterState(parameters or model, self.spec.outer, limits=gate_limits(self.spec.codec))
        update_filter = UpdateFilter(self._state, peer.metrics, loss_check, on_change=peer.membership.weights_change)
        self._rounds = Rounds(self.spec, self._exchange, self._state, update_filter, follows_caller=follows_caller)
        self._save_every_rounds = save_every_rounds
        self._checkpoints = checkpoints or Checkpoints(peer.run_folder / "checkpoints")
        self._meta = meta
        self._saver = Saver()
        self._saved_round = -1  # the round whose start was written last
        self._on_round = on_round
        self._end_at = end_at
        self._trainable = _trainable(model) if parameters is None else None  # FSDP temporarily replaces them
        if isinstance(self._exchange.owner, NoLoCo):
            self._exchange.owner.detach()
        self._exchange.owner = self
        self._enter(resume)
        self._hook = self._hooked.register_step_post_hook(self._optimizer_stepped) if self._hooked else None

    def detach(self) -> None:
        """Stop counting the steps of the optimizer, which continues on its own. Safe to call twice."""
        if self._hook:
            self._hook.remove()
            self._hook = None

    @property
    def progress(self) -> float:
        """The fraction of the run's schedule that is done; the learning rate follows it."""
        return self._rounds.progress

    @progress.setter
    def progress(self, progress: float) -> None:
        self._rounds.progress = progress

    def hold_progress(self) -> None:
        """From now on the caller sets `progress`: steps and swaps do not change it."""
        self._rounds.follows_caller = True

    @property
    def round(self) -> int:
        """The number of outer steps of this replica, including those before the state that it took over."""
        return self._rounds.round

    @property
    def inner_steps(self) -> int:
        """The length of the current round."""
        return self._rounds.inner_steps

    @property
    def is_between_rounds(self) -> bool:
        """Whether no inner step was taken since the last outer step: the model then equals its slow weights."""
        return self._rounds.steps == 0

    @property
    def num_steps(self) -> int:
        """The number of inner steps on this machine, including those before a restart: the position in its own data."""
        return self._peer.metrics.step

    def step(self) -> RoundResult | None:
        """Call after every inner step, unless the steps of the optimizer are counted.

        Returns the result at the end of a round, and None in between. Never raises for a fault of another peer. Blocks
        at most `outer.max_wait_s`, and only at the end of a round. Raises SettingsError when another NoLoCo was made
        for this peer, when a boundary is being polled, or when the optimizer's steps are counted, and ModelError when
        the trainable parameters have changed.
        """
        self._check_is_callers()
        return self._close_step()

    def _optimizer_stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Run after a step of the last optimizer, before the caller sees the new weights."""
        # after the end of `with Peer.join(...)`, a script may continue to train on its own
        if self._exchange.is_closed:
            self.detach()
        elif not is_skipped(optimizer):
            self._close_step()

    def _close_step(self) -> RoundResult | None:
        self._check_step()
        try:
            if not self._take_step():
                return None
            end = self._finish_waiting()
        except BaseException:  # an interrupt, or a failed loss check: the next step reaches the boundary again
            self._rounds.give_up()
            raise
        return self._ended(end)

    def advance(self) -> bool:
        """As `step`, without waiting. Returns True at the boundary: then call `poll` until it returns the result.

        Until then gradients may be computed, since the weights do not change, but no optimizer step may be taken.
        """
        self._check_is_callers()
        self._check_step()
        return self._take_step()

    def reach_boundary(self) -> None:
        """End the round before its last inner step; then call `poll` until it returns the result."""
        self._check_is_callers()
        self._check_step()
        self._rounds.reach_boundary()

    def _check_is_callers(self) -> None:
        if self._hook:
            raise SettingsError(
                "NoLoCo counts the steps of its optimizer itself: remove this call, or pass None as the optimizer"
            )

    def _check_step(self) -> None:
        if self._exchange.owner is not self:
            raise SettingsError(
                "another NoLoCo was made for this peer, which trains one model: put several into one nn.ModuleDict"
            )
        if self._rounds.is_at_boundary:
            raise SettingsError("the round is at its boundary: call `poll` until it has ended before the next step")

    def _take_step(self) -> bool:
        self._peer.metrics.step += 1
        if not self._rounds.is_open:
            self._open()
        if not self._rounds.step_taken():
            return False
        self._rounds.reach_boundary()
        return True

    def _finish_waiting(self) -> RoundEnd:
        return self._rounds.finish(self._exchange.collect(self._rounds.wait_left_s))

    def poll(self) -> RoundResult | None:
        """Return the result of the round once it is over, within `outer.max_wait_s` of the boundary; None until then.

        When it returns a result, the outer step is done and the next round is open. Never waits.
        """
        if not self._rounds.is_at_boundary:
            return None
        end = self._rounds.poll()
        return self._ended(end) if end else None

    def closing_round(self, *, wait_s: float) -> RoundResult:
        """Run a round without inner steps, after training: both partners move to the midpoint between them.

        After log2 of the number of peers plus about three rounds, each peer is close to the mean of all, without
        knowing the others. Blocks at most `wait_s`, mainly for peers that still train. The last partner is met again
        only if no other peer is alive. The progress of this peer does not change.
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
        """Prepare for a pause: no partner waits for this peer any more; the next `step` starts matchmaking again.

        A round with a partner ends here, with fewer inner steps and without the outer gradients, and its result is
        returned. Any other round continues after the pause.
        """
        end = self._rounds.withdraw()
        return self._count(end) if end else None

    def save(self) -> Path:
        """Write a checkpoint, and serve it to newcomers. Raises CheckpointError; the last good one is then intact.

        A checkpoint holds the outer state, the state of the inner optimizer, the values of `meta`, and within a round
        the model's weights.
        """
        self._saver.wait()  # there is only one writer
        files, meta = self._content()
        folder = self._checkpoints.save(self.round, files=files, meta=meta)
        self._serve(folder, meta["outer"])
        return folder

    def save_in_background(self, *, done: Callable[[Path], None] | None = None) -> bool:
        """Like `save`, for the current state, while training continues. Returns False while the last one is unfinished.

        `done` is called with the folder, on the thread that wrote it. A failure is logged.
        """
        position = self._position()

        def written(folder: Path) -> None:
            self._serve(folder, position)
            if done:
                done(folder)

        return self._saver.begin(self._checkpoints, self.round, content=self._content, done=written)

    def state_dict(self) -> dict[str, Any]:
        """Return slow weights and outer momentum (not copied), and the position in the run, for a checkpoint of the
        caller.

        The model and the inner optimizer are not part of it.
        """
        return {**self._state.tensors(), "place": self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, before the first step. The caller loads the model and the inner optimizer.

        Raises CheckpointError when the state belongs to another model.
        """
        if self._rounds.is_open or self._rounds.is_at_boundary:
            raise SettingsError("a round is open: load the state before the first step, or pass it as `resume`")
        if "place" not in state:
            raise CheckpointError("this state_dict has no position in a run: it is not from a NoLoCo")
        saved_state.check_layout(state["place"], self._state.parameters.model_layout, origin="this state_dict")
        self._peer.membership.weights_change()
        self._state.take_vectors(state)
        self._go_on_from(state["place"])

    def _position(self) -> dict[str, Any]:
        """The position of this peer in the run, as JSON values."""
        return {
            "round": self.round,
            "progress": self.progress,
            "steps": self._rounds.steps,
            "inner_steps": self.inner_steps,
            "num_steps": self.num_steps,
            "layout": self._state.layout,
            "tensors": self._state.parameters.model_layout.as_json().decode(),
        }

    def _content(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return the files and the meta of a checkpoint."""
        files = saved_state.tensors_of(self._state, self._model, is_within_round=not self.is_between_rounds)
        if self._inner:
            files[saved_state.INNER_FILE] = self._inner.state()
        return files, {**self._meta(), "outer": self._position()}

    # entering

    def _enter(self, resume: bool | Mapping[str, Any]) -> None:
        self.resumed = self._checkpoints.newest() if resume is True else None
        target = self._peer.run_folder / FETCHED_FILE if self.resumed is None and isinstance(resume, bool) else None
        manifest = self._peer.membership.enter(layout=self._state.parameters.model_layout, target=target)
        if self.resumed:
            self._resume(self.resumed)
        elif not isinstance(resume, bool):
            self.load_state_dict(resume)
        elif manifest and target and self._take_fetched(target):
            self._rounds.restart(round_index=manifest.round, progress=manifest.progress)
            self.entered = True
        self._peer.metrics.round, self._peer.metrics.progress = self.round, self.progress

    def _catch_up(self) -> None:
        """Take the swarm's state if this peer is far behind, since its partners would be dragged back.

        The steps of a round that was begun are discarded with it. The inner optimizer keeps its moments.
        """
        target = self._peer.run_folder / FETCHED_FILE
        manifest = self._peer.membership.catch_up(progress=self.progress, inner_steps=self.inner_steps, target=target)
        if manifest and self._take_fetched(target):
            self._exchange.forget()
            self._rounds.restart(round_index=manifest.round, progress=manifest.progress)
            self._peer.metrics.round, self._peer.metrics.progress = self.round, self.progress
            self._peer.metrics.catch_ups += 1

    def _take_fetched(self, target: Path) -> bool:
        """Load a fetched state. Return False and log an error if the file is not a valid state.

        The digests of a donor only prove that the file arrived intact.
        """
        self._peer.membership.weights_change()
        try:
            self._state.take(load_file(target))
        except (CheckpointError, SafetensorError) as error:
            log.error("the state of a peer cannot be used: %s; this peer continues with its own", error)
            return False
        finally:
            target.unlink()
        return True

    def _resume(self, checkpoint: Checkpoint) -> None:
        position = saved_state.put_back(checkpoint, self._state, self._model)
        if self._inner and checkpoint.has(saved_state.INNER_FILE):
            self._inner.restore(checkpoint.load(saved_state.INNER_FILE))
        self._go_on_from(position)
        self._serve(checkpoint.path, position)
        self._saved_round = self.round
        log.info("resumed from %s: round %d, %d steps", checkpoint.path, self.round, self.num_steps)

    def _go_on_from(self, position: Mapping[str, Any]) -> None:
        self._rounds.restart(round_index=position["round"], progress=position["progress"], steps=position["steps"])
        if "inner_steps" in position:  # older ones belong to runs with a fixed length
            self._rounds.length.resume(position["inner_steps"])
        self._peer.metrics.step = position.get("num_steps", 0)

    def _open(self, *, patience_s: float = 0.0, is_closing: bool = False) -> None:
        if self._trainable is not None and _trainable(self._model) != self._trainable:
            raise ModelError(
                "parameters of the model were replaced, frozen or unfrozen after this NoLoCo was made: "
                "make a new one, because this one would swap the old parameters"
            )
        self._catch_up()
        self._rounds.open(patience_s=patience_s, is_closing=is_closing)
        self._peer.metrics.inner_steps = self.inner_steps
        self._save_if_due()

    def _save_if_due(self) -> None:
        """Save at most once per round, because a round may be opened again after a pause."""
        every = self._save_every_rounds
        if every and self.round != self._saved_round and self.round % every == 0:
            self._saved_round = self.round
            self.save_in_background()

    def _serve(self, folder: Path, position: dict[str, Any]) -> None:
        self._peer.membership.serve_state(saved_state.for_newcomers(folder, self._state, position))

    # the end of a round

    def _ended(self, end: RoundEnd) -> RoundResult:
        result = self._count(end)
        if self.progress < self._end_at:
            self._open()  # now, not at the next step: the early part travels while the caller reads its next batch
        if self._on_round:
            self._on_round(result)
        return result

    def _count(self, end: RoundEnd, *, is_closing: bool = False) -> RoundResult:
        at_rest = is_closing or self.progress >= self._end_at
        self._peer.membership.sketch(self._state.slow_weights, progress=end.swap_progress, at_rest=at_rest)
        result = RoundResult(end.round, end.outcome, self.progress, end.boundary_s, end.diverged)
        metrics = self._peer.metrics
        metrics.round, metrics.progress = self.round, self.progress
        metrics.rounds_here += 1
        if result.diverged:
            metrics.diverged += 1
            log.error("round %d | own weights were not finite: they are reset to the round's start", result.round)
            if self._inner:
                self._inner.restore({})  # its moments are not finite either
        metrics.blocked_s = result.blocked_s
        metrics.last_outcome = describe_outcome(result.outcome)
        match result.outcome:
            case Swapped():
                metrics.swaps += 1
            case Half():
                metrics.halves += 1
            case Alone(reason, cause):
                metrics.alone += 1
                metrics.count_solo(cause)
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
    """The identities of the trainable parameters, whatever their values are."""
    return [id(param) for param in model.parameters() if param.requires_grad]


def describe_outcome(outcome: Outcome) -> str:
    """Describe an outcome in one phrase for a log line."""
    match outcome:
        case Alone(reason):
            return f"alone: {reason}"
        case Half(received, reason):
            return f"half with {named(received.partner)}: {reason}"
        case Swapped(received):
            return f"swapped with {named(received.partner)}"
