"""Add NoLoCo to any training loop.

NoLoCo counts the steps of the inner optimizer, so the loop needs no additional calls. In the background, this peer
swaps one slice of its weights after another with random live peers. What arrives is added to the weights between two
inner steps, so training never waits. With `outer.wait`, training waits after every `outer.inner_steps` for a swap of
all weights, and takes the outer step of the NoLoCo paper (arXiv 2506.10911).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError, NolocoError, SettingsError
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer import saved_state
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints, Saver, Vector, copied
from noloco_p2p.outer.flat import FlatParameters, check_values
from noloco_p2p.outer.mixing import Closing, Mixing, Swapped
from noloco_p2p.outer.optimizer_state import InnerState, TorchOptimizers, inner_state, is_skipped
from noloco_p2p.outer.plain_values import packed
from noloco_p2p.outer.weights import WEIGHTS, Weights
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.console import duration
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.transfer.donor import SavedState, describe_state

log = logging.getLogger(__name__)

FETCHED_FILE = "fetched.safetensors"  # holds the state of a live peer until it is loaded
LOOK_S = 1.0  # shortest time between two looks at anything but swaps
CLOSING_WAIT_S = 30.0  # for the next closing swap
CLOSING_WAIT_STEPS = 20  # the same in inner steps, if that is longer
MOST_RECOVERIES, RECOVERIES_S = 5, 3600.0  # from weights that are not finite; after more of them, training ends


class Membership(Protocol):
    """The network services that the outer step needs."""

    def enter(
        self, *, layout: ModelLayout, target: Path | None, loss_of: Callable[[Path | None], float] | None = None
    ) -> StateManifest | None:
        """Announce which model this peer trains.

        If `target` is given, fetch the state of a live peer into that file. `loss_of` returns the loss of the state in
        a file on this peer's own data, so that a state that is much worse than those of the others is refused.
        """
        ...

    def begin_swaps(self, num_elements: int, *, progress: float) -> Exchange:
        """Begin to swap a vector of this size at this position in the run, and end the swaps of the vector before."""
        ...

    def hold_swaps(self) -> None:
        """Begin no swap until the peer announces that it is training, and let the running swaps end."""
        ...

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead of `progress`.

        Returns None if this peer is not behind, or if no peer serves a newer state.
        """
        ...

    def rescue(self, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` because this peer has lost its own. It may return None."""
        ...

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on."""
        ...

    def take_state_wanted(self) -> bool:
        """Return once whether a newcomer needs a newer state than the one that is served."""
        ...


class Swarm(Protocol):
    """The interface of a peer that the outer step uses. `noloco_p2p.Peer` implements it."""

    @property
    def spec(self) -> Spec: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def run_folder(self) -> Path: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def leave_requested(self) -> threading.Event: ...

    def count_traffic(self) -> None:
        """Update what `metrics` says about swaps."""
        ...

    def restore_metrics(self, values: Mapping[str, Any]) -> None:
        """Continue the metrics from those in a checkpoint."""
        ...


class NoLoCo:
    """The outer optimizer of one peer.

    Without an outer step, it needs no memory beyond a few slices of the weights. With one, it keeps the slow weights
    and the outer momentum as fp32 vectors on the CPU. Raises ModelError if the optimizers train parameters that do not
    belong to the model.

    Args:
        model: The model to train. Its trainable parameters form one flat vector, in the order of `named_parameters()`.
            They must all be on one device and can have any floating-point dtype. Frozen parameters are never sent. They
            must be the same on all peers, and peers verify this. Each peer keeps its own buffers, and a checkpoint
            contains the persistent ones.
        optimizer: One optimizer, or several in the order in which they step. A step of the last one is an inner step,
            unless a GradScaler skips it. Batches whose gradients are accumulated therefore count once. If this is None
            or an `InnerState` that is not a torch optimizer, call `step` after each inner step. Checkpoints contain the
            state of all optimizers.
        peer: A running `Peer`. It trains the model of the latest NoLoCo that was created for it. If the peer enters a
            swarm that is already training, the model takes over the state of the swarm. Otherwise, training starts from
            the model's own weights. Peers that start at the same time must have equal weights, so set a seed before you
            create the model.
        resume: If True, training resumes from the newest of `checkpoints`, if there is one. This restores the model,
            the inner optimizer and the position in the run. A mapping from `state_dict` restores the outer state and
            the position in the run; the caller loads the model and the inner optimizer. If False, training starts
            afresh.
        save_every_s: The time between two checkpoints, which are also served to newcomers, in seconds. The first one
            contains the first inner step. Another one is written if a newcomer needs a newer state. A checkpoint is
            taken when the next inner step begins, so after a scheduler's step. If 0, the caller must call `save`, and
            newcomers wait until it does.
        checkpoints: The checkpoints to write and to resume from. If None, the last two are kept in the peer's folder
            for the run.
        meta: A function that is called for each checkpoint. It returns a dictionary of plain values that the caller
            needs after a restart, such as the state of a scheduler. `resumed.meta` then holds equal values. Raises
            SettingsError for values that a checkpoint cannot hold.
        loss: A function that returns the loss of the model on a batch of this peer's own data. A newcomer, or a peer
            that fetches a state later, calls it with that state in the model, on another thread. If the loss is more
            than 0.5 nats above the median of the losses that other peers announce, it asks the next donor. If this is
            None, a fetched state is not checked in this way.
        on_swap: A function that is called for each swap that has been applied, within `optimizer.step()` or `step()`.
        parameters: An object that reads and writes the parameters of a model that is not entirely on one device.
        follows_caller: If True, the caller sets `progress`, the position in the schedule. Steps and swaps do not change
            it.

    Attributes:
        spec: The run spec of the peer.
        weights: The vectors of this replica. Hold `weights.lock` while you change parameters outside an optimizer.
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
        save_every_s: float = 600.0,
        checkpoints: Checkpoints | None = None,
        meta: Callable[[], Mapping[str, Any]] = dict,
        loss: Callable[[], float] | None = None,
        on_swap: Callable[[Swapped], None] = lambda swap: None,
        parameters: FlatParameters | None = None,
        follows_caller: bool = False,
    ) -> None:
        for name, function in (("meta", meta), ("on_swap", on_swap), *([("loss", loss)] if loss is not None else [])):
            if not callable(function):
                raise SettingsError(f"{name} must be a function, but it is a {type(function).__name__}")
        if not isinstance(save_every_s, int | float) or not save_every_s >= 0:
            raise SettingsError(f"save_every_s must be a number of seconds of at least 0, but it is {save_every_s!r}")
        self.spec = peer.spec
        self.entered = False
        self.resumed: Checkpoint | None = None
        check_values(model)
        self.weights = Weights(parameters or FlatParameters(model), self.spec.outer)
        self._peer = peer
        self._model = model
        self._inner, hooked = inner_state(optimizer, model)
        self._save_every_s = save_every_s
        self._checkpoints = checkpoints or Checkpoints(peer.run_folder / "checkpoints")
        self._user_meta = meta
        self._loss = loss
        self._on_swap = on_swap
        self._saver = Saver()
        self._saved_at_s = -math.inf
        self._recovered_s: deque[float] = deque()
        self._looked_at_s = -math.inf
        self._trainable = _trainable(model) if parameters is None else None  # FSDP temporarily replaces them
        self._place: Mapping[str, Any] = {"progress": 0.0, "steps": 0}
        with contextlib.suppress(NameError):  # it may use what the script has not made yet
            packed(self._meta(), "meta")
        self._enter(resume)
        self._is_locked = self._is_save_due = False
        self._exchange = self._begin_swaps(self._place["progress"])
        self._mixing = Mixing(
            self.spec,
            self.weights,
            self._exchange,
            peer.metrics,
            clock=time.monotonic,
            cpu_clock=time.thread_time,
            follows_caller=follows_caller,
        )
        self._mixing.restart(progress=self._place["progress"], steps=self._place["steps"])
        if not hooked and hasattr(self._inner, "weights_lock"):
            setattr(self._inner, "weights_lock", self.weights.lock)  # noqa: B010 - not part of the protocol
        self._hooks = [hook for each in hooked for hook in self._hook(each, is_last=each is hooked[-1])]

    def _hook(self, optimizer: Optimizer, *, is_last: bool) -> list[Any]:
        ended = self._optimizer_stepped if is_last else self._unlock
        return [optimizer.register_step_pre_hook(self._lock), optimizer.register_step_post_hook(ended)]

    def detach(self) -> None:
        """Stop counting the steps of the optimizer, which can still be used. It is safe to call this method twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unlock()

    @property
    def progress(self) -> float:
        """Return the completed fraction of the run's schedule. It determines the learning rate."""
        return self._mixing.progress

    @progress.setter
    def progress(self, progress: float) -> None:
        if math.isnan(number := float(progress)):
            raise SettingsError("the position in the schedule is a number from 0 to 1, so it cannot be NaN")
        self._mixing.progress = min(1.0, max(0.0, number))

    def hold_progress(self) -> None:
        """Let the caller set `progress` from now on. Steps and swaps no longer change it."""
        self._mixing.follows_caller = True

    @property
    def num_steps(self) -> int:
        """Return the number of inner steps on this machine, including the steps before a restart.

        This is also the position in this peer's own data.
        """
        return self._peer.metrics.step

    def step(self) -> list[Swapped]:
        """Count an inner step, and add the half-differences that have arrived to the weights. Return their swaps.

        Call this after every inner step, unless NoLoCo counts the steps of the optimizer itself. It never raises an
        error because of another peer. With `outer.wait`, it blocks after every `outer.inner_steps` for at most
        `outer.max_wait_s`. It raises SettingsError if another NoLoCo was created for this peer, or if NoLoCo counts the
        optimizer's steps itself. It raises ModelError if the set of trainable parameters has changed, or if the weights
        are not finite and there is no state to return to.
        """
        if self._hooks:
            raise SettingsError(
                "NoLoCo already counts the steps of its optimizer: remove this call, or pass None as the optimizer"
            )
        return self._step()

    def _lock(self, *optimizer_step: object) -> None:
        """Lock the weights before an optimizer changes them.

        After a step that failed, they stay locked until the next step or the end of the peer. A thread that waited
        longer to copy them would keep the process alive.

        A checkpoint that is due is taken here, because schedulers have followed the last inner step by now.
        """
        if self._is_save_due:
            self._is_save_due = False
            self.save_in_background()
        if not self._is_locked:
            self.weights.lock.acquire()
            self._is_locked = True

    def _unlock(self, *optimizer_step: object) -> None:
        if self._is_locked:
            self._is_locked = False
            self.weights.lock.release()

    def _optimizer_stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Handle a step of the last optimizer, before the caller sees the new weights."""
        self._unlock()
        # A script may train on its own after the end of its peer, or create a new NoLoCo for the same optimizer.
        if not (self._exchange.is_closed or is_skipped(optimizer)):
            self._step()

    def _step(self) -> list[Swapped]:
        if self._exchange.is_replaced:
            raise SettingsError(
                "another NoLoCo was created for this peer, but a peer can train only one model: "
                "to train several models, put them into one nn.ModuleDict"
            )
        began_s, metrics, mixing = time.monotonic(), self._peer.metrics, self._mixing
        metrics.step += 1
        mixing.step_taken()
        swapped = self._apply()
        if mixing.is_due:
            if self.spec.outer.wait:
                self._exchange.wait_until_settled(self.spec.outer.max_wait_s)
                swapped += self._apply()
            mixing.outer_step()
        now_s = time.monotonic()
        metrics.progress = self.progress
        metrics.blocked_s += now_s - began_s
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._look_around(now_s)
        for swap in swapped:
            self._on_swap(swap)
        return swapped

    def _apply(self) -> list[Swapped]:
        if self._exchange.has_diverged:
            self._recover()
            return []
        if swapped := self._mixing.apply():
            self._peer.count_traffic()
        return swapped

    def _look_around(self, now_s: float) -> None:
        """Check everything that need not be checked after each inner step."""
        if self._trainable is not None and _trainable(self._model) != self._trainable:
            raise ModelError(
                "parameters of the model were replaced, frozen or unfrozen after this NoLoCo was created: "
                "create a new NoLoCo, because this one would swap the old parameters"
            )
        if isinstance(self._inner, TorchOptimizers):
            self._inner.check()
        if not self.weights.looks_finite():
            self._recover()
        self._catch_up()
        if self._save_every_s and (now_s - self._saved_at_s >= self._save_every_s or self.take_save_wanted()):
            self._saved_at_s = now_s
            if self._hooks:
                self._is_save_due = True
            else:
                self.save_in_background()

    def close(self) -> None:
        """After training, swap without inner steps until every part of the weights is close to the mean of all peers.

        This takes about log2(N) + 3 mixings of each part with N peers. It ends early if no other peer is left to swap
        with, or if this peer is asked to leave. The progress of this peer does not change.
        """
        exchange = self._exchange
        wait_s = max(CLOSING_WAIT_S, CLOSING_WAIT_STEPS * exchange.step_s)
        closing = Closing(self._mixing, time.monotonic(), wait_s=wait_s)
        while not (closing.is_over(time.monotonic()) or self._peer.leave_requested.is_set()):
            exchange.wait_until_settled(LOOK_S)
            swapped = self._apply()
            for swap in swapped:
                self._on_swap(swap)
            closing.note(time.monotonic(), has_swapped=bool(swapped))
        exchange.only_answers = False
        self.pause()

    def pause(self) -> list[Swapped]:
        """Begin no swap until the peer announces that it is training again. Return the swaps that ended meanwhile."""
        self._peer.membership.hold_swaps()
        self._exchange.paused()
        swapped = self._apply()
        for swap in swapped:
            self._on_swap(swap)
        return swapped

    def save(self) -> Path:
        """Write a checkpoint, serve it to newcomers, and return its folder.

        The checkpoint contains the weights, the outer state, the state of the inner optimizer and the values of `meta`.
        Raises CheckpointError if writing fails; in that case, the last good checkpoint remains intact.
        """
        self._saver.wait()  # only one checkpoint can be written at a time
        return self._checkpoint(self._meta())()

    def take_save_wanted(self) -> bool:
        """Return once whether a newcomer needs a newer state than the last checkpoint.

        The newcomer waits for it, because it would otherwise be too far behind to swap with anybody.
        """
        return not self._saver.is_busy and self._peer.membership.take_state_wanted()

    def save_in_background(self, *, done: Callable[[Path], None] | None = None) -> bool:
        """Save the current state as `save` does. Return False if the last save is unfinished.

        Training waits until the state is in the system's page cache, and continues while the disk writes it. `done` is
        called with the folder, on another thread. A failure is logged, and the last good checkpoint is kept.
        """
        if self._saver.is_busy:
            log.warning(
                "skipped the checkpoint of step %d because the previous one is still being written", self.num_steps
            )
            return False
        step = self.num_steps
        try:
            meta = self._meta()
        except Exception as error:  # noqa: BLE001 - of the caller, which must not end training
            _log_failure(error, step)
            return False
        try:
            complete = self._checkpoint(meta)
        except (CheckpointError, SettingsError) as error:  # other errors are those of other processes of this peer
            _log_failure(error, step)
            return False

        def complete_and_tell() -> None:
            try:
                folder = complete()
                if done:
                    done(folder)
            except Exception as error:  # noqa: BLE001 - it would be lost with the thread
                _log_failure(error, step)

        self._saver.begin(complete_and_tell)
        return True

    def _checkpoint(self, meta: dict[str, Any]) -> Callable[[], Path]:
        """Write the files of a checkpoint, and return a function to call, on any thread, that completes it.

        It serves the checkpoint to newcomers, and returns its folder. If an accelerator trains, main memory holds a
        copy of the state, because copying takes less time than writing.
        """
        if not self.weights.looks_finite():
            raise CheckpointError("the weights are not finite, so they are not saved (earlier checkpoints are intact)")
        files: dict[str, Mapping[str, Tensor | Vector]] = {saved_state.STATE_FILE: self.weights.vectors()}
        if buffers := saved_state.persistent_buffers(self._model):
            files[saved_state.BUFFERS_FILE] = buffers
        is_exact = all(param.dtype is not torch.float64 for _, param in self.weights.parameters.named)
        if self.weights.slow is not None or not is_exact:
            files[saved_state.FAST_FILE] = self.weights.parameters.named_values()
        if self._inner:
            files[saved_state.INNER_FILE] = self._inner.state()
        position = self._position()
        step, meta = self.num_steps, {**meta, "outer": position}
        if self.weights.is_on_accelerator and (copies := copied(files)):
            complete = partial(self._checkpoints.save, step, files=copies, meta=meta)
        else:
            complete = self._checkpoints.begin(step, files=files, meta=meta)

        def complete_and_serve() -> Path:
            folder = complete()
            self._serve(folder, position)
            return folder

        return complete_and_serve

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state and the position in the run, for the caller's own checkpoint.

        Vectors are not copied. The model and the inner optimizer are not included.
        """
        return {**self.weights.outer_state(), "place": self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`. The caller loads the model and the inner optimizer.

        Raises CheckpointError if the state belongs to another model.
        """
        self._load(state)
        self._mixing.restart(progress=self._place["progress"], steps=self._place["steps"])

    def _load(self, state: Mapping[str, Any]) -> None:
        if "place" not in state:
            raise CheckpointError("this state_dict contains no position in a run, so it was not created by NoLoCo")
        saved_state.check_layout(state["place"], self.weights.parameters.model_layout, origin="this state_dict")
        self.weights.take_outer_state(state)
        self._go_on_from(state["place"])

    def _position(self) -> dict[str, Any]:
        """Return this peer's position in the run as JSON values."""
        layout = self.weights.parameters.model_layout
        self._peer.count_traffic()
        return {
            "progress": self.progress,
            "steps": self._mixing.steps,
            "num_steps": self.num_steps,
            "layout": layout.digest(),
            "tensors": layout.as_json().decode(),
            "metrics": self._peer.metrics.as_dict(),
        }

    def _meta(self) -> dict[str, Any]:
        meta = self._user_meta()
        if not isinstance(meta, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not type-checked
            raise SettingsError(f"meta must return a dictionary, but it returned a {type(meta).__name__}")
        meta = dict(meta)
        if "outer" in meta:
            raise SettingsError("meta['outer'] is the place of NoLoCo's own position: use another key")
        return meta

    # entering

    def _enter(self, resume: bool | Mapping[str, Any]) -> None:
        layout = self.weights.parameters.model_layout
        self.resumed = self._checkpoints.newest() if resume is True else None
        target = self._peer.run_folder / FETCHED_FILE if self.resumed is None and isinstance(resume, bool) else None
        loss_of = self._loss_of if self._loss else None
        manifest = self._peer.membership.enter(layout=layout, target=target, loss_of=loss_of)
        if self.resumed:
            self._resume(self.resumed)
        elif not isinstance(resume, bool):
            self._load(resume)
        elif manifest and target:
            self._load_fetched(target)
            self._place = {"progress": manifest.progress, "steps": 0}
            self.entered = True
        self._peer.metrics.progress = self._place["progress"]

    def _loss_of(self, path: Path | None) -> float:
        """Return the loss with the state in a file, or with the current weights, which the model keeps."""
        assert self._loss
        if path is None:
            return float(self._loss())
        with self.weights.parameters.replaced(load_file(path)[WEIGHTS]):
            return float(self._loss())

    def _catch_up(self) -> None:
        """Take over the swarm's state if this peer is far behind, because it would otherwise drag its partners back.

        The inner optimizer keeps its moments.
        """
        target = self._peer.run_folder / FETCHED_FILE
        manifest = self._peer.membership.catch_up(progress=self.progress, target=target)
        if manifest and self._take_fetched(target):
            self._restart(manifest.progress)
            self._peer.metrics.catch_ups += 1

    def _recover(self) -> None:
        """Replace weights that are not finite by the state of a live peer, or by the newest checkpoint."""
        self._peer.metrics.diverged += 1
        now_s, advice = time.monotonic(), "use a lower learning rate, or look for NaN in the data"
        while self._recovered_s and now_s - self._recovered_s[0] > RECOVERIES_S:
            self._recovered_s.popleft()
        if len(self._recovered_s) == MOST_RECOVERIES:
            raise ModelError(
                f"the weights became non-finite more than {MOST_RECOVERIES} times within {duration(RECOVERIES_S)}: "
                f"{advice}; the last good checkpoint is intact"
            )
        self._recovered_s.append(now_s)
        log.error(
            "this peer's weights are not finite; replacing them by the state of a live peer or by a checkpoint%s",
            f" ({len(self._recovered_s)} times in {duration(RECOVERIES_S)}, of at most {MOST_RECOVERIES}: {advice})"
            if len(self._recovered_s) > 1
            else "",
        )
        target = self._peer.run_folder / FETCHED_FILE
        manifest = self._peer.membership.rescue(target=target)
        if manifest and self._take_fetched(target):
            progress = manifest.progress
        elif checkpoint := self._checkpoints.newest():
            progress = saved_state.put_back(checkpoint, self.weights, self._model)["progress"]
        else:
            raise ModelError(
                "the weights are not finite, no live peer serves its state, and there is no checkpoint: start again "
                "with a lower learning rate"
            )
        if self._inner:
            self._inner.restore({})  # its moments are not finite, either
        self._restart(progress)

    def _begin_swaps(self, progress: float) -> Exchange:
        exchange = self._peer.membership.begin_swaps(self.weights.num_swapped, progress=progress)
        exchange.on_close = self._unlock
        return exchange

    def _restart(self, progress: float) -> None:
        """Continue with new weights. Swaps of the old ones must not be applied to them."""
        self._exchange = self._begin_swaps(progress)
        self._mixing.begin_again(self._exchange)
        self._peer.metrics.progress = progress

    def _take_fetched(self, target: Path) -> bool:
        """Load a fetched state. If the file is not a valid state, log an error and return False.

        A donor's digests prove only that the file arrived intact.
        """
        try:
            self._load_fetched(target)
        except CheckpointError as error:
            log.error("%s; this peer continues with its own state", error)
            return False
        return True

    def _load_fetched(self, target: Path) -> None:
        """Load a fetched state and remove the file. Raises CheckpointError if it is not a valid state."""
        try:
            self.weights.take(load_file(target))
        except (CheckpointError, SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot use the fetched state: {error}") from None
        finally:
            target.unlink(missing_ok=True)

    def _resume(self, checkpoint: Checkpoint) -> None:
        position = saved_state.put_back(checkpoint, self.weights, self._model)
        if self._inner and checkpoint.has(saved_state.INNER_FILE):
            self._inner.restore(checkpoint.load(saved_state.INNER_FILE))
        self._go_on_from(position)
        self._serve(checkpoint.path, position)
        self._saved_at_s = time.monotonic()
        log.info("resumed from %s: %d steps", checkpoint.path, self.num_steps)

    def _go_on_from(self, position: Mapping[str, Any]) -> None:
        self._place = position
        self._peer.restore_metrics(position.get("metrics", {}))
        self._peer.metrics.step = position["num_steps"]

    def _serve(self, folder: Path, position: dict[str, Any]) -> None:
        """Serve the checkpoint in `folder`, written at this position in the run, to newcomers."""
        saved = describe_state(
            folder / f"{saved_state.STATE_FILE}.safetensors",
            layout=position["layout"],
            num_elements=self.weights.num_elements,
            progress=position["progress"],
        )
        self._peer.membership.serve_state(saved)


def _log_failure(error: Exception, step: int) -> None:
    if isinstance(error, NolocoError):
        log.error("%s", error)
    else:
        log.error("the checkpoint of step %d could not be written", step, exc_info=error)


def _trainable(model: nn.Module) -> list[int]:
    """Return the identities of the trainable parameters, regardless of their values."""
    return [id(param) for param in model.parameters() if param.requires_grad]
