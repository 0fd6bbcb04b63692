from __future__ import annotations

import pytest
import torch

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.trainer.rms_gate import FIRST_TIMES, HISTORY_FRAMES, LEAST_FRAMES, MOST_TIMES, RmsGate


def gate_after(*sizes: float) -> RmsGate:
    gate = RmsGate("activations")
    for size in sizes:
        gate.admit(torch.full((2, 3), size))
    return gate


LATER = int(HISTORY_FRAMES * FIRST_TIMES / MOST_TIMES)  # frames, after which the limit is ten times the usual size


@pytest.mark.parametrize("size", [0.2, 9.0, -9.0])
def test_frames_of_about_the_usual_size_pass(size: float) -> None:
    gate_after(*[1.0] * LATER).admit(torch.full((2, 3), size))


@pytest.mark.parametrize("size", [1000.0, 11.0, 0.05, 0.0])
def test_frames_of_another_size_are_refused(size: float) -> None:
    with pytest.raises(CorruptPayload, match="RMS of activations"):
        gate_after(*[1.0] * LATER).admit(torch.full((2, 3), size))


@pytest.mark.parametrize("size", [58.0, 0.02])
def test_while_sizes_change_most_the_limit_is_wider(size: float) -> None:
    """Honest peers send such gradients."""
    gate_after(*[1.0] * (LEAST_FRAMES + 100)).admit(torch.full((2, 3), size))


@pytest.mark.parametrize("num_frames", [LEAST_FRAMES, HISTORY_FRAMES, LATER])
@pytest.mark.parametrize("size", [1000.0, 0.001, 0.0])
def test_a_thousand_times_is_refused_from_the_first_frame_that_can_be_judged(size: float, num_frames: int) -> None:
    with pytest.raises(CorruptPayload, match="RMS of activations"):
        gate_after(*[1.0] * num_frames).admit(torch.full((2, 3), size))


def test_the_first_frames_pass_whatever_they_are() -> None:
    gate_after(*[10.0**power for power in range(LEAST_FRAMES)])


def test_the_usual_size_follows_a_real_change() -> None:
    gate = gate_after(*[1.0] * LATER)
    for _ in range(HISTORY_FRAMES // 2):
        with pytest.raises(CorruptPayload):
            gate.admit(torch.full((2, 3), 20.0))
    gate.admit(torch.full((2, 3), 20.0))
