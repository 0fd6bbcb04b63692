"""The loop of a trainer, which takes a step, reports, evaluates and writes checkpoints, until the end of the run.

A trainer is a subclass that knows what a step is: one of the whole model (`loop.py`), or a task of a stage
(`stage_trainer.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noloco_p2p.data.documents import Fault, Faults
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.stream import TokenStream, validation_batches
from noloco_p2p.devices import empty_cache
from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import counted, report_line
from noloco_p2p.telemetry.console import loss as show_loss
from noloco_p2p.telemetry.events import EventLog
from noloco_p2p.trainer.cut import check_stages
from noloco_p2p.trainer.evaluate import perplexity
from noloco_p2p.trainer.gauges import Gauges
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.needs import Needs, estimate
from noloco_p2p.trainer.start import has_start
from noloco_p2p.trainer.trackers import Trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FIRST_REPORT_S = 2.0  # the first report and checkpoint are early, because newcomers need a donor


class TrainerBase:
    """The base class of a trainer.

    `peer` holds the spec of the run, `spec` holds the settings of the inner steps, and `say` prints a line for the
    user. A subclass sets `device` and `inner_step`, opens the data if it reads any, calls `_enter`, and later `_run`.
    """

    device: torch.device
    inner_step: InnerStep
    outer: NoLoCo
    gauges: Gauges

    def __init__(self, peer: Peer, spec: TrainerSpec, *, say: Callable[[str], None]) -> None:
        check_stages(spec, peer.settings)
        if peer.settings.threads:
            torch.set_num_threads(peer.settings.threads)
        self.peer = peer
        self.spec = spec
        self.say = say
        self.batches: Prefetcher | None = None
        self.validation: list[Tensor] = []
        self.line_begins = ""  # the prefix of the lines for the user
        self.events = EventLog(peer.run_folder / "events.jsonl")
        self.trackers = Trackers.of(
            peer.settings.trackers,
            folder=peer.run_folder,
            run=spec.run_id,
            peer_id=peer.peer_id,
            config=spec.model_dump(mode="json"),
        )

    def _enter(self, folder: Path, *, parameters: FlatParameters | None = None, follows_caller: bool = False) -> None:
        """Resume from the newest checkpoint in `folder`, or else enter the swarm with the state of a live peer.

        If there is neither, `outer.entered` is False.
        """
        model, settings = self.inner_step.model, self.peer.settings
        self.outer = NoLoCo(
            model,
            self.inner_step,
            self.peer,
            save_every_s=0.0,
            checkpoints=Checkpoints(folder, keep=settings.keep_checkpoints),
            meta=self._meta,
            parameters=parameters,
            follows_caller=follows_caller,
        )
        self.gauges = Gauges(
            model,
            self.device,
            sequence_length=self.spec.data.sequence_length,
            num_devices=self.inner_step.compute.num_ranks,
        )
        if checkpoint := self.outer.resumed:
            if self.batches and checkpoint.meta["data"]:
                self.batches.load_state_dict(checkpoint.meta["data"])
            self.peer.restore_metrics(checkpoint.meta["metrics"])
            self.say(f"resumed from step {self.peer.metrics.step} ({checkpoint.path})")

    def _needs(self, step_s: float, *, frozen_bytes: int = 0) -> Needs:
        """Estimate the memory, disk space and traffic that this run needs on this machine."""
        self.inner_step.forget()
        return estimate(
            self.spec,
            num_parameters=sum(param.numel() for param in self.inner_step.trainable.values()),
            frozen_bytes=frozen_bytes,
            step_s=step_s,
            folder=self.peer.settings.state_dir,
            compute=self.inner_step.compute,
            device=self.device,
            keep_checkpoints=self.peer.settings.keep_checkpoints,
        )

    # data

    def _open_data(self, tokenizer: PreTrainedTokenizerBase, *, batch_size: int) -> None:
        """Open this peer's batches and the held-out batches. Raises DataError if the data cannot be read."""
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
        self.validation = validation_batches(
            spec.data,
            tokenizer=tokenizer,
            bindings=settings.data,
            num_sequences=spec.evaluate.num_sequences,
            batch_size=batch_size,
            progress=self.peer.progress,
            faults=faults,
        )
        self.batches = Prefetcher(stream, pin_memory=self.device.type == "cuda")

    def _data_fault(self, fault: Fault) -> None:
        """Count a fault and write it to the event log. This is called on the thread that reads the data."""
        self.peer.metrics.data_faults += 1
        self.events.write("data_fault", **asdict(fault))

    # the loop

    def _run(self, step: Callable[[], bool], *, measure: Callable[[], None], evaluate: Callable[[], None]) -> None:
        """Take steps until `step` returns False, `max_steps` steps are taken, or the peer is asked to leave.

        In between, report, evaluate and save, each at its own interval. `measure` updates the loss and the speed in the
        metrics before a report. `evaluate` measures the loss on the held-out sequences.
        """
        peer, metrics, settings = self.peer, self.peer.metrics, self.peer.settings
        last_step = None if settings.max_steps is None else metrics.step + settings.max_steps
        report_at_s = save_at_s = time.monotonic() + min(FIRST_REPORT_S, settings.report_every_s)
        evaluated_step, every = metrics.step, self.spec.evaluate.every_steps
        while metrics.step != last_step and not peer.leave_requested.is_set() and step():
            now_s = time.monotonic()
            if now_s >= report_at_s:
                report_at_s = now_s + settings.report_every_s
                measure()
                self._report()
            if now_s >= save_at_s:
                save_at_s = now_s + settings.save_every_s
                self.outer.save_in_background(done=partial(self._saved, step=metrics.step))
            if metrics.step // every > evaluated_step // every:
                evaluated_step = metrics.step
                evaluate()

    def _report(self) -> None:
        peer, metrics = self.peer, self.peer.metrics
        waited_s = self.batches.waited_s if self.batches else 0.0
        self.gauges.take(metrics, gradient_norm=self.inner_step.gradient_norm, waited_s=waited_s)
        peer.count_traffic()
        self.trackers.log(metrics.as_dict())
        self.events.write("report", **metrics.as_dict(), live_peers=peer.live_peers())
        self.say(self.line_begins + report_line(metrics, num_live=peer.live_peers()))

    def _evaluated(self, loss: float) -> None:
        metrics = self.peer.metrics
        metrics.validation_loss = loss
        self.trackers.log(metrics.as_dict())
        self.events.write("evaluated", step=metrics.step, progress=metrics.progress, validation_loss=loss)
        self.say(f"step {metrics.step:,} | validation loss {show_loss(loss)}, perplexity {perplexity(loss):.4g}")

    def _count_tokens(self, number: int) -> None:
        self.peer.metrics.tokens = (self.peer.metrics.tokens or 0) + number

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
        self.say(f"{self.line_begins}mixed the final weights in {counted(metrics.swaps - before, 'swap')}")

    def _wait_while_paused(self) -> None:
        """Save the state in case the machine is switched off, and wait until the peer is resumed or asked to leave."""
        self.outer.pause()
        self._save()
        self.say(f"paused: {self.peer.pausing.sentence}")
        self.events.write("paused", step=self.peer.metrics.step, paused_by=self.peer.pausing.word)
        empty_cache(self.device)  # for other programs: frees memory that torch has cached, but not the weights
        self.peer.wait_while_paused()
        self.say("resumed" if not self.peer.leave_requested.is_set() else "asked to leave")
        self.events.write("resumed", step=self.peer.metrics.step)

    def _finish(self) -> Path | None:
        """Write the final checkpoint and report the end. Return the checkpoint, or None if it could not be written."""
        self.outer.pause()  # otherwise a partner could get half of a swap whose other half is not saved
        if self.batches:
            self.batches.close()
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
        self._saved(folder, step=self.peer.metrics.step)
        return folder

    def _saved(self, folder: Path, *, step: int) -> None:
        self.events.write("saved", step=step, folder=str(folder))

    def _meta(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds besides the state of the model and the optimizers."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "peer_id": self.peer.peer_id,
            "data": self.batches.state_dict() if self.batches else None,
            "metrics": self.peer.metrics.as_dict(),
        }
