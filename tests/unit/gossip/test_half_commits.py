"""Lost or repeated Ready frames: a part is committed at most once, and the outcome says which parts were committed."""

from __future__ import annotations

import asyncio

import pytest
from harness.patience import PATIENCE_S
from harness.rounds import Vectors, one_round
from harness.specs import FP32, published
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import Frame, Offer, Part, Ready, SectionName, SwapState
from noloco_p2p.gossip.outcome import Alone
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import At, Cut, Drop, Fault, FaultPlan, Repeat
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

SPEC = RunSpec(name="half", codec=FP32, outer=published())
SHORT = Deadlines(dial_s=1.5, offer_s=1.5, status_s=1.5, progress_s=1.5, farewell_s=0.05)
WAIT_S = 20.0  # if all Readys of the late part are lost, the stream stays alive until the boundary
SECTIONS_OF = {
    Part.EARLY: {SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM},
    Part.LATE: {SectionName.OUTER_GRADIENT},
}
VECTORS = [Vectors.random(1), Vectors.random(2)]


class Listening:
    """A stream wrapper that records the ids of offered swaps."""

    def __init__(self, stream: FrameStream, swap_ids: list[bytes]) -> None:
        self._stream = stream
        self._swap_ids = swap_ids
        self.close, self.receive = stream.close, stream.receive

    @property
    def peer(self) -> str:
        return self._stream.peer

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Offer):
            self._swap_ids.append(frame.swap_id)
        await self._stream.send(frame)


def ask(swarm: MemorySwarm, peer: MemoryPeer, swap_id: bytes) -> SwapState:
    async def state() -> SwapState:
        return peer.driver.swap_state(swap_id)

    return asyncio.run_coroutine_threadsafe(state(), swarm.loop).result(PATIENCE_S)


faults_of_ready = st.lists(
    st.tuples(st.sampled_from(Part), st.sampled_from([Drop(), Repeat(), Cut()]), st.booleans()), min_size=1, max_size=3
)


def plan_of(faults: list[tuple[Part, Fault, bool]]) -> FaultPlan:
    plan = FaultPlan()
    for part, fault, is_sent in faults:
        plan = plan.fail_at(At(Ready, part=part), **{"send" if is_sent else "receive": fault})
    return plan


@pytest.mark.parametrize("gradient", ["fp32", "none"])
@settings(max_examples=15)
@given(faults=faults_of_ready)
def test_a_part_is_committed_at_most_once_and_the_outcome_says_which(
    gradient: str, faults: list[tuple[Part, Fault, bool]]
) -> None:
    swap_ids: list[bytes] = []
    faulty = plan_of(faults).wrapper()

    def wrap(stream: FrameStream) -> FrameStream:
        return Listening(faulty(stream), swap_ids)

    with MemorySwarm(SPEC.with_changes({"codec.outer_gradient": gradient}), deadlines=SHORT) as swarm:
        peers = [
            swarm.peer("a", wrap=wrap, wrap_accepted=faulty),
            swarm.peer("b", wrap=lambda stream: Listening(stream, swap_ids)),
        ]
        outcomes = one_round(peers, VECTORS, wait_s=WAIT_S)
        for peer, outcome in zip(peers, outcomes, strict=True):
            got = set() if isinstance(outcome, Alone) else set(outcome.received.sections)
            states = [ask(swarm, peer, swap_id) for swap_id in swap_ids]
            committed = [part for state in states for part in state.committed]
            assert len(committed) == len(set(committed)), "of all swaps of a round, one at most commits a part"
            assert got == {section for part in committed for section in SECTIONS_OF[part]}
            assert states == [ask(swarm, peer, swap_id) for swap_id in swap_ids], "to be asked again changes nothing"
            assert all(set(state.committed) <= set(state.verified) for state in states)
            assert not peer.driver.corrections, "what came in time is not applied a second time as a correction"
