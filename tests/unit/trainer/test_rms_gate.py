from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.trainer.stage_work import FIRST_TIMES, HISTORY_FRAMES, LEAST_FRAMES, MOST_TIMES, RmsGate

LATER = int(HISTORY_FRAMES * FIRST_TIMES / MOST_TIMES)  # frames, after which the limit is ten times the usual size
EARLY = LEAST_FRAMES + 100  # while sizes change most; honest peers send gradients that differ that much


def gate_after(*sizes: float) -> RmsGate:
    gate = RmsGate("activations")
    for size in sizes:
        gate.admit(torch.full((2, 3), size))
    return gate


@pytest.mark.parametrize(
    ("num_frames", "size", "passes"),
    [
        *((LATER, size, True) for size in (0.2, 9.0, -9.0)),
        *((LATER, size, False) for size in (1000.0, 11.0, 0.05, 0.0)),
        *((EARLY, size, True) for size in (58.0, 0.02)),
        *((num, size, False) for num in (LEAST_FRAMES, HISTORY_FRAMES) for size in (1000.0, 0.001, 0.0)),
    ],
)
def test_frames_of_another_size_are_refused(num_frames: int, size: float, passes: bool) -> None:
    gate = gate_after(*[1.0] * num_frames)
    with nullcontext() if passes else pytest.raises(CorruptPayload, match="RMS of activations"):
        gate.admit(torch.full((2, 3), size))


def test_the_first_frames_pass_whatever_they_are() -> None:
    gate_after(*[10.0**power for power in range(LEAST_FRAMES)])


def test_the_usual_size_follows_a_real_change() -> None:
    gate = gate_after(*[1.0] * LATER)
    for _ in range(HISTORY_FRAMES // 2):
        with pytest.raises(CorruptPayload):
            gate.admit(torch.full((2, 3), 20.0))
    gate.admit(torch.full((2, 3), 20.0))
