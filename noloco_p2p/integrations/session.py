"""Run NoLoCo within another library's training run, from the first step to the last. All callbacks share this code."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.outer.noloco import NoLoCo, Swarm
from noloco_p2p.telemetry.console import describe_swaps
from noloco_p2p.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOG_S = 10.0  # seconds between two lines in the log


class Host(Swarm, Protocol):
    """The part of a peer that a callback needs. `noloco_p2p.Peer` implements it."""

    pause_requested: threading.Event

    def wait_while_paused(self) -> None: ...


class InTrainer:
    """The part of a callback that all trainers share: a running `peer`, and the `NoLoCo` object of a training run.

    `options` are the user's options for `NoLoCo`.
    """

    def __init__(self, peer: Host, **options: Any) -> None:
        self.peer = peer
        self._options = options
        self._outer: NoLoCo | None = None
        self._log_at_s = 0.0

    @property
    def outer(self) -> NoLoCo:
        """The `NoLoCo` object of the current training run, or of the last one."""
        if self._outer is None:
            raise SettingsError("the Trainer has not started training, so there is no NoLoCo object yet")
        return self._outer

    def _begin(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, saved: Mapping[str, Any] | None, **more: Any
    ) -> None:
        """Begin a training run.

        `saved` is the outer state in the checkpoint from which the trainer resumes, or None. The user's options take
        precedence over it, and over `more`. Raises ModelError if the model is on several devices. Errors of `NoLoCo`
        propagate to the caller.
        """
        devices = sorted({str(param.device) for param in model.parameters()})
        if len(devices) > 1:
            raise ModelError(
                f"the parameters of the model are on {' and '.join(devices)}, but NoLoCo needs all of them on one "
                "device; load the model without a device_map and without offloading"
            )
        if saved is not None:
            more["resume"] = saved
        self._log_at_s = time.monotonic() + LOG_S
        self._outer = NoLoCo(model, optimizers, self.peer, **{**more, **self._options})
        if self._outer.resumed:
            log.warning(
                "NoLoCo resumed from this peer's own checkpoint at step %d, but the trainer's schedule, data and step "
                "count start from scratch; to continue them as well, resume from a checkpoint of the trainer",
                self._outer.num_steps,
            )

    def _step_taken(self) -> bool:
        """After an inner step, pause if this peer is asked to. Return whether it is time to log the metrics.

        A pause begins with a checkpoint, and lasts until this peer is resumed or asked to leave.
        """
        if self.peer.pause_requested.is_set():
            self._save()
            log.info("paused; `noloco status` shows why, and how to resume")
            self.peer.wait_while_paused()
            log.info("asked to leave" if self.peer.leave_requested.is_set() else "resumed")
        if time.monotonic() < self._log_at_s:
            return False
        self._log_at_s = time.monotonic() + LOG_S
        self.peer.count_traffic()
        log.info("step %d | %s", self.outer.num_steps, describe_swaps(self.peer.metrics))
        return True

    def _end(self) -> None:
        """Let the last swaps end after the last step, and save the state for newcomers and for a restart."""
        self._save()
        self.outer.detach()

    def _save(self) -> None:
        self.outer.pause()
        try:
            self.outer.save()
        except CheckpointError as error:  # a full disk must not end training
            log.error("%s", error)


def logged_values(metrics: Metrics) -> dict[str, float]:
    """Return the NoLoCo metrics that a trainer adds to its own logs."""
    values = {"noloco/progress": metrics.progress, "noloco/swaps": metrics.swaps}
    return values if metrics.apart is None else {**values, "noloco/apart": metrics.apart}


def refuse(trainer: str, what: str) -> SettingsError:
    """Return the error for a trainer that spreads a model over several devices."""
    return SettingsError(
        f"NoLoCo needs the whole model in one process on one device, but this {trainer} uses {what}; start one process "
        "per GPU, each with its own CUDA_VISIBLE_DEVICES and its own peer"
    )


def no_outer_state(where: str) -> CheckpointError:
    """Return the error for a trainer's checkpoint that was written without NoLoCo."""
    return CheckpointError(
        f"{where} contains no NoLoCo state, so the position in the run is unknown; resume from a checkpoint that was "
        "written with NoLoCoCallback, or pass NoLoCoCallback(peer, resume=False) to join the run with these weights"
    )
