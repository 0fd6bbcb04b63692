"""Add NoLoCo to any training loop.

NoLoCo counts the steps of the inner optimizer, so the loop needs no additional calls. Every `outer.inner_steps` steps,
it takes the outer step (arXiv 2506.10911) in place on the model, with the vectors that one random live peer has sent.
With "auto", it adapts this interval to the peer's link. Between outer steps, slow weights and momentum are swapped in
the background.
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
from noloco_p2p.outer.update_filter import UpdateFilter
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.transfer.donor import SavedState

log = logging.getLogger(__name__)

FETCHED_FILE = "fetched.safetensors"  # holds the state of a live peer until it is loaded


class Membership(Protocol):
    """The network services that the outer step needs in addition to swaps."""

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Announce which model this peer trains.

        If `target` is given, fetch the state of a live peer into that file.
        """
        ...

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead of `progress`.

        `inner_steps` is the length of this peer's rounds. Returns None if this peer is not behind, or if no peer serves
        a newer state.
        """
        ...

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on."""
        ...

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """Report an outer step. If a sketch of these weights is due, compute and publish it in the background.

        `progress` is the progress of the step, which is the same for both partners of a swap. If `at_rest` is true, the
        weights will not be trained any more.
        """
        ...

    def weights_change(self) -> None:
        """Announce that the slow weights are about to change. This invalidates a sketch that is still reading them."""
        ...


class Swarm(Protocol):
    """The interface of a peer that the outer step uses. `noloco_p2p.Peer` implements it."""

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
    """The result of one round. `outcome` says whether this peer swapped, and with whom."""

    round: int  # the round that ended
    outcome: Outcome
    progress: float
    blocked_s: float  # duration of the boundary, during which `step` blocks
    diverged: bool = False  # this peer's weights were non-finite and were reset to those at the start of the round


