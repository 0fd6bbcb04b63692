"""Train one stage of a model: compute its tasks in the pipeline, and swap weights with other peers of the stage."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from noloco_p2p.data.stream import validation_batches
from noloco_p2p.devices import free_memory, has_own_memory
from noloco_p2p.errors import Left, SettingsError
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import num_rooms
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.peer.peer import Peer
from noloco_p2p.peer.run_folder import first_number, stage_folder
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import count, numbered_stages
from noloco_p2p.trainer.compute import Compute, choose_device
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.loop import TrainerBase
from noloco_p2p.trainer.model import build_tokenizer, check_vocabulary
from noloco_p2p.trainer.needs import Counts, Needs, estimate
from noloco_p2p.trainer.stage import Stage, build_stage, train_of_stage
from noloco_p2p.trainer.stage_choice import StageNeeds, draw_stage, missing_stages, needier_stage
from noloco_p2p.trainer.stage_flow import StageFlow
from noloco_p2p.trainer.stage_work import StageLoop
from noloco_p2p.trainer.start import has_start, load_start, revive

log = logging.getLogger(__name__)

TURN_S = 0.1  # the longest wait for a task
LOOK_S = 1.0  # shortest time between two checks of everything except the tasks
LEAVE_S = 15.0  # time limit for finishing the current tasks before the peer leaves or pauses
LAST_EVALUATION_S = 120.0
SWITCH_EPOCH_S = 120.0  # in each such period, one peer of a stage, drawn at random, may switch to another stage
ROOM_SHARE = 0.25  # share of the free main memory that microbatches may use
RECENT_S = 30.0
SHORTEST_S = 1.0  # the shortest time over which a speed is measured


class StageTrainer(TrainerBase):
    """One peer of a run with stages.

    The peer holds the stage that the settings name, or else the stage of its newest checkpoint. If there is neither, it
    draws a stage at random, weighted by need, from the stages that fit into its memory. A stage that has trained never
    restarts from its initial weights. If no peer holds such a stage, a newcomer without a checkpoint has to wait.
    Raises the same errors as `Trainer`, and Left if the peer is asked to leave while it waits.
    """

    def __init__(
        self, peer: Peer, *, say: Callable[[str], None], stage: int | None = None, look_s: float = LOOK_S
    ) -> None:
        self._look_s = look_s
        spec, settings = TrainerSpec.of(peer.spec), peer.settings
        super().__init__(peer, spec, say=say)
        self.device = choose_device(settings.device)
        peer.membership.look_around()
        self._unfit = StageNeeds.as_cut(spec, folders=settings.models).unfit(settings)
        self._fitting = [stage for stage in range(spec.pipeline.stages) if stage not in self._unfit]
        self.stage = self._choose() if stage is None else stage
        self.line_begins = f"stage {self.stage} | "
        peer.metrics.loss = None  # it belongs to the stage before a switch, as does the validation loss
        peer.metrics.evaluated(None)
        self.validation: list[Tensor] = []  # of a head
        self.switches_to: int | None = None  # another stage, which needs this peer more
        peer.membership.hold(self.stage)
        folder = stage_folder(peer.run_folder, self.stage)
        revives = Checkpoints(folder, keep=settings.keep_checkpoints).newest() is None and self._wait_for_state()
        compute = Compute.of(settings, num_ranks=1)
        with peer.progress.task(f"building stage {self.stage}"):
            built = self._build(compute, revives=revives)
        if built.is_head:
            tokenizer = build_tokenizer(spec.data, folders=settings.models)
            check_vocabulary(built.model, tokenizer)
            size = spec.pipeline.microbatch
            corpus = self._open_data(tokenizer, batch_size=size)
            batches = validation_batches(corpus, num_sequences=spec.evaluate.num_sequences, batch_size=size)
            self.validation = [batch for batch in batches if len(batch) == size]
        self.inner_step = InnerStep(built.model, train_of_stage(spec), compute)
        self._enter(folder, follows_caller=not built.is_head)
        if not self.outer.resumed and not self.outer.entered:
            if revives:
                self.outer.progress = median([other.progress for other in peer.membership.members()] or [0.0])
            self._begin_fork(is_revived=revives)
        self.work = StageLoop(built, spec, self.inner_step, self.outer)
        self._microbatch_tokens = spec.pipeline.microbatch * spec.data.sequence_length
        self._begun = peer.metrics.microbatches, peer.metrics.lost_microbatches, peer.metrics.late_microbatches
        self._evaluates_until_s: float | None = None
        self._looked_s = 0.0
        self._missing: list[int] = []
        self._switch: tuple[int | None, float] = None, 0.0  # the stage that needs this peer more, and when to switch

    # choosing and building the stage

    def _choose(self) -> int:
        spec, settings = self.spec, self.peer.settings
        num_stages = spec.pipeline.stages
        if settings.stage is not None:
            if settings.stage >= num_stages:
                raise SettingsError(
                    f"--stage {settings.stage} does not exist: the run {spec.name} has stages 0 to {num_stages - 1}"
                )
            if settings.stage in self._fitting:
                return settings.stage
            raise SettingsError(f"--stage {settings.stage}: {self._unfit[settings.stage]}")
        kept = [stage for stage in range(num_stages) if stage_folder(self.peer.run_folder, stage).is_dir()]
        if kept:
            return max(kept, key=self._held_at) if len(kept) > 1 else kept[0]
        if not self._fitting:
            raise SettingsError("this machine cannot hold any stage: " + "; ".join(self._unfit.values()))
        return draw_stage(
            self.peer.membership.members(), self._fitting, num_stages=num_stages, rng=random.SystemRandom()
        )

    def _held_at(self, stage: int) -> float:
        """Return the position in the run at which this peer last saved a stage. Unlike times, copying does not change
        it.
        """
        newest = Checkpoints(stage_folder(self.peer.run_folder, stage)).newest()
        return newest.meta["outer"]["progress"] if newest else -1.0

    def _build(self, compute: Compute, *, revives: bool) -> Stage:
        spec, settings = self.spec, self.peer.settings
        stage = build_stage(
            spec.model,
            cut_of(spec),
            index=self.stage,
            sequence_length=spec.data.sequence_length,
            folders=settings.models,
            compute=compute,
        )
        if revives and settings.revive_from:
            revive(stage.model, settings.revive_from)
            self.say(f"stage {self.stage} continues from {settings.revive_from}")
        else:
            load_start(stage.model, spec.model.start, state_dir=settings.state_dir)
        torch.nn.Module.to(stage.model, self.device)  # transformers' own `to` has an unusable type
        return stage

    def _wait_for_state(self) -> bool:
        """Wait for a peer of this stage if this peer cannot start the stage itself.

        If the run has begun, a peer cannot start a stage, because only peers of the stage have its trained weights. The
        same is true if the start state of the run is not on this machine. Returns True if no peer of the stage answers
        and the weights come from `settings.revive_from` instead. Raises Left if the peer is asked to leave.
        """
        peer, told = self.peer, False
        while (why := self._lacks_state()) and not peer.membership.answering():
            if peer.settings.revive_from:
                return True
            if not told:
                told = True
                self.say(f"{why} (the operator of the run can start such a peer with --revive-from)")
            if peer.leave_requested.wait(self._look_s):
                raise Left("asked to leave before training began")
        return False

    def _lacks_state(self) -> str:
        """Return the reason why this peer cannot start its stage on its own, or an empty string if it can."""
        spec, settings = self.spec, self.peer.settings
        if any(other.progress > 0 for other in self.peer.membership.members()):
            return (
                f"stage {self.stage} has been trained, but no live peer holds it; waiting for a peer with a checkpoint "
                "of this stage"
            )
        if not has_start(spec.model.start, state_dir=settings.state_dir):
            return (
                f"the start state of the run is not in {settings.state_dir}, and no live peer holds stage "
                f"{self.stage}; waiting for a peer that holds it"
            )
        return ""

    # the needs of the run

    def needs(self) -> Needs:
        """Estimate the memory, disk space and swap traffic that the run needs on this machine.

        The speed is measured with a few microbatches.
        """
        spec = self.spec
        microbatch_s = self.work.probe()
        self.peer.metrics.capacity = self._microbatch_tokens / microbatch_s
        self.say(
            f"stage {self.stage} of {spec.pipeline.stages}{' (head)' if self.stage == 0 else ''}: "
            f"this machine processes {count(self.peer.metrics.capacity)} tokens/s"
        )
        step = self.inner_step
        step.forget()
        params, matrices = step.trainable.values(), step.muon_matrices
        counts = Counts(sum(each.numel() for each in params), sum(each.numel() for each in matrices))
        return estimate(spec, counts, self.peer.settings, has_gpu=has_own_memory(self.device))

    # training

    def train(self) -> Path | None:
        """Train until all heads have finished, `max_steps` steps are taken, or the peer is asked to leave.

        Returns the checkpoint that was written at the end, or None if it could not be written.
        """
        peer, resumed_at = self.peer, self.peer.metrics.step
        place = {"peer_id": peer.peer_id, "address": peer.address, "stage": self.stage}
        self.events.write("started", **place, resumed_at=resumed_at)
        self._begin()
        self.work.stage.model.train()
        self._forget_speed()
        self._run(self._step, measure=self._measure, evaluate=self._evaluate)
        if not self.finished:
            self._settle()
        elif peer.metrics.step > resumed_at and not peer.leave_requested.is_set():
            self._close()
            self._last_evaluation()
        if self.switches_to is not None:
            self.outer.pause()  # otherwise this peer would swap weights of this stage with peers of the other one
            peer.announce("paused")  # no peer sends to it until it has entered the other stage
            peer.membership.stop_flow()
        return self._finish()

    def serve(self) -> None:
        """Compute the tasks that other peers still send after the end of the run, until this peer is asked to leave."""
        while not self.peer.leave_requested.is_set():
            self._turn()

    def _begin(self) -> None:
        spec, work = self.spec, self.work
        room_bytes = 2 * work.forward_bytes + work.backward_bytes  # the encoded input, output and gradient
        rooms = num_rooms(spec, most=int(ROOM_SHARE * free_memory()) // room_bytes)
        progress, batches = self.outer.progress, self.batches
        number = first_number(self.peer.run_folder)
        self._flow = self.peer.membership.start_flow(
            lambda network: StageFlow(
                network, work, num_rooms=rooms, progress=progress, batches=batches, first_number=number
            )
        )

    def _turn(self) -> bool:
        """Compute the next task, or wait briefly for one.

        Returns False once no head is training. After that, a peer still serves heads that evaluate. Raises any error of
        a head's data source.
        """
        if self._flow.turn(TURN_S):
            return True
        if self._flow.node.is_over:
            self.work.finish()
        return not self._flow.node.is_over

    def _step(self) -> bool:
        """Compute a task, and about once a second look at everything else. Return False at the end of training."""
        goes_on = self._turn()
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._look_s:
            self._looked_s = now_s
            self._count()
            missing = missing_stages(
                self.peer.membership.members(), own=self.stage, num_stages=self.spec.pipeline.stages
            )
            if missing != self._missing:
                self._missing = missing
                self.peer.membership.wait_for(missing)
                waits = f"waiting for {numbered_stages(missing)}, which no peer holds"
                self.say(waits if missing else "every stage has a peer")
            self._look_at_evaluation()
            self._look_for_need(missing)
        if self.peer.pause_requested.is_set():
            self._settle()
            self._wait_while_paused()
            self._forget_speed()
            self._flow.tell(self._flow.node.rejoin)
        return goes_on and self.switches_to is None

    def _look_for_need(self, missing: Sequence[int]) -> None:
        """Switch to a stage that needs this peer more, if it still does after a random wait."""
        peer, now_s = self.peer, time.monotonic()
        own = Candidate(peer.peer_id, "", stage=self.stage, capacity=peer.metrics.capacity)
        target = None
        if peer.settings.stage is None and peer.metrics.capacity and not missing:
            epoch = int(time.time() / SWITCH_EPOCH_S)
            num_stages = self.spec.pipeline.stages
            target = needier_stage(peer.membership.members(), own, self._fitting, num_stages=num_stages, epoch=epoch)
        if target is None or target != self._switch[0]:
            self._switch = target, now_s + random.uniform(0.2, 0.6) * SWITCH_EPOCH_S
        elif now_s >= self._switch[1]:
            self.say(f"switching to stage {target}, which needs this peer more than stage {self.stage} does")
            self.switches_to = target

    def _count(self) -> None:
        """Update the loss since the last report, which only a head knows, the counters, the speed and the capacity."""
        metrics, node, (done, lost, late) = self.peer.metrics, self._flow.node, self._begun
        if self.work.loss_tokens:
            metrics.loss = self.work.loss_sum / self.work.loss_tokens
        before, metrics.microbatches = metrics.microbatches, done + node.num_done
        self._count_tokens((metrics.microbatches - before) * self._microbatch_tokens)
        metrics.lost_microbatches, metrics.late_microbatches = lost + node.num_lost, late + node.num_late
        metrics.queue = node.num_held
        steps_per_s, done_per_s = self._speed.at(time.monotonic(), self.work.steps, node.num_done)
        metrics.inner_steps_per_s, metrics.tokens_per_s = steps_per_s, done_per_s * self._microbatch_tokens
        if self.work.microbatch_s:
            metrics.capacity = self._microbatch_tokens / self.work.microbatch_s

    def _measure(self) -> None:
        self._count()
        self.work.loss_sum, self.work.loss_tokens = 0.0, 0

    def _forget_speed(self) -> None:
        self._speed = RecentSpeed(time.monotonic(), self.work.steps, self._flow.node.num_done)

    # evaluation

    def _evaluate(self) -> None:
        """On a head, send the held-out sequences through the pipeline while training continues."""
        if not self.validation or self._evaluates_until_s is not None:
            return
        self.work.evaluated_sum, self.work.evaluated_tokens = 0.0, 0
        self._evaluates_until_s = time.monotonic() + LAST_EVALUATION_S
        assert isinstance(self._flow.node, Head)
        self._flow.tell(partial(self._flow.node.evaluate, self.validation))

    def _look_at_evaluation(self) -> None:
        if self._evaluates_until_s is None:
            return
        wanted = sum(batch[:, 1:].numel() for batch in self.validation)
        if self.work.evaluated_tokens >= wanted:
            self._evaluates_until_s = None
            self._evaluated(self.work.evaluated_sum / self.work.evaluated_tokens)

    def _last_evaluation(self) -> None:
        """Evaluate the final weights, or give up if the other stages are gone."""
        self._evaluates_until_s = None
        self._evaluate()
        while self._evaluates_until_s is not None and not self.peer.leave_requested.is_set():
            if time.monotonic() > self._evaluates_until_s:
                log.warning("the last evaluation was abandoned because other stages did not answer")
                return
            self._turn()
            self._look_at_evaluation()

    # leaving

    def _settle(self) -> None:
        """Accept no new tasks, and finish the current tasks if that does not take long.

        The gradients of an unfinished step are dropped.
        """
        self._flow.tell(self._flow.node.leave)
        until_s = time.monotonic() + LEAVE_S
        while time.monotonic() < until_s and not self._flow.node.is_idle:
            self._turn()
        self.inner_step.forget()


class RecentSpeed:
    """The rate at which counters have grown over the last RECENT_S seconds. All times must come from the same clock."""

    def __init__(self, now_s: float, *counts: int) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque([(now_s, counts)])

    def at(self, now_s: float, *counts: int) -> tuple[float, ...]:
        """Record the counts at `now_s`, and return the growth of each count per second."""
        samples = self._samples
        samples.append((now_s, counts))
        while samples[1][0] <= now_s - RECENT_S and len(samples) > 2:
            samples.popleft()
        began_s, before = samples[0]
        elapsed_s = max(now_s - began_s, SHORTEST_S)
        return tuple((now - then) / elapsed_s for now, then in zip(counts, before, strict=True))
