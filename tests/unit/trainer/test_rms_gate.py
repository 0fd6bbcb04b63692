from __future__ import annotations

import pytest
import torch

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.trainer.rms_gate import HISTORY_FRAMES, LEAST_FRAMES, RmsGate


def gate_after(*sizes: float) -> RmsGate:
    gate = RmsGate("activations")
    for size in sizes:
        gate.admit(torch.full((2, 3), size))
    return gate


@pytest.mark.parametrize("size", [0.2, 9.0, -9.0])
def test_frames_of_about_the_usual_size_pass(size: float) -> None:
    gate_after(*[1.0] * LEAST_FRAMES).admit(torch.full((2, 3), size))


@pytest.mark.parametrize("size", [1000.0, 11.0, 0.05, 0.0])
def test_frames_of_another_size_are_refused(size: float) -> None:
    with pytest.raises(CorruptPayload, match="RMS of activations"):
        gate_after(*[1.0] * LEAST_FRAMES).admit(torch.full((2, 3), size))


def test_the_first_frames_pass_whatever_they_are() -> None:
    gate_after(*[10.0**power for power in range(LEAST_FRAMES)])


def test_the_usual_size_follows_a_real_change() -> None:
    gate = gate_after(*[1.0] * HISTORY_FRAMES)
    for _ in range(HISTORY_FRAMES // 2):
        with pytest.raises(CorruptPayload):
            gate.admit(torch.full((2, 3), 20.0))
    gate.admit(torch.full((2, 3), 20.0))
