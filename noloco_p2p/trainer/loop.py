"""Train a language model on text, with NoLoCo as its outer optimizer.

A trainer takes a step, reports, evaluates and writes checkpoints, until the end of the run. `Trainer` trains a whole
model. `stage_trainer.py` trains one stage, and a step is then a task of the pipeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.data.documents import Fault, Faults
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.stream import Corpus, TokenStream, validation_batches
from noloco_p2p.devices import describe, empty_cache, has_own_memory, peak_bytes
from noloco_p2p.errors import CheckpointError, DataError, ModelError, RankError, SettingsError
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import FETCHED_FILE, NoLoCo
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import counted, report_line
from noloco_p2p.telemetry.console import loss as show_loss
from noloco_p2p.telemetry.events import EventLog
from noloco_p2p.trainer.compute import Compute, choose_device, flops_per_token, peak_flops, switch_on
from noloco_p2p.trainer.cut import check_stages
from noloco_p2p.trainer.evaluate import evaluate_loss, mixes_samples, perplexity
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import (
    build_model,
    build_outline,
    build_tokenizer,
    check_vocabulary,
    count_parameters,
    loss_for,
)
from noloco_p2p.trainer.needs import Needs, check_memory, estimate
from noloco_p2p.trainer.ranks import Ranks
from noloco_p2p.trainer.sharded import ShardedParameters, ShardedStep, shard
from noloco_p2p.trainer.start import has_start, load_start
from noloco_p2p.trainer.trackers import Trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FIRST_REPORT_S = 2.0
SEED_BYTES = 6  # 2 ** 48 seeds


class TrainerBase:
    """The base class of a trainer.

    `peer` holds the spec of the run, `spec` holds the settings of the inner steps, and `say` prints a line for the
    user. A subclass sets `device` and `inner_step`, opens the data if it reads any, calls `_enter`, and later `_run`.
    """

    device: torch.device
    inner_step: InnerStep
    outer: NoLoCo

    def __init__(self, peer: Peer, spec: TrainerSpec, *, say: Callable[[str], None]) -> None:
        check_stages(spec, peer.settings)
        if peer.settings.threads:
            torch.set_num_threads(peer.settings.threads)
        self.peer = peer
        self.spec = spec
        self.say = say
        self.batches: Prefetcher | None = None
        self.line_begins = ""  # the prefix of the lines for the user
        self._waited_s = 0.0  # for data, before the last report
        self.events = EventLog(peer.run_folder / "events.jsonl")
        self.trackers = Trackers.of(
            peer.settings.trackers,
            folder=peer.run_folder,
            run=spec.run_id,
            peer_id=peer.peer_id,
            config=spec.model_dump(mode="json"),
        )

    def _enter(
        self,
        folder: Path,
        *,
        parameters: FlatParameters | None = None,
        loss: Callable[[], float] | None = None,
        follows_caller: bool = False,
    ) -> None:
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
            loss=loss,
            parameters=parameters,
            follows_caller=follows_caller,
        )
        peak = peak_flops(describe(self.device)) if self.device.type == "cuda" else None
        self._peak_flops = peak and peak * self.inner_step.compute.num_ranks
        self._flops_per_token = flops_per_token(model, sequence_length=self.spec.data.sequence_length)
        if checkpoint := self.outer.resumed:
            if self.batches and checkpoint.meta["data"]:
                self.batches.load_state_dict(checkpoint.meta["data"])
            self.say(f"resumed from step {self.peer.metrics.step} ({checkpoint.path})")

    # data

    def _open_data(self, tokenizer: PreTrainedTokenizerBase, *, batch_size: int) -> Corpus:
        """Open this peer's batches. Raises DataError if the data cannot be opened."""
        bindings, faults = self.peer.settings.data, Faults(self._data_fault)
        corpus = Corpus(self.spec.data, tokenizer, bindings, self.peer.progress, faults)
        stream = TokenStream(corpus, peer_id=self.peer.peer_id, batch_size=batch_size)
        self.batches = Prefetcher(stream, pin_memory=self.device.type == "cuda")
        return corpus

    def _data_fault(self, fault: Fault) -> None:
        """Count a fault and write it to the event log. This is called on the thread that reads the data."""
        self.peer.metrics.data_faults += 1
        self.events.write("data_fault", **asdict(fault))

    # the loop

    def _run(self, step: Callable[[], bool], *, measure: Callable[[], None], evaluate: Callable[[], None]) -> None:
        """Take steps until `step` returns False, `max_steps` steps are taken, or the peer is asked to leave.

        In between, report, save and evaluate, each at its own interval. The first checkpoint and the first evaluation
        follow the first step. `measure` updates the loss and the speed in the metrics before a report. `evaluate`
        measures the loss on the held-out sequences.
        """
        peer, metrics, settings = self.peer, self.peer.metrics, self.peer.settings
        last_step = None if settings.max_steps is None else metrics.step + settings.max_steps
        save_at_s = time.monotonic()  # at once, because newcomers need a donor
        report_at_s = save_at_s + min(FIRST_REPORT_S, settings.report_every_s)
        first_step, evaluated_step = metrics.step, -1
        every = self.spec.evaluate.every_steps
        try:
            while metrics.step != last_step and not peer.leave_requested.is_set() and step():
                now_s = time.monotonic()
                if now_s >= report_at_s:
                    report_at_s = now_s + settings.report_every_s
                    measure()
                    self._report()
                if now_s >= save_at_s or self.outer.take_save_wanted():
                    save_at_s = now_s + settings.save_every_s
                    self.outer.save_in_background(done=partial(self._saved, step=metrics.step))
                if metrics.step // every > evaluated_step // every:
                    evaluated_step = metrics.step
                    evaluate()
        except BaseException as error:
            # Without the other processes of this peer, its state cannot be collected.
            if metrics.step > first_step and not isinstance(error, RankError) and self.outer.weights.looks_finite():
                with suppress(Exception):
                    self._save()
            raise

    def _report(self) -> None:
        peer, metrics, norm = self.peer, self.peer.metrics, self.inner_step.gradient_norm
        waited_s = self.batches.waited_s if self.batches else 0.0
        metrics.data_wait_s, self._waited_s = waited_s - self._waited_s, waited_s
        metrics.gradient_norm = None if norm is None else float(norm)
        metrics.mfu = metrics.tokens_per_s * self._flops_per_token / self._peak_flops if self._peak_flops else None
        is_cpu = self.device.type == "cpu"
        metrics.memory_bytes = psutil.Process().memory_info().rss if is_cpu else peak_bytes(self.device)
        peer.count_traffic()
        self.trackers.log(metrics.as_dict())
        self.events.write("report", **metrics.as_dict(), live_peers=peer.live_peers())
        self.say(self.line_begins + report_line(metrics, num_live=peer.live_peers()))

    def _evaluated(self, loss: float) -> None:
        metrics = self.peer.metrics
        metrics.evaluated(loss)
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
        self.events.write("closing", **metrics.as_dict())
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
        }


