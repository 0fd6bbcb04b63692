"""All trainers share this base class. It reads data, reports, writes checkpoints, pauses, and ends the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noloco_p2p.data.documents import Fault, Faults
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.stream import TokenStream, validation_batches
from noloco_p2p.devices import empty_cache
from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import counted, report_line
from noloco_p2p.telemetry.console import loss as show_loss
from noloco_p2p.telemetry.events import EventLog
from noloco_p2p.trainer.cut import check_stages
from noloco_p2p.trainer.evaluate import perplexity
from noloco_p2p.trainer.start import has_start
from noloco_p2p.trainer.trackers import Trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FIRST_REPORT_S = 2.0  # the first report and checkpoint are early, because newcomers need a donor


class TrainerBase:
    """The base class of a trainer.

    `peer` holds the spec of the run, `spec` holds the settings of the inner steps, and `say` prints a line for the
    user. A subclass creates `outer`, calls `_begin_time` when training begins, and after each inner step counts it in
    `_timed_steps` and calls `_do_what_is_due`.
    """

    outer: NoLoCo
    device: torch.device

    def __init__(self, peer: Peer, spec: TrainerSpec, *, say: Callable[[str], None]) -> None:
        check_stages(spec, peer.settings)
        self.peer = peer
        self.spec = spec
        self.say = say
        self.events = EventLog(peer.run_folder / "events.jsonl")
        self.trackers = Trackers.of(
            peer.settings.trackers,
            folder=peer.run_folder,
            run=spec.run_id,
            peer_id=peer.peer_id,
            config=spec.model_dump(mode="json"),
        )
        self._begin_time()

    # data

    def _open_data(
        self, tokenizer: PreTrainedTokenizerBase, *, batch_size: int, pin_memory: bool
    ) -> tuple[Prefetcher, list[Tensor]]:
        """Return this peer's batches and the held-out batches. Raises DataError if the data cannot be read."""
        spec, settings, faults = self.spec, self.peer.settings, Faults(self._data_fault)
        stream = TokenStream(
            spec.data,
            tokenizer=tokenizer,
            bindings=settings.data,
            peer_id=self.peer.peer_id,
            batch_size=batch_size,
            progress=self.peer.progress,
            faults=faults,
        )
        validation = validation_batches(
            spec.data,
            tokenizer=tokenizer,
            bindings=settings.data,
            num_sequences=spec.evaluate.num_sequences,
            batch_size=batch_size,
            progress=self.peer.progress,
            faults=faults,
        )
        return Prefetcher(stream, pin_memory=pin_memory), validation

    def _data_fault(self, fault: Fault) -> None:
        """Count a fault and write it to the event log. This is called on the thread that reads the data."""
        self.peer.metrics.data_faults += 1
        self.events.write("data_fault", **asdict(fault))

    # for subclasses

    def _data(self) -> Prefetcher | None:
        """Return the reader whose position goes into a checkpoint, or None if this peer reads no data."""
        raise NotImplementedError

    def _mean_loss(self) -> float | None:
        """Return the mean loss since the last report in nats per token, or None if there is no loss."""
        raise NotImplementedError

    def _take_gauges(self) -> None:
        """Update the gauges of this machine."""

    def _evaluate(self) -> None:
        """Measure the loss on the held-out sequences."""
        raise NotImplementedError

    def _num_mates(self) -> int:
        """Return the number of other live peers that this peer can swap with."""
        return self.peer.live_peers()

    def _line_begins(self) -> str:
        """Return the prefix of the line of a report."""
        return ""

    # now and then

    def _begin_time(self) -> None:
        """Measure the speed from now on, and let the next report and checkpoint be early."""
        self._timed_from_s, self._timed_steps = time.monotonic(), 0
        self._report_at_s = self._timed_from_s + min(FIRST_REPORT_S, self.peer.settings.report_every_s)
        self._save_at_s = self._report_at_s
        self._evaluated_step = self.peer.metrics.step

    def _do_what_is_due(self) -> None:
        """Report, evaluate and save, each at its own interval."""
        metrics, now_s = self.peer.metrics, time.monotonic()
        if now_s >= self._report_at_s:
            self._report_at_s = now_s + self.peer.settings.report_every_s
            self._report()
        if now_s >= self._save_at_s:
            self._save_at_s = now_s + self.peer.settings.save_every_s
            step = metrics.step
            self.outer.save_in_background(done=lambda folder: self._saved(folder, step))
        every = self.spec.evaluate.every_steps
        if metrics.step // every > self._evaluated_step // every:
            self._evaluated_step = metrics.step
            self._evaluate()

    def _report(self) -> None:
        metrics = self.peer.metrics
        metrics.loss = self._mean_loss()
        self._note_speed()
        self._take_gauges()
        self.peer.count_traffic()
        self.trackers.log(metrics.as_dict())
        self.events.write("report", **metrics.as_dict(), live_peers=self.peer.live_peers())
        self.say(self._line_begins() + report_line(metrics, num_live=self.peer.live_peers()))

    def _evaluated(self, loss: float) -> None:
        metrics = self.peer.metrics
        metrics.validation_loss = loss
        self.trackers.log(metrics.as_dict())
        self.events.write("evaluated", step=metrics.step, progress=metrics.progress, validation_loss=loss)
        self.say(f"step {metrics.step:,} | validation loss {show_loss(loss)}, perplexity {perplexity(loss):.4g}")

    def _count_tokens(self, number: int) -> None:
        self.peer.metrics.tokens = (self.peer.metrics.tokens or 0) + number

    def _note_speed(self) -> None:
        """Update the step rate from the steps and the time since the last call."""
        metrics, now_s = self.peer.metrics, time.monotonic()
        metrics.inner_steps_per_s = self._timed_steps / (now_s - self._timed_from_s)
        metrics.tokens_per_s = metrics.inner_steps_per_s * self.spec.train.batch_size * self.spec.data.sequence_length
        self._timed_from_s, self._timed_steps = now_s, 0

    # the end of a run

    @property
    def finished(self) -> bool:
        """Whether the schedule is complete."""
        return self.outer.progress >= 1

    def _close(self) -> None:
        """After training, swap weights a few more times, so that this peer gets close to the mean of the swarm."""
        metrics, before = self.peer.metrics, self.peer.metrics.swaps
        with self.peer.progress.task("mixing the final weights with other peers"):
            self.outer.close()
        self.say(f"{self._line_begins()}mixed the final weights in {counted(metrics.swaps - before, 'swap')}")

    def _wait_while_paused(self) -> None:
        """Save the state in case the machine is switched off, and wait until the peer is resumed or asked to leave."""
        self.outer.pause()
        self._save()
        self.say(f"paused: {self.peer.pausing.sentence}")
        self.events.write("paused", step=self.peer.metrics.step, paused_by=self.peer.pausing.word)
        empty_cache(self.device)  # for other programs: frees memory that torch has cached, but not the weights
        began_s = time.monotonic()
        self.peer.wait_while_paused()
        self._timed_from_s += time.monotonic() - began_s
        self.say("resumed" if not self.peer.leave_requested.is_set() else "asked to leave")
        self.events.write("resumed", step=self.peer.metrics.step)

    def _finish(self) -> Path | None:
        """Write the final checkpoint and report the end. Return the checkpoint, or None if it could not be written."""
        self.outer.pause()  # otherwise a partner could get half of a swap whose other half is not saved
        folder = self._save()
        self.peer.count_traffic()
        self.trackers.close()
        metrics = self.peer.metrics
        self.events.write("finished" if self.finished else "stopped", **metrics.as_dict())
        if folder:
            self.say(f"step {metrics.step} | checkpoint {folder}")
        return folder

    # checkpoints

    def _begin_fork(self, *, is_revived: bool = False) -> None:
        """Check that the start state of a forked run is on this machine, and write a checkpoint of it.

        Newcomers need the checkpoint, because this may be the only peer that can give them the start state. If
        `is_revived` is true, the weights come from a checkpoint of the operator instead. Raises ModelError if the start
        state is missing.
        """
        start, state_dir = self.spec.model.start, self.peer.settings.state_dir
        if not (is_revived or has_start(start, state_dir=state_dir)):
            raise ModelError(
                f"the start state {start} of the run {self.spec.name} is not on this machine, and no live peer sent "
                "it; join with the ticket of a live peer, or create the state again with `noloco fork`"
            )
        if start:
            self._save()

    def _save(self) -> Path | None:
        """Write a checkpoint and return its folder. Log an error and return None if that fails, as on a full disk."""
        try:
            with self.peer.progress.task("writing a checkpoint"):
                folder = self.outer.save()
        except CheckpointError as error:
            log.error("%s", error)
            return None
        self._saved(folder, self.peer.metrics.step)
        return folder

    def _saved(self, folder: Path, step: int) -> None:
        self.events.write("saved", step=step, folder=str(folder))

    def _meta(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds besides the state of the model and the optimizers."""
        data = self._data()
        return {
            "spec": self.spec.model_dump(mode="json"),
            "peer_id": self.peer.peer_id,
            "data": data.state_dict() if data else None,
            "metrics": self.peer.metrics.as_dict(),
        }

    def _resume(self, checkpoint: Checkpoint) -> None:
        meta = checkpoint.meta
        if (data := self._data()) and meta["data"]:
            data.load_state_dict(meta["data"])
        self.peer.restore_metrics(meta["metrics"])
        self.say(f"resumed from step {self.peer.metrics.step} ({checkpoint.path})")
