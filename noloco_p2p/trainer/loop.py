"""Train a language model on text, with NoLoCo as its outer optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.errors import DataError
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.base import TrainerBase
from noloco_p2p.trainer.compute import Compute, choose_device, switch_on
from noloco_p2p.trainer.gauges import Gauges
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, build_tokenizer, check_vocabulary, count_parameters
from noloco_p2p.trainer.needs import Needs, check_memory, estimate, probe_step_s
from noloco_p2p.trainer.ranks import Ranks
from noloco_p2p.trainer.sharded import ShardedParameters, ShardedStep, shard
from noloco_p2p.trainer.start import load_start

SEED_BYTES = 6  # 2 ** 48 seeds


class Trainer(TrainerBase):
    """A training peer, with the model, data, optimizers, outer step and checkpoints that its run spec defines.

    It resumes from the newest checkpoint on this machine, or else from the state of a live peer. If there is neither,
    it starts from the initial weights that the spec defines. `say` prints a line for the user. If `ranks` is given,
    this process leads the other processes, which train the same model on the other GPUs of this machine.
    """

    def __init__(self, peer: Peer, *, say: Callable[[str], None], ranks: Ranks | None = None) -> None:
        spec, settings = TrainerSpec.of(peer.spec), peer.settings
        self.device = ranks.device if ranks else choose_device(settings.device)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        compute = Compute.of(settings, num_ranks=ranks.size if ranks else 1)
        size = {"sequence_length": spec.data.sequence_length, "folders": settings.models}
        num_parameters, frozen_bytes = count_parameters(spec.model, **size)
        check_memory(
            spec,
            settings,
            num_parameters=num_parameters,
            frozen_bytes=frozen_bytes,
            compute=compute,
            device=self.device,
        )
        super().__init__(peer, spec, say=say)
        tokenizer = build_tokenizer(spec.data, folders=settings.models)
        self.batches, self.validation = self._open_data(
            tokenizer, batch_size=spec.train.batch_size, pin_memory=self.device.type == "cuda"
        )
        with peer.progress.task("building the model"):
            self.model = build_model(spec.model, **size)
        check_vocabulary(self.model, tokenizer)
        self._losses: list[Tensor] = []
        load_start(self.model, spec.model.start, state_dir=settings.state_dir)
        self.inner_step, parameters = self._place_model(ranks, compute)
        self.outer = NoLoCo(
            self.model,
            self.inner_step,
            peer,
            save_every_s=0,
            checkpoints=Checkpoints(peer.run_folder / "checkpoints", keep=settings.keep_checkpoints),
            meta=self._meta,
            parameters=parameters,
        )
        if self.outer.resumed:
            self._resume(self.outer.resumed)
        elif not self.outer.entered:
            self._begin_fork()
        self.gauges = Gauges(
            self.model,
            self.device,
            sequence_length=spec.data.sequence_length,
            num_devices=ranks.size if ranks else 1,
        )

    def _place_model(self, ranks: Ranks | None, compute: Compute) -> tuple[InnerStep, FlatParameters]:
        """Move the model to the device, or shard it over all ranks."""
        switch_on(self.model, compute)
        if ranks:
            ranks.share(self.spec.model_dump(mode="json"))
            layout = FlatParameters(self.model).model_layout
            shard(self.model, ranks, compute)
            sharded_step = ShardedStep(self.model, self.spec.train, compute, ranks)
            return sharded_step, ShardedParameters(sharded_step, layout=layout)
        torch.nn.Module.to(self.model, self.device)  # transformers' own `to` has an unusable type
        return InnerStep(self.model, self.spec.train, compute), FlatParameters(self.model)

    def needs(self) -> Needs:
        """Estimate the memory, disk space and traffic that this run needs on this machine.

        The speed is measured with a few forward and backward passes. This also determines how many sequences fit into
        memory at a time.
        """
        self.model.train()
        batch_size, batch = self.spec.train.batch_size, self.validation[0]
        whole = batch.repeat(-(-batch_size // len(batch)), 1)[:batch_size]
        at_once = self.inner_step.fit(whole)
        per_gpu = -(-batch_size // self.inner_step.compute.num_ranks)
        if at_once < per_gpu:
            self.say(f"a step processes {per_gpu} sequences per GPU in micro-batches of {at_once}")
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
        """Train until the schedule is complete, `max_steps` steps are taken, or the peer is asked to leave.

        Returns the checkpoint that was written at the end, or None if it could not be written.
        """
        metrics, max_steps, resumed_at = self.peer.metrics, self.peer.settings.max_steps, self.peer.metrics.step
        last_step = None if max_steps is None else resumed_at + max_steps
        self.events.write("started", peer_id=self.peer.peer_id, address=self.peer.address, resumed_at=resumed_at)
        if not self.finished:
            self._pause_if_asked()  # the peer may have been started outside its hours
        if not self.peer.leave_requested.is_set():
            self._evaluate()
        self.model.train()
        self._begin_time()
        while not self.finished and not self.peer.leave_requested.is_set():
            batch = draw(self._next_batch)
            if batch is None:
                break
            seed = step_seed(self.peer.peer_id, metrics.step)
            loss = self.inner_step(batch, progress=self.outer.progress, seed=seed)
            self._losses.append(loss)
            self._timed_steps += 1
            self._count_tokens(self.spec.train.batch_size * self.spec.data.sequence_length)
            self.outer.step()
            self._do_what_is_due()
            self._pause_if_asked()
            if metrics.step == last_step:
                break
        self.batches.close()
        if self.finished and metrics.step > resumed_at:  # not if it had finished before a restart
            self._close()
        if not self.peer.leave_requested.is_set():  # a request to leave must not wait for an evaluation
            self._evaluate()
        return self._finish()

    def serve(self) -> None:
        """Serve the state to newcomers after the end of the run, until this peer is asked to leave."""
        self.peer.leave_requested.wait()

    def _pause_if_asked(self) -> None:
        if self.peer.pause_requested.is_set():
            self._wait_while_paused()

    def _next_batch(self) -> Tensor | None:
        """Return the next batch, or None if the peer was asked to leave while it waited for data."""
        return self.batches.get(until=self.peer.leave_requested.is_set)

    def _data(self) -> Prefetcher:
        return self.batches

    def _mean_loss(self) -> float | None:
        """Return the mean loss since the last report. This synchronises with the accelerator."""
        loss = float(torch.stack(self._losses).mean())
        self._losses.clear()
        return loss

    def _take_gauges(self) -> None:
        metrics = self.peer.metrics
        self.gauges.take(metrics, gradient_norm=self.inner_step.gradient_norm, waited_s=self.batches.waited_s)

    def _evaluate(self) -> None:
        """Measure the loss on the held-out sequences, which are the same for every peer."""
        began_s = time.monotonic()
        loss = self.inner_step.evaluate(self.validation, progress=self.peer.progress)
        self._timed_from_s += time.monotonic() - began_s
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
