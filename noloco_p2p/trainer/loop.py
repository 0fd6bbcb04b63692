"""Train a language model on text, with NoLoCo as its outer optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.errors import DataError
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.peer.peer import Peer
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.base import TrainerBase
from noloco_p2p.trainer.compute import Compute, choose_device, switch_on
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, build_tokenizer, check_vocabulary, count_parameters
from noloco_p2p.trainer.needs import Needs, check_memory, probe_step_s
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
        compute = Compute.of(settings, num_ranks=ranks.size if ranks else 1)
        size = {"sequence_length": spec.data.sequence_length, "folders": settings.models}
        num_parameters, self._frozen_bytes = count_parameters(spec.model, **size)
        check_memory(
            spec,
            settings,
            num_parameters=num_parameters,
            frozen_bytes=self._frozen_bytes,
            compute=compute,
            device=self.device,
        )
        super().__init__(peer, spec, say=say)
        tokenizer = build_tokenizer(spec.data, folders=settings.models)
        self._open_data(tokenizer, batch_size=spec.train.batch_size)
        with peer.progress.task("building the model"):
            self.model = build_model(spec.model, **size)
        check_vocabulary(self.model, tokenizer)
        load_start(self.model, spec.model.start, state_dir=settings.state_dir)
        self.inner_step, parameters = self._place_model(ranks, compute)
        self._enter(peer.run_folder / "checkpoints", parameters=parameters)
        if not self.outer.resumed and not self.outer.entered:
            self._begin_fork()
        self._losses: list[Tensor] = []  # since the last report
        self._measured_s, self._num_steps = time.monotonic(), 0  # steps since then

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
        return self._needs(probe_step_s(self.inner_step.backward, whole), frozen_bytes=self._frozen_bytes)

    def train(self) -> Path | None:
        """Train until the schedule is complete, `max_steps` steps are taken, or the peer is asked to leave.

        Returns the checkpoint that was written at the end, or None if it could not be written.
        """
        peer, resumed_at = self.peer, self.peer.metrics.step
        self.events.write("started", peer_id=peer.peer_id, address=peer.address, resumed_at=resumed_at)
        if not self.finished:
            self._pause_if_asked()  # the peer may have been started outside its hours
        if not peer.leave_requested.is_set():
            self._evaluate()
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
        metrics.tokens = (metrics.tokens or 0) + spec.train.batch_size * spec.data.sequence_length
        self.outer.step()
        return True

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
