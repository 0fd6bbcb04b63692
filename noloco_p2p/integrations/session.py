"""Run NoLoCo within another library's training run, from the first step to the last. All callbacks share this code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.outer.noloco import NoLoCo, RoundResult, Swarm
from noloco_p2p.telemetry import console
from noloco_p2p.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class Host(Swarm, Protocol):
    """The part of a peer that a callback needs. `noloco_p2p.Peer` implements it."""

    leave_requested: threading.Event
    pause_requested: threading.Event

    def wait_while_paused(self) -> None: ...


class TrainingSession:
    """One training run. Each round is logged, and its result is passed to `told` and to the user's `on_round`.

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
        told: Callable[[RoundResult], None] = lambda result: None,
    ) -> None:
        check_one_device(model)
        self._peer = peer
        self._told = told
        self._on_round: Callable[[RoundResult], None] = options.get("on_round", lambda result: None)
        resume = {} if saved is None else {"resume": saved}
        self.outer = NoLoCo(model, optimizers, peer, **{**resume, **options, "on_round": self._round_ended})
        if self.outer.resumed:
            log.warning(
                "NoLoCo resumed from this peer's own checkpoint at step %d, but the trainer's schedule, data and step "
                "count start from scratch; to continue them as well, resume from a checkpoint of the trainer",
                self.outer.num_steps,
            )

    def pause_if_asked(self) -> None:
        """If this peer is paused, write a checkpoint, and wait until it is resumed or asked to leave.

        Call this only between two steps.
        """
        if not self._peer.pause_requested.is_set():
            return
        self._withdraw()
        self._save()
        log.info("paused; `noloco status` shows why, and how to resume")
        self._peer.wait_while_paused()
        log.info("asked to leave" if self._peer.leave_requested.is_set() else "resumed")

    def end(self) -> None:
        """End the last round after the last step, and save the state for newcomers and for a restart."""
        self._withdraw()
        self._save()
        self.outer.detach()

    def _withdraw(self) -> None:
        result = self.outer.withdraw()
        if result:
            self._round_ended(result)

    def _save(self) -> None:
        try:
            self.outer.save()
        except CheckpointError as error:  # a full disk must not end training
            log.error("%s", error)

    def _round_ended(self, result: RoundResult) -> None:
        self._told(result)
        metrics = self._peer.metrics
        apart = "" if metrics.spread is None else f" | {100 * metrics.spread:.2g} % apart"
        log.info("round %d | %s | loss %s%s", result.round, metrics.last_outcome, console.loss(metrics.loss), apart)
        self._on_round(result)


def logged_values(metrics: Metrics) -> dict[str, float]:
    """Return the NoLoCo metrics that a trainer adds to its own logs."""
    values = {
        "noloco/round": metrics.round,
        "noloco/progress": metrics.progress,
        "noloco/swaps": metrics.swaps,
        "noloco/alone": metrics.alone,
    }
    return values if metrics.spread is None else {**values, "noloco/spread": metrics.spread}


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
