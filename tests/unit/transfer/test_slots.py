"""The upload slots of a donor: which peers it serves, what a refused newcomer learns, and which peer loses a slot."""

from __future__ import annotations

import pytest

from noloco_p2p.errors import Refused
from noloco_p2p.transfer.slots import FIRST_RETRY_S, NUM_SLOTS, RETRY_S, STALLED_S, UploadSlots


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refused(slots: UploadSlots) -> Refused:
    with pytest.raises(Refused) as refusal, slots.take(1):
        pass
    assert refusal.value.code == "BUSY"
    return refusal.value


def test_a_refused_newcomer_is_told_when_the_first_upload_ends() -> None:
    clock = Clock()
    slots = UploadSlots(clock=clock)
    with slots.take(10) as first, slots.take(4):
        assert refused(slots).retry_after_s == FIRST_RETRY_S, "no chunk was measured yet"
        clock.now_s = 2.0
        slots.took(first)
        assert refused(slots).retry_after_s == 4 * 2.0


@pytest.mark.parametrize(("chunk_s", "told_s"), [(0.001, RETRY_S[0]), (25.0, RETRY_S[1])])
def test_what_is_told_is_bounded(chunk_s: float, told_s: float) -> None:
    clock = Clock()
    slots = UploadSlots(clock=clock)
    with slots.take(10) as first, slots.take(10):
        clock.now_s = chunk_s
        slots.took(first)
        assert refused(slots).retry_after_s == told_s


def test_an_upload_that_takes_nothing_loses_its_slot_to_the_next_caller() -> None:
    clock = Clock()
    slots = UploadSlots(clock=clock)
    with slots.take(5) as stalled, slots.take(5) as other:
        clock.now_s = STALLED_S - 1
        slots.took(other)
        refused(slots)
        clock.now_s = STALLED_S + 1
        with slots.take(5):
            refused(slots)
            with pytest.raises(Refused, match="your slot was given to another newcomer"):
                slots.took(stalled)
            slots.took(other)
    with slots.take(1), slots.take(1):
        refused(slots)


def test_an_upload_that_takes_nothing_goes_on_while_nobody_else_asks() -> None:
    clock = Clock()
    slots = UploadSlots(clock=clock)
    with slots.take(5) as stalled:
        clock.now_s = 10 * STALLED_S
        slots.took(stalled)


def test_a_slot_is_free_again_when_its_upload_has_ended() -> None:
    slots = UploadSlots()
    for _ in range(3):
        with slots.take(1), slots.take(1):
            refused(slots)
    assert NUM_SLOTS == 2
