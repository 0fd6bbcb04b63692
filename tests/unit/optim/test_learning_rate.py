"""The learning rate schedule: warm-up, cosine and minimum."""

from __future__ import annotations

import pytest

from noloco_p2p.optim.inner import learning_rate
from noloco_p2p.spec import TrainSpec

SPEC = TrainSpec(total_steps=1000, warmup_steps=100, learning_rate=2.0, min_learning_rate=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.02), (49, 1.0), (99, 2.0), (100, 2.0), (550, 1.1), (1000, 0.2)],
    ids=["first step", "half of the warm-up", "last of the warm-up", "peak", "half of the cosine", "end"],
)
def test_landmarks(step: int, expected: float) -> None:
    assert learning_rate(SPEC, step / 1000) == pytest.approx(expected)


@pytest.mark.parametrize("progress", [1.0, 1.5, 1e9, float("inf")])
def test_beyond_the_end_the_minimum_stays(progress: float) -> None:
    assert learning_rate(SPEC, progress) == pytest.approx(0.2)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(TrainSpec(warmup_steps=0, learning_rate=2.0), 0.0) == 2.0


@pytest.mark.parametrize("progress", [-1e-9, float("nan")])
def test_progress_that_is_no_place_in_a_schedule_is_refused(progress: float) -> None:
    with pytest.raises(ValueError, match="progress"):
        learning_rate(SPEC, progress)
