"""Filter updates: the gates check the vectors of a swap before they are applied."""

from __future__ import annotations

import logging
from collections.abc import Callable

from noloco_p2p.gossip.outcome import Alone, Correction, LonelyCause, Outcome
from noloco_p2p.outer.chunk_filter import UNSCALED, Clipped, FilterVerdict
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class UpdateFilter:
    """The filter through which one peer takes its outer steps. It counts what the gates refuse or clip.

    `on_change` is called before the slow weights or the momentum change.
    """

    def __init__(self, state: OuterState, metrics: Metrics, *, on_change: Callable[[], None] = lambda: None) -> None:
        self._state = state
        self._on_change = on_change
        self._metrics = metrics
        self.clipped = Clipped()  # in the last outer step
        self.scales = UNSCALED  # the factors for the outer gradients in the last outer step

    def step(self, outcome: Outcome, *, is_closing: bool) -> tuple[Outcome, bool]:
        """Take the outer step of a round.

        Returns the outcome that was applied, and whether this peer's weights were non-finite.
        """
        self._on_change()
        outcome, verdict = admitted(outcome, self._state)
        metrics, received = self._metrics, None if isinstance(outcome, Alone) else outcome.received
        clipped = self._state.step(received, scales=verdict.scales, is_closing=is_closing)
        self.clipped, self.scales = clipped, verdict.scales
        metrics.refused_gradients += bool(verdict.refusal)
        metrics.clipped_gradients += verdict.scales.partner < 1
        metrics.clipped_offsets += clipped.num_clipped
        metrics.gated_offsets += clipped.num_pieces
        return outcome, clipped.num_lost > 0

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


def admitted(outcome: Outcome, state: OuterState) -> tuple[Outcome, FilterVerdict]:
    """Apply the gates that can refuse a whole swap. After a refusal, the outcome is that of a solo round."""
    if isinstance(outcome, Alone):
        return outcome, FilterVerdict()
    received = outcome.received
    verdict = state.judge_swap(received)
    if not verdict.refusal:
        return outcome, verdict
    reason = f"the update from {named(received.partner)} was refused: {verdict.refusal}"
    return Alone(reason, LonelyCause.REFUSED_STATE, received.link), verdict
