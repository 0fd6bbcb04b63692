"""What a peer knows of a name that somebody else tells it: the stage in its record, and how often it reads for it."""

from __future__ import annotations

import asyncio

from harness.identities import identity_of

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.clock import CLOCK
from noloco_p2p.swarm.membership_view import LOOKS_A_MINUTE, MembershipView
from noloco_p2p.swarm.records import TTL_S, PeerRecord, encode_record
from noloco_p2p.swarm.timing import Timing
from noloco_p2p.telemetry.metrics import Metrics

RUN = "ab" * 32
HEAD, INNER, LEFT = (identity_of(name) for name in ("head", "inner", "left"))


class Node:
    """A DHT node whose entries are in memory."""

    guard = DialGuard()

    def __init__(self) -> None:
        self.entries: dict[str, tuple[bytes, float]] = {}
        self.num_reads = 0

    def neighbours(self) -> set[str]:
        return {"another node"}

    async def get(self, key: str, *, timeout_s: float) -> dict[str, tuple[bytes, float]]:
        self.num_reads += 1
        return dict(self.entries)


def view_of(node: Node) -> MembershipView:
    return MembershipView(
        node,  # pyright: ignore[reportArgumentType]
        "me",
        AddressBook(),
        spec_digest=RUN,
        is_monitor=False,
        timing=Timing(),
        ignores=lambda record: False,
        own_addresses=tuple,
    )


def store(node: Node, name: str, *, stage: int, state: str = "training", sequence: int = 1) -> None:
    identity = identity_of(name)
    expires_at_s = CLOCK.now() + TTL_S
    record = PeerRecord(
        identity.peer_id,
        "run",
        RUN,
        addresses=("127.0.0.1:4000",),
        state=state,
        metrics=Metrics(),
        stage=stage,
        stages=3,
        sequence=sequence,
        expires_at_s=expires_at_s,
    )
    node.entries[identity.peer_id] = encode_record(record, identity), expires_at_s


def test_the_stage_of_a_peer_is_in_its_record() -> None:
    node = Node()
    view = view_of(node)
    for name, stage, state in (("head", 0, "training"), ("inner", 1, "training"), ("left", 0, "leaving")):
        store(node, name, stage=stage, state=state)
    asyncio.run(view.refresh())
    assert [view.stage_of(identity.peer_id) for identity in (HEAD, INNER, LEFT)] == [0, 1, 0]
    assert view.stage_of(identity_of("invented").peer_id) is None
    assert not view.knows(LEFT.peer_id)


def test_a_new_record_is_seen_at_once_by_a_peer_that_looks_for_it() -> None:
    node = Node()
    view = view_of(node)
    store(node, "head", stage=1)
    asyncio.run(view.refresh())
    store(node, "head", stage=0, sequence=2)
    asyncio.run(view.look_for(HEAD.peer_id, timeout_s=1.0))
    assert view.stage_of(HEAD.peer_id) == 0


def test_invented_names_cause_few_reads() -> None:
    node = Node()
    view = view_of(node)

    async def flood() -> None:
        for number in range(1000):
            await view.look_for(identity_of(f"invented {number}").peer_id, timeout_s=1.0)

    asyncio.run(flood())
    assert 1 <= node.num_reads <= LOOKS_A_MINUTE