class NoLoCo:
    """The outer optimizer of one peer.

    The slow weights and the outer momentum are fp32 vectors on the CPU, which take 4 bytes per parameter each. Raises
    ModelError if the optimizers train parameters that do not belong to the model.

    Args:
        model: The model to train. Its trainable parameters form one flat vector, in the order of `named_parameters()`.
            They must all be on one device and can have any floating-point dtype. Frozen parameters are never sent. They
            must be the same on all peers, and peers verify this. Each peer keeps its own buffers, and a checkpoint
            contains the persistent ones.
        optimizer: One optimizer, or several in the order in which they step. A step of the last one is an inner step,
            unless a GradScaler skips it. Batches whose gradients are accumulated therefore count once. If this is None
            or an `InnerState` that is not a torch optimizer, call `step` after each inner step. Checkpoints contain the
            state of all optimizers. After a round with non-finite weights, that state is reset.
        peer: A running `Peer`. It trains the model of the latest NoLoCo that was created for it. If the peer enters a
            swarm that is already training, the model takes over the state of the swarm. Otherwise, training starts from
            the model's own weights. Peers that start at the same time must have equal weights, so set a seed before you
            create the model.
        resume: If True, training resumes from the newest of `checkpoints`, if there is one. This restores the model,
            the inner optimizer and the position in the round. A mapping from `state_dict` restores the outer state and
            the position in the run; the caller loads the model and the inner optimizer. If False, training starts
            afresh.
        save_every_rounds: The number of rounds between two checkpoints, which are also served to newcomers. If 0, the
            caller must call `save`, and newcomers keep their own weights until it does.
        checkpoints: The checkpoints to write and to resume from. If None, the last two are kept in the peer's folder
            for the run.
        meta: A function that is called for each checkpoint. It returns JSON values that the caller needs after a
            restart, such as the state of a scheduler. `resumed.meta` then holds them.
        on_round: A function that is called with the result at the end of each round, within `optimizer.step()` or
            `step()`.
        end_at: The `progress` at which training ends: once it is reached, no new round opens.
        parameters: An object that reads and writes the parameters of a model that is not entirely on one device.
        follows_caller: If True, the caller sets `progress`, the position in the schedule. Steps and swaps do not change
            it.

    Attributes:
        spec: The run spec of the peer.
        entered: Whether the model took over the state of a live peer.
        resumed: The checkpoint from which training resumed, or None.
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
        update_filter = UpdateFilter(self._state, peer.metrics, on_change=peer.membership.weights_change)
        self._rounds = Rounds(self.spec, self._exchange, self._state, update_filter, follows_caller=follows_caller)
        self._save_every_rounds = save_every_rounds
        self._checkpoints = checkpoints or Checkpoints(peer.run_folder / "checkpoints")
        self._meta = meta
        self._saver = Saver()
        self._saved_round = -1  # the round that was last saved at its start
        self._on_round = on_round
        self._end_at = end_at
        self._trainable = _trainable(model) if parameters is None else None  # FSDP temporarily replaces them
        if isinstance(self._exchange.owner, NoLoCo):
            self._exchange.owner.detach()
        self._exchange.owner = self
        self._enter(resume)
        self._hook = self._hooked.register_step_post_hook(self._optimizer_stepped) if self._hooked else None

    def detach(self) -> None:
        """Stop counting the steps of the optimizer, which can still be used. It is safe to call this method twice."""
        if self._hook:
            self._hook.remove()
            self._hook = None

    @property
    def progress(self) -> float:
        """Return the completed fraction of the run's schedule. It determines the learning rate."""
        return self._rounds.progress

    @progress.setter
    def progress(self, progress: float) -> None:
        self._rounds.progress = progress

    def hold_progress(self) -> None:
        """Let the caller set `progress` from now on. Steps and swaps no longer change it."""
        self._rounds.follows_caller = True

    @property
    def round(self) -> int:
        """Return the number of outer steps of this replica, including the steps behind any state that it took over."""
        return self._rounds.round

    @property
    def inner_steps(self) -> int:
        """Return the length of the current round in inner steps."""
        return self._rounds.inner_steps

    @property
    def is_between_rounds(self) -> bool:
        """Return whether no inner step has been taken since the last outer step.

        If so, the model equals its slow weights.
        """
        return self._rounds.steps == 0

    @property
    def num_steps(self) -> int:
        """Return the number of inner steps on this machine, including the steps before a restart.

        This is also the position in this peer's own data.
        """
        return self._peer.metrics.step

    def step(self) -> RoundResult | None:
        """Count an inner step.

        Call this after every inner step, unless NoLoCo counts the steps of the optimizer itself. Returns the result at
        the end of a round, and None otherwise. This call blocks only at the end of a round, for at most
        `outer.max_wait_s`. It never raises an error because of another peer. It raises SettingsError if another NoLoCo
        was created for this peer, if a boundary is being polled, or if NoLoCo counts the optimizer's steps itself. It
        raises ModelError if the set of trainable parameters has changed.
        """
        self._check_is_callers()
        return self._close_step()

    def _optimizer_stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Handle a step of the last optimizer, before the caller sees the new weights."""
        # After `with Peer.join(...)` has ended, a script may continue to train on its own.
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
        except BaseException:  # after an interrupt or a failed loss check, the next step reaches the boundary again
            self._rounds.give_up()
            raise
        return self._ended(end)

    def advance(self) -> bool:
        """Count an inner step as `step` does, but without waiting.

        Returns True at the boundary. In that case, call `poll` until it returns the result. Until then, the weights do
        not change, so gradients may be computed, but the optimizer must not take a step.
        """
        self._check_is_callers()
        self._check_step()
        return self._take_step()

    def reach_boundary(self) -> None:
        """End the round before its last inner step. Afterwards, call `poll` until it returns the result."""
        self._check_is_callers()
        self._check_step()
        self._rounds.reach_boundary()

    def _check_is_callers(self) -> None:
        if self._hook:
            raise SettingsError(
                "NoLoCo already counts the steps of its optimizer: remove this call, or pass None as the optimizer"
            )

    def _check_step(self) -> None:
        if self._exchange.owner is not self:
            raise SettingsError(
                "another NoLoCo was created for this peer, but a peer can train only one model: "
                "to train several models, put them into one nn.ModuleDict"
            )
        if self._rounds.is_at_boundary:
            raise SettingsError(
                "the round is at its boundary: before the next step, call `poll` until the round has ended"
            )

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
        """Return the result of the round if it is over, or None if it is not. This call never waits.

        The round ends at most `outer.max_wait_s` after the boundary. When this call returns a result, the outer step
        has been taken and the next round is open.
        """
        if not self._rounds.is_at_boundary:
            return None
        end = self._rounds.poll()
        return self._ended(end) if end else None

    def closing_round(self, *, wait_s: float) -> RoundResult:
        """After training, run a round without inner steps. Both partners move to their midpoint.

        After about log2(N) + 3 of these rounds with N peers, each peer is close to the mean of all peers, even if it
        has met only some of them. This call blocks for at most `wait_s`, mainly to wait for peers that are still
        training. The last partner is chosen again only if no other peer is alive. The progress of this peer does not
        change.
        """
        assert self.is_between_rounds, "inner steps have been taken since the last outer step"
        try:
            self._open(patience_s=wait_s, is_closing=True)
            self._rounds.reach_boundary(wait_s=wait_s)
            end = self._finish_waiting()
        except BaseException:
            self._rounds.give_up()
            raise
        return self._count(end, is_closing=True)

    def withdraw(self) -> RoundResult | None:
        """Prepare for a pause. No partner waits for this peer any more, and the next `step` starts matchmaking again.

        A round with a partner ends here, with fewer inner steps and without the outer gradients, and its result is
        returned. Any other round continues after the pause, and None is returned.
        """
        end = self._rounds.withdraw()
        return self._count(end) if end else None

    def save(self) -> Path:
        """Write a checkpoint, serve it to newcomers, and return its folder.

        The checkpoint contains the outer state, the state of the inner optimizer, the values of `meta` and, within a
        round, the model's weights. Raises CheckpointError if writing fails; in that case, the last good checkpoint
        remains intact.
        """
        self._saver.wait()  # only one checkpoint can be written at a time
        files, meta = self._content()
        folder = self._checkpoints.save(self.round, files=files, meta=meta)
        self._serve(folder, meta["outer"])
        return folder

    def save_in_background(self, *, done: Callable[[Path], None] | None = None) -> bool:
        """Save the current state as `save` does, while training continues. Return False if the last save is unfinished.

        `done` is called with the folder, on the thread that wrote the checkpoint. A failure is logged.
        """
        position = self._position()

        def written(folder: Path) -> None:
            self._serve(folder, position)
            if done:
                done(folder)

        return self._saver.begin(self._checkpoints, self.round, content=self._content, done=written)

    def state_dict(self) -> dict[str, Any]:
        """Return the slow weights, the outer momentum and the position in the run, for the caller's own checkpoint.

        The vectors are not copied. The model and the inner optimizer are not included.
        """
        return {**self._state.tensors(), "place": self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict` before the first step. The caller loads the model and the inner optimizer.

        Raises CheckpointError if the state belongs to another model, and SettingsError if a round is open.
        """
        if self._rounds.is_open or self._rounds.is_at_boundary:
            raise SettingsError("a round is already open: load the state before the first step, or pass it as `resume`")
        if "place" not in state:
            raise CheckpointError("this state_dict contains no position in a run, so it was not created by NoLoCo")
        saved_state.check_layout(state["place"], self._state.parameters.model_layout, origin="this state_dict")
        self._peer.membership.weights_change()
        self._state.take_vectors(state)
        self._go_on_from(state["place"])

    def _position(self) -> dict[str, Any]:
        """Return this peer's position in the run as JSON values."""
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
        """Return the files and the metadata of a checkpoint."""
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
        """Take over the swarm's state if this peer is far behind, because it would otherwise drag its partners back.

        If a round has begun, its steps are discarded. The inner optimizer keeps its moments.
        """
        target = self._peer.run_folder / FETCHED_FILE
        manifest = self._peer.membership.catch_up(progress=self.progress, inner_steps=self.inner_steps, target=target)
        if manifest and self._take_fetched(target):
            self._exchange.forget()
            self._rounds.restart(round_index=manifest.round, progress=manifest.progress)
            self._peer.metrics.round, self._peer.metrics.progress = self.round, self.progress
            self._peer.metrics.catch_ups += 1

    def _take_fetched(self, target: Path) -> bool:
        """Load a fetched state. If the file is not a valid state, log an error and return False.

        A donor's digests prove only that the file arrived intact.
        """
        self._peer.membership.weights_change()
        try:
            self._state.take(load_file(target))
        except (CheckpointError, SafetensorError) as error:
            log.error("cannot use the fetched state: %s; this peer continues with its own state", error)
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
        self._rounds.length.resume(position["inner_steps"])
        self._peer.metrics.step = position["num_steps"]

    def _open(self, *, patience_s: float = 0.0, is_closing: bool = False) -> None:
        if self._trainable is not None and _trainable(self._model) != self._trainable:
            raise ModelError(
                "parameters of the model were replaced, frozen or unfrozen after this NoLoCo was created: "
                "create a new NoLoCo, because this one would swap the old parameters"
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
            self._open()  # open now, so that the early part is sent while the caller reads its next batch
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
            log.error(
                "round %d | this peer's weights were non-finite; restored the weights from the start of the round",
                result.round,
            )
            if self._inner:
                self._inner.restore({})  # its moments are non-finite as well
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
                    log.warning("round %d | %s | this peer's own weights are kept", result.round, reason)
                return result
        received = result.outcome.received
        metrics.swap_hidden_s = max(0.0, received.seconds - result.blocked_s)
        metrics.spread = self._state.spread
        metrics.last_partner = received.partner
        metrics.lateness_s, metrics.transfer_s = received.lateness_s, received.transfer_s
        return result


def _trainable(model: nn.Module) -> list[int]:
    """Return the identities of the trainable parameters, regardless of their values."""
    return [id(param) for param in model.parameters() if param.requires_grad]


def describe_outcome(outcome: Outcome) -> str:
    """Describe an outcome in one phrase for a log line."""
    match outcome:
        case Alone(reason):
            return f"solo: {reason}"
        case Half(received, reason):
            return f"half with {named(received.partner)}: {reason}"
        case Swapped(received):
            return f"swapped with {named(received.partner)}"