class Trainer(TrainerBase):
    """A training peer, with the model, data, optimizers, outer step and checkpoints that its run spec defines.

    It resumes from the newest checkpoint on this machine, or else from the state of a live peer. If there is neither,
    it starts from the initial weights that the spec defines. `say` prints a line for the user. If `ranks` is given,
    this process leads the other processes, which train the same model on the other GPUs of this machine.
    """

    def __init__(self, peer: Peer, *, say: Callable[[str], None], ranks: Ranks | None = None) -> None:
        spec, settings = TrainerSpec.of(peer.spec), peer.settings
        self.device = ranks.device if ranks else choose_device(settings.device)
        compute = Compute.of(settings, num_ranks=ranks.size if ranks else 1)
        if ranks and (spec.model.lora.base_dtype == "nf4" or spec.train.inner_optimizer == "adamw8bit"):
            raise SettingsError("--gpus cannot shard nf4 weights or adamw8bit moments; start one peer for each GPU")
        size = {"sequence_length": spec.data.sequence_length, "folders": settings.models}
        counts, has_gpu = count_parameters(spec.model, **size), has_own_memory(self.device)
        self._needs = estimate(spec, counts, settings, has_gpu=has_gpu, num_ranks=compute.num_ranks)
        check_memory(self._needs, spec, settings, self.device)
        super().__init__(peer, spec, say=say)
        folder, arriving = peer.run_folder / "checkpoints", ExitStack()
        if Checkpoints(folder).is_empty and not (spec.model.pretrained or counts.frozen_bytes):
            layout = FlatParameters(build_outline(spec.model, **size)).model_layout
            arriving.enter_context(peer.membership.fetching(layout, peer.run_folder / FETCHED_FILE))
        with arriving:
            parameters = self._build(compute, ranks)
            self._fit()
            loss = None if ranks else self._loss_of_a_batch  # all ranks would have to take part
            self._enter(folder, parameters=parameters, loss=loss)
        if not self.outer.resumed and not self.outer.entered:
            self._begin_fork()
        self._losses: list[Tensor] = []  # since the last report
        self._measured_s, self._num_steps = time.monotonic(), 0  # steps since then

    def _build(self, compute: Compute, ranks: Ranks | None) -> FlatParameters:
        """Open the data, and build the model and its inner step. Return the parameters."""
        spec, settings = self.spec, self.peer.settings
        tokenizer = build_tokenizer(spec.data, folders=settings.models)
        self._corpus = self._open_data(tokenizer, batch_size=spec.train.batch_size)
        with self.peer.progress.task("building the model"):
            self.model = build_model(spec.model, sequence_length=spec.data.sequence_length, folders=settings.models)
        check_vocabulary(self.model, tokenizer)
        if spec.data.packs_samples and mixes_samples(self.model):
            log.warning(
                "in this model, the chats that are packed into a sequence see each other, and may disturb training"
            )
        load_start(self.model, spec.model.start, state_dir=settings.state_dir)
        switch_on(self.model, compute)
        if ranks:
            ranks.share(spec.model_dump(mode="json"))
            layout = FlatParameters(self.model).model_layout
            shard(self.model, ranks, compute)
            step = self.inner_step = ShardedStep(self.model, spec.train, compute, ranks, loss=loss_for(spec.data))
            return ShardedParameters(step, layout=layout)
        torch.nn.Module.to(self.model, self.device)  # transformers' own `to` has an unusable type
        self.inner_step = InnerStep(self.model, spec.train, compute, loss=loss_for(spec.data))
        return FlatParameters(self.model)

    @cached_property
    def validation(self) -> list[Tensor]:
        """The held-out batches. The first evaluation reads them, so training need not wait for it."""
        evaluate, batch_size = self.spec.evaluate, self.spec.train.batch_size
        return validation_batches(self._corpus, num_sequences=evaluate.num_sequences, batch_size=batch_size)

    def _fit(self) -> None:
        """Determine how many sequences of a batch fit into memory at a time.

        While the state of a live peer arrives, also read ahead and compute a batch, which allocates memory and
        compiles, so that the first step takes no longer than the others.
        """
        self.model.train()
        step, batch_size = self.inner_step, self.spec.train.batch_size
        whole = torch.zeros(batch_size, self.spec.data.sequence_length, dtype=torch.long)
        at_once = step.fit(whole)
        per_gpu = -(-batch_size // step.compute.num_ranks)
        if at_once < per_gpu:
            self.say(f"a step processes {per_gpu} sequences per GPU in micro-batches of {at_once}")
        if self.batches and self.peer.membership.is_fetching:
            self.batches.begin()
            step.backward(whole)
            step.forget()

    def needs(self) -> Needs:
        """Estimate the memory, disk space and traffic that this run needs on this machine."""
        return replace(self._needs, activation_bytes=self.inner_step.activation_bytes)

    def train(self) -> Path | None:
        """Train until the schedule is complete, `max_steps` steps are taken, or the peer is asked to leave.

        Returns the checkpoint that was written at the end, or None if it could not be written.
        """
        peer, resumed_at = self.peer, self.peer.metrics.step
        place = {"peer_id": peer.peer_id, "address": peer.address, "progress": self.outer.progress}
        self.events.write("started", **place, resumed_at=resumed_at)
        if not self.finished:
            self._pause_if_asked()  # the peer may have been started outside its hours
        self.model.train()
        self._measured_s = time.monotonic()
        self._run(self._step, measure=self._measure, evaluate=self._evaluate)
        if self.finished and peer.metrics.step > resumed_at:  # not if it had finished before a restart
            self._close()
        if not peer.leave_requested.is_set():  # a request to leave must not wait for an evaluation
            self._evaluate()
        return self._finish()

    def serve(self) -> None:
        """Serve the state to newcomers after the end of the run, until this peer is asked to leave."""
        self.peer.leave_requested.wait()

    def _step(self) -> bool:
        """Take an inner step. Return False if the schedule is complete, or if the peer was asked to leave."""
        peer, metrics, spec, batches = self.peer, self.peer.metrics, self.spec, self.batches
        assert batches
        self._pause_if_asked()
        if self.finished or peer.leave_requested.is_set():
            return False
        batch = draw(lambda: batches.get(until=peer.leave_requested.is_set))
        if batch is None:  # the peer was asked to leave while it waited for data
            return False
        seed = step_seed(peer.peer_id, metrics.step)
        self._losses.append(self.inner_step(batch, progress=self.outer.progress, seed=seed))
        self._num_steps += 1
        self._count_tokens(spec.train.batch_size * spec.data.sequence_length)
        self.outer.step()
        return True

    def _loss_of_a_batch(self) -> float:
        assert self.batches
        batch = self.batches.get(until=self.peer.leave_requested.is_set)
        return 0.0 if batch is None else evaluate_loss(self.model, [batch])

    def _measure(self) -> None:
        """Update the loss and the speed with the steps since the last call. This synchronises with the accelerator."""
        metrics, now_s = self.peer.metrics, time.monotonic()
        metrics.loss = float(torch.stack(self._losses).mean())
        metrics.inner_steps_per_s = self._num_steps / (now_s - self._measured_s)
        metrics.tokens_per_s = metrics.inner_steps_per_s * self.spec.train.batch_size * self.spec.data.sequence_length
        self._losses.clear()
        self._measured_s, self._num_steps = now_s, 0

    def _pause_if_asked(self) -> None:
        if self.peer.pause_requested.is_set():
            began_s = time.monotonic()
            self._wait_while_paused()
            self._measured_s += time.monotonic() - began_s

    def _evaluate(self) -> None:
        """Measure the loss on the held-out sequences, which are the same for every peer."""
        began_s = time.monotonic()
        loss = self.inner_step.evaluate(self.validation, progress=self.peer.progress)
        self._measured_s += time.monotonic() - began_s
        self._evaluated(loss)


def draw(next_batch: Callable[[], Tensor | None]) -> Tensor | None:
    """Return the next batch. Raises DataError if there is no memory for it; a restart can resume the run."""
    try:
        return next_batch()
    except MemoryError:
        raise DataError(
            "no memory is left for the next batch; the last checkpoint is intact; free some memory and run the same "
            "command again to resume"
        ) from None


def step_seed(peer_id: str, step: int) -> int:
    """Return a seed for the random draws (dropout) of a peer's step. The seed is the same after a restart."""
    return int.from_bytes(blake3(f"{peer_id}/{step}".encode()).digest(length=SEED_BYTES), "little")
