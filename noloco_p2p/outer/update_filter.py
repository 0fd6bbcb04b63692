"""Filter updates: the gates check the vectors of a swap, and a loss check evaluates the model itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from noloco_p2p.gossip.outcome import Alone, Correction, LonelyCause, Outcome, Received
from noloco_p2p.outer.chunk_filter import UNSCALED, Clipped, FilterVerdict
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossCheck:
    """A gate that evaluates the model on a private batch, and undoes a swap that raises the loss too much.

    During a checked step, the slow weights, the momentum and the model's weights are kept twice, which takes up to 12
    more bytes per parameter. A gradient that arrives after its boundary is not checked.

    Args:
        measure: A function that returns the current loss of the model, in nats per token, on a batch that no partner
            knows. It is called twice per swap.
        max_rise: The largest rise in the loss that a swap may cause.
    """

    measure: Callable[[], float]
    max_rise: float


class UpdateFilter:
    """The filter through which one peer takes its outer steps. It counts what the gates refuse or clip.

    `on_change` is called before the slow weights or the momentum change.
    """

    def __init__(
        self,
        state: OuterState,
        metrics: Metrics,
        loss_check: LossCheck | None,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._on_change = on_change
        self._metrics = metrics
        self._loss_check = loss_check
        self.clipped = Clipped()  # in the last outer step
        self.scales = UNSCALED  # the factors for the outer gradients in the last outer step

    def step(self, outcome: Outcome, *, is_closing: bool) -> tuple[Outcome, bool]:
        """Take the outer step of a round.

        Returns the outcome that was applied, and whether this peer's weights were non-finite.
        """
        self._on_change()
        admitted_outcome, verdict = admitted(outcome, self._state)
        if verdict.refusal:
            self._metrics.refused_gradients += 1
        if isinstance(admitted_outcome, Alone) or not self._loss_check:
            return admitted_outcome, self._apply(admitted_outcome, verdict, is_closing=is_closing)
        before = self._state.copy()
        loss = self._loss_check.measure()
        diverged = self._apply(admitted_outcome, verdict, is_closing=is_closing)
        if diverged:  # this peer's own weights are non-finite, so there is no loss to compare
            return admitted_outcome, True
        rise = self._loss_check.measure() - loss
        if rise <= self._loss_check.max_rise:  # false for NaN
            return admitted_outcome, False
        self._state.restore(before)
        self._metrics.refused_losses += 1
        alone = _refused(admitted_outcome.received, f"it raised the loss on a private batch by {rise:.3g} nats/token")
        return alone, self._apply(alone, FilterVerdict(), is_closing=is_closing)

    def correct(self, correction: Correction) -> None:
        """Apply a late part that arrived after its boundary."""
        metrics, verdict = self._metrics, self._state.judge(correction.gradient, correction.agreed)
        if verdict.refusal:
            metrics.refused_gradients += 1
            what = "the late part of %s was refused: %s | early part kept"
            log.warning(f"round %d | {what}", correction.round, named(correction.partner), verdict.refusal)
            return
        self._on_change()
        self._state.correct(correction, scales=verdict.scales)
        metrics.clipped_gradients += verdict.scales.partner < 1
        metrics.late += 1

    def _apply(self, outcome: Outcome, verdict: FilterVerdict, *, is_closing: bool) -> bool:
        metrics, received = self._metrics, None if isinstance(outcome, Alone) else outcome.received
        clipped = self._state.step(received, scales=verdict.scales, is_closing=is_closing)
        self.clipped, self.scales = clipped, verdict.scales
        metrics.clipped_gradients += verdict.scales.partner < 1
        metrics.clipped_offsets += clipped.num_clipped
        metrics.gated_offsets += clipped.num_pieces
        return clipped.num_lost > 0


def admitted(outcome: Outcome, state: OuterState) -> tuple[Outcome, FilterVerdict]:
    """Apply the gates that can refuse a whole swap. After a refusal, the outcome is that of a solo round."""
    if isinstance(outcome, Alone):
        return outcome, FilterVerdict()
    received = outcome.received
    verdict = state.judge_swap(received)
    if not verdict.refusal:
        return outcome, verdict
    return _refused(received, verdict.refusal), verdict


def _refused(received: Received, why: str) -> Alone:
    reason = f"the update from {named(received.partner)} was refused: {why}"
    return Alone(reason, LonelyCause.REFUSED_STATE, received.link)
