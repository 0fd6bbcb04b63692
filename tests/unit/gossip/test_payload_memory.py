"""Payload memory is reused once no view of it is left, and never before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from harness.patience import PATIENCE_S
from harness.rounds import Vectors, one_round, wait_until
from harness.specs import FP32, published

from noloco_p2p.codec import get_codec
from noloco_p2p.gossip.frames import Chunk, SectionName
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import At, FaultPlan, NotFinite
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="memory", codec=FP32, outer=published())
CODEC = get_codec("fp32")
CHUNK = torch.arange(4.0)


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    memory = PayloadMemory()
    payload = memory.take(1000).keep(b"x" * 10)
    first = address(payload)
    del payload
    assert address(memory.take(1000).keep(b"y")) == first


def test_memory_that_is_used_again_is_lent_to_one_at_a_time() -> None:
    memory = PayloadMemory()
    memory.take(1000)  # it is returned at once
    first, second = (memory.take(1000).keep(b"x") for _ in range(2))
    assert address(first) != address(second)


def test_memory_is_not_used_again_while_any_view_is_left() -> None:
    memory = PayloadMemory()
    slab = memory.take(32)
    slab.keep(b"first chunk")
    last = torch.frombuffer(slab.keep(b"last")[1:], dtype=torch.uint8)
    del slab
    memory.take(32).keep(b"z" * 32)
    assert last.numpy().tobytes() == b"ast"


def test_pieces_follow_each_other_and_hold_what_was_written() -> None:
    slab = PayloadMemory().take(3 + CODEC.num_bytes(4))
    kept, coded = slab.keep(memoryview(b"abc")), slab.code(CODEC, CHUNK)
    assert bytes(kept) == b"abc"
    assert bytes(coded) == CODEC.encode(CHUNK)


def test_what_is_kept_does_not_change_with_the_message_it_came_in() -> None:
    message = bytearray(b"payload")
    kept = PayloadMemory().take(7).keep(memoryview(message))
    message[:] = b"another"
    assert kept == b"payload"


def test_no_more_fits_than_was_asked_for() -> None:
    slab = PayloadMemory().take(4)
    slab.keep(b"abc")
    with pytest.raises(AssertionError):
        slab.keep(b"de")


def test_an_empty_section_takes_no_memory() -> None:
    assert bytes(PayloadMemory().take(0).keep(b"")) == b""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("section", "num_free"), [(SectionName.SLOW_WEIGHTS, 3), (SectionName.OUTER_GRADIENT, 5)], ids=["early", "late"]
)
def test_a_swap_that_failed_gives_its_memory_back_at_once(section: SectionName, num_free: int) -> None:
    """The vectors are as large as the model, and the garbage collector may run minutes later.

    num_free: three vectors of the partner; the stream may still hold this peer's early ones.
    """
    faults = FaultPlan().fail_at(At(Chunk, section=section), send=NotFinite()).wrapper()
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b", wrap=faults, wrap_accepted=faults)]
        one_round(peers, [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
        assert faults.fired
        for peer in peers:
            free = peer.driver.memory._free[400]
            wait_until(lambda free=free: len(free) >= num_free)
