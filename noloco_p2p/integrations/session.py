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

    def count_traffic(self) -> None: ...


class TrainingSession:
    """One training run.

    `options` are the user's options for `NoLoCo`. `saved` is the outer state in the checkpoint from which the trainer
    resumes, or None. The options take precedence over the saved state. Raises ModelError if the model is on several
    devices. Errors of `NoLoCo` propagate to the caller.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        peer: Host,
        options: Mapping[str, Any],
        *,
        saved: Mapping[str, Any] | None,
    ) -> None:
        check_one_device(model)
        self._peer = peer
        self._log_at_s = time.monotonic() + LOG_S
        self.outer = NoLoCo(model, optimizers, peer, **({} if saved is None else {"resume": saved}), **options)
        if self.outer.resumed:
            log.warning(
                "NoLoCo resumed from this peer's own checkpoint at step %d, but the trainer's schedule, data and step "
                "count start from scratch; to continue them as well, resume from a checkpoint of the trainer",
                self.outer.num_steps,
            )

    def step_taken(self) -> bool:
        """After an inner step, pause if this peer is asked to. Return whether it is time to log the metrics.

        A pause begins with a checkpoint, and lasts until this peer is resumed or asked to leave.
        """
        if self._peer.pause_requested.is_set():
            self._pause()
        if time.monotonic() < self._log_at_s:
            return False
        self._log_at_s = time.monotonic() + LOG_S
        self._peer.count_traffic()
        log.info("step %d | %s", self.outer.num_steps, describe_swaps(self._peer.metrics))
        return True

    def _pause(self) -> None:
        self.outer.pause()
        self._save()
        log.info("paused; `noloco status` shows why, and how to resume")
        self._peer.wait_while_paused()
        log.info("asked to leave" if self._peer.leave_requested.is_set() else "resumed")

    def end(self) -> None:
        """Let the last swaps end after the last step, and save the state for newcomers and for a restart."""
        self.outer.pause()
        self._save()
        self.outer.detach()

    def _save(self) -> None:
        try:
            self.outer.save()
        except CheckpointError as error:  # a full disk must not end training
            log.error("%s", error)


def logged_values(metrics: Metrics) -> dict[str, float]:
    """Return the NoLoCo metrics that a trainer adds to its own logs."""
    values = {"noloco/progress": metrics.progress, "noloco/swaps": metrics.swaps}
    return values if metrics.apart is None else {**values, "noloco/apart": metrics.apart}


def check_one_device(model: nn.Module) -> None:
    devices = sorted({str(param.device) for param in model.parameters()})
    if len(devices) > 1:
        raise ModelError(
            f"the parameters of the model are on {' and '.join(devices)}, but NoLoCo needs all of them on one device; "
            "load the model without a device_map and without offloading"
        )


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
