"""The trainer: a language model on text, with NoLoCo as its outer optimizer. It uses the library as anybody can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.data.faults import Fault, Faults
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.stream import TokenStream, validation_batches
from noloco_p2p.errors import CheckpointError, DataError, ModelError
from noloco_p2p.gossip.outcome import Alone, LonelyCause
from noloco_p2p.optim.mixing import closing_rounds, closing_wait_s
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo, RoundResult
from noloco_p2p.outer.update_filter import LossCheck
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import closing_line, round_line
from noloco_p2p.telemetry.console import loss as show_loss
from noloco_p2p.telemetry.events import EventLog
from noloco_p2p.trainer.compute import Compute, choose_device, switch_on
from noloco_p2p.trainer.cut import check_stages
from noloco_p2p.trainer.evaluate import evaluate_loss, perplexity
from noloco_p2p.trainer.follower import LeadingStep
from noloco_p2p.trainer.gauges import Gauges
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, build_tokenizer, check_vocabulary, count_parameters
from noloco_p2p.trainer.needs import Needs, check_memory, estimate, probe_step_s
from noloco_p2p.trainer.ranks import Ranks, Verb, text_payload
from noloco_p2p.trainer.sharded import ShardedParameters, shard
from noloco_p2p.trainer.start import load_start
from noloco_p2p.trainer.trackers import Trackers

log = logging.getLogger(__name__)

SEED_BYTES = 6  # 2 ** 48 seeds
REFRESH_S = 1.0  # between two looks at the loss within a round: each waits for the accelerator once


class Trainer:
    """One training peer: model, data, optimizer, outer step and checkpoints, built from the run spec.

    Resumes from the newest checkpoint on this machine, else from the state of a live peer, else from the initial
    weights that the spec defines. `say` prints a line for a person. `ranks`: this process leads others, which train the
    same model on the other GPUs of this machine.
    """

    def __init__(self, peer: Peer, *, say: Callable[[str], None], ranks: Ranks | None = None) -> None:
        spec, settings = TrainerSpec.of(peer.spec), peer.settings
        check_stages(spec, settings)
        self.peer = peer
        self.spec = spec
        self.say = say
        self.device = ranks.device if ranks else choose_device(settings.device)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        compute = Compute.of(settings, num_ranks=ranks.size if ranks else 1)
        size = {"sequence_length": spec.data.sequence_length, "folders": settings.models}
        num_parameters, frozen_bytes = count_parameters(spec.model, **size)
        check_memory(
            spec, num_parameters=num_parameters, frozen_bytes=frozen_bytes, compute=compute, device=self.device
        )
        self.events = EventLog(peer.run_folder / "events.jsonl")
        tokenizer = build_tokenizer(spec.data, folders=settings.models)
        stream = TokenStream(
            spec.data,
            tokenizer=tokenizer,
            bindings=settings.data,
            peer_id=peer.peer_id,
            batch_size=spec.train.batch_size,
            progress=peer.progress,
            faults=Faults(self._data_fault),
        )
        self.batches = Prefetcher(stream, pin_memory=self.device.type == "cuda")
        self.validation = validation_batches(
            spec.data,
            tokenizer=tokenizer,
            bindings=settings.data,
            num_sequences=spec.evaluate.num_sequences,
            batch_size=spec.train.batch_size,
            progress=peer.progress,
            faults=Faults(self._data_fault),
        )
        with peer.progress.task("building the model"):
            self.model = build_model(spec.model, **size)
        check_vocabulary(self.model, tokenizer)
        peer.tell_long_swaps(lambda swap: self.events.write("swap", **asdict(swap)))
        self._losses: list[Tensor] = []
        has_start = load_start(self.model, spec.model.start, state_dir=settings.state_dir)
        self.inner_step, parameters = self._place_model(ranks, compute)
        rise = settings.max_loss_rise
        check = LossCheck(self._private_loss, rise) if rise is not None else None
        self.outer = NoLoCo(
            self.model,
            self.inner_step,
            peer,
            save_every_rounds=0,
            checkpoints=Checkpoints(peer.run_folder / "checkpoints", keep=settings.keep_checkpoints),
            end_at=1.0,
            loss_check=check,
            parameters=parameters,
        )
        if self.outer.resumed:
            self._resume(self.outer.resumed)
        elif not (has_start or self.outer.entered):
            raise ModelError(
                f"the run {spec.name} starts from the state {spec.model.start}, which is not on this machine, and no "
                "live peer gave its state; join with a ticket of a live peer, or make it again with `noloco fork`"
            )
        self._batch = self.validation[0]  # the one of now; its own order of the data is what no partner knows
        self.gauges = Gauges(
            self.model,
            self.device,
            sequence_length=spec.data.sequence_length,
            num_devices=ranks.size if ranks else 1,
        )
        self.trackers = Trackers.of(
            settings.trackers,
            folder=peer.run_folder,
            run=spec.run_id,
            peer_id=peer.peer_id,
            config=spec.model_dump(mode="json"),
        )
        self._timed_from_s, self._timed_steps = time.monotonic(), 0
        self._aside_s = 0.0  # of this round, in which no step was taken
        self._refreshed_s = self._timed_from_s

    def _place_model(self, ranks: Ranks | None, compute: Compute) -> tuple[InnerStep, FlatParameters]:
        """Bring the model to the device, or split it over those of all ranks."""
        switch_on(self.model, compute)
        if ranks:
            ranks.order(Verb.BUILD, payload=text_payload(self.spec.canonical_json()))
            layout = FlatParameters(self.model).model_layout
            shard(self.model, ranks, compute)
            inner_step = LeadingStep(self.model, self.spec.train, compute, ranks)
            return inner_step, ShardedParameters(self.model, ranks, layout=layout)
        torch.nn.Module.to(self.model, self.device)  # the type of transformers' own `to` is of no use
        return InnerStep(self.model, self.spec.train, compute), FlatParameters(self.model)

    def needs(self) -> Needs:
        """Memory, disk and traffic of this run on this machine; takes a few inner steps to measure.

        Finds out by the way how many sequences fit into memory at a time.
        """
        self.model.train()
        batch_size, batch = self.spec.train.batch_size, self.validation[0]
        whole = batch.repeat(-(-batch_size // len(batch)), 1)[:batch_size]
        at_once = self.inner_step.fit(whole)
        per_gpu = -(-batch_size // self.inner_step.compute.num_ranks)
        if at_once < per_gpu:
            self.say(f"micro-batches of {at_once}: a step has {per_gpu} sequences a GPU")
        step_s = probe_step_s(self.inner_step.probe, whole)
        self.inner_step.forget()
        num_parameters = sum(param.numel() for param in self.inner_step.trainable.values())
        settings = self.peer.settings
        return estimate(
            self.spec,
            num_parameters=num_parameters,
            frozen_bytes=sum(param.nbytes for param in self.model.parameters() if not param.requires_grad),
            step_s=step_s,
            folder=settings.state_dir,
            compute=self.inner_step.compute,
            device=self.device,
            keep_checkpoints=settings.keep_checkpoints,
        )

    def train(self) -> Path | None:
        """Run until the schedule is done, `max_steps` are taken, or somebody asked to leave.

        Returns the checkpoint that was then written, or None when it could not be.
        """
        metrics, max_steps = self.peer.metrics, self.peer.settings.max_steps
        last_step = None if max_steps is None else metrics.step + max_steps
        rounds_before = metrics.rounds_here
        self.events.write("started", peer_id=self.peer.peer_id, address=self.peer.address, resumed_at=metrics.step)
        if not self.peer.leave_requested.is_set():
            self._evaluate()
        self.model.train()
        self._timed_from_s, self._aside_s = time.monotonic(), 0.0
        while not self.finished:
            batch = draw(self._next_batch)
            if batch is None:
                break
            self._batch, seed = batch, step_seed(self.peer.peer_id, metrics.step)
            loss = self.inner_step(batch, progress=self.outer.progress, seed=seed)
            self._losses.append(loss)
            self._timed_steps += 1
            result = self.outer.step()
            if result:
                self._round_done(result)
            elif self.peer.metrics.loss is None or time.monotonic() - self._refreshed_s >= REFRESH_S:
                self._refresh_metrics()
            if self.peer.pause_requested.is_set():
                self._pause()
            if self.peer.leave_requested.is_set() or metrics.step == last_step:
                break
        self.batches.close()
        if self.finished and metrics.rounds_here > rounds_before:  # not when it was done before a restart
            self._close()
        if not self.peer.leave_requested.is_set():  # who asked to leave waits: no evaluation before the checkpoint
            self._evaluate()
        folder = self._save()
        self.trackers.close()
        self.events.write("finished" if self.finished else "stopped", **metrics.as_dict())
        if folder:
            self.say(f"step {metrics.step} | checkpoint {folder}")
        return folder

    @property
    def finished(self) -> bool:
        """The schedule is done and the last round with it."""
        return self.outer.progress >= 1 and self.outer.is_between_rounds

    def _next_batch(self) -> Tensor | None:
        """None when somebody asked to leave while the data was waited for."""
        return self.batches.get(until=self.peer.leave_requested.is_set)

    def _data_fault(self, fault: Fault) -> None:
        """Called by the thread that reads."""
        self.peer.metrics.data_faults += 1
        self.events.write("data_fault", **asdict(fault))

    def _pause(self) -> None:
        """Until it is resumed or asked to leave. What the machine holds is on disk, too, should it be switched off."""
        result = self.outer.withdraw()
        if result:
            self._round_done(result)
        self._save()
        self.say("paused; `noloco resume` goes on, `noloco leave` ends it")
        self.events.write("paused", step=self.peer.metrics.step)
        began_s = time.monotonic()
        self.peer.wait_while_paused()
        self._timed_from_s += time.monotonic() - began_s
        self.say("resumed" if not self.peer.leave_requested.is_set() else "asked to leave")
        self.events.write("resumed", step=self.peer.metrics.step)

    def _close(self) -> None:
        """Training is done: mix alone, until this peer is near the mean of all, or nobody is left to mix with."""
        others = self.peer.live_peers()
        num_rounds = closing_rounds(self.spec.outer, others + 1) if others else 0
        wait_s = closing_wait_s(self.spec.outer, self.peer.exchange.pace.seconds_per_round())
        metrics = self.peer.metrics
        for number in range(1, num_rounds + 1):
            if self.peer.leave_requested.is_set():
                return
            result = self.outer.closing_round(wait_s=wait_s)
            self.peer.count_traffic()
            self.events.write("closed", **metrics.as_dict(), number=number, of=num_rounds)
            self.say(closing_line(metrics, number=number, num_rounds=num_rounds))
            if isinstance(result.outcome, Alone) and result.outcome.cause is LonelyCause.NOBODY:
                return

    # once a round

    def _round_done(self, result: RoundResult) -> None:
        metrics = self.peer.metrics
        if self._losses:  # a pause may end a round before its first step
            metrics.loss = float(torch.stack(self._losses).mean())  # waits for the accelerator, once a round
        self._time_steps()
        self.gauges.take(metrics, gradient_norm=self.inner_step.gradient_norm, waited_s=self.batches.waited_s)
        self.peer.count_traffic()
        self.trackers.log(metrics.as_dict())
        self.events.write("round", **metrics.as_dict(), live_peers=self.peer.live_peers())
        self.say(round_line(metrics, num_live=self.peer.live_peers()))
        self._losses.clear()
        if result.round % self.spec.evaluate.every_rounds == self.spec.evaluate.every_rounds - 1:
            self._evaluate()
        every = self.peer.settings.save_every_rounds
        if metrics.rounds_here == 1 or result.round % every == every - 1:  # the first one early: newcomers need a donor
            step = metrics.step
            self.outer.save_in_background(self._meta(), done=lambda folder: self._saved(folder, step))

    def _refresh_metrics(self) -> None:
        """Loss and speed of the round so far, for `noloco status`: a round may take minutes."""
        self.peer.metrics.loss = float(torch.stack(self._losses).mean())
        self._note_speed(aside_s=self._aside_s)  # a round may begin with an evaluation that is longer than its steps
        self._refreshed_s = time.monotonic()

    def _time_steps(self) -> None:
        """How fast the steps since the last call were; all that was done since then counts as their time."""
        self._note_speed()
        self._timed_from_s, self._timed_steps, self._aside_s = time.monotonic(), 0, 0.0
        self._refreshed_s = self._timed_from_s

    def _note_speed(self, *, aside_s: float = 0.0) -> None:
        metrics = self.peer.metrics
        metrics.inner_steps_per_s = self._timed_steps / (time.monotonic() - self._timed_from_s - aside_s)
        metrics.tokens_per_s = metrics.inner_steps_per_s * self.spec.train.batch_size * self.spec.data.sequence_length

    def _private_loss(self) -> float:
        with self.inner_step.together():
            return evaluate_loss(self.model, [self._batch])

    def _evaluate(self) -> None:
        """Perplexity on the held-out sequences, the same for every peer."""
        metrics, began_s = self.peer.metrics, time.monotonic()
        with self.inner_step.together():
            loss = evaluate_loss(self.model, self.validation, progress=self.peer.progress)
        self._aside_s += time.monotonic() - began_s
        metrics.validation_loss = loss
        self.trackers.log(metrics.as_dict())
        self.events.write("evaluated", step=metrics.step, round=metrics.round, validation_loss=loss)
        self.say(f"round {metrics.round} | validation loss {show_loss(loss)}, perplexity {perplexity(loss):.4g}")

    # stop and go on

    def _save(self) -> Path | None:
        """Write the last checkpoint; a full disk is told (None)."""
        meta = self._meta()
        try:
            with self.peer.progress.task("writing a checkpoint"):
                folder = self.outer.save(meta)
        except CheckpointError as error:
            log.error("%s", error)
            return None
        self._saved(folder, meta["metrics"]["step"])
        return folder

    def _saved(self, folder: Path, step: int) -> None:
        self.events.write("saved", step=step, folder=str(folder))

    def _meta(self) -> dict[str, Any]:
        """What a checkpoint holds beside the states of model and optimizers."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "peer_id": self.peer.peer_id,
            "data": self.batches.state_dict(),
            "metrics": self.peer.metrics.as_dict(),
            "losses": [float(loss) for loss in self._losses],  # of the round so far
        }

    def _resume(self, checkpoint: Checkpoint) -> None:
        meta = checkpoint.meta
        self.batches.load_state_dict(meta["data"])
        self.peer.restore_metrics(meta["metrics"])
        self._losses += [torch.tensor(loss, device=self.device) for loss in meta.get("losses", [])]
        self.say(f"resumed from step {self.peer.metrics.step}, round {self.outer.round} ({checkpoint.path})")


def draw(next_batch: Callable[[], Tensor | None]) -> Tensor | None:
    """The next batch. Raises DataError when there is no memory for it: the others go on, and so does a restart."""
    try:
        return next_batch()
    except MemoryError:
        raise DataError(
            "no memory is left for the next batch; the last checkpoint stays: free some, and the same command resumes"
        ) from None


def step_seed(peer_id: str, step: int) -> int:
    """For what a model draws in a step (dropout): of its own for each peer and step, the same after a restart."""
    return int.from_bytes(blake3(f"{peer_id}/{step}".encode()).digest(length=SEED_BYTES), "little")
