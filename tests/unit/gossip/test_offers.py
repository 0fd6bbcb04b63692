"""A peer answers offers at once, with a reason, and draws the peers that it asks itself."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from harness.swap_swarm import SPEC, Swarm, profile

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import Accept, Alive, Frame, Hello, Offer, Refuse, RefuseCode, Slice, Standing
from noloco_p2p.gossip.gossip import STALE_FURTHEST
from noloco_p2p.gossip.pairing import FAILED_RETRY_S, MANY_REFUSALS, MOST_RETRY_S, START, Pairing
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.testing.memory import MemoryStream

CALLER = "a-caller"
NUM_UNITS = 8
HELLO = Hello(CALLER, SPEC.name, SPEC.digest())
OFFER = Offer(HELLO, bytes(16), Standing(0.0, 1.0, 0.0), b"\x01" * NUM_UNITS, 3)


async def busy(stream: FrameStream) -> None:
    await stream.send(Refuse(RefuseCode.BUSY, "I have a partner"))
    await stream.close()


def answers(
    *offers: Frame, is_listed: bool = True, state: str = "training", hangs_up: bool = True, num_others: int = 0
) -> list[Frame | PeerError]:
    """Return the answers of a peer to offers that are made one after another."""

    async def main() -> list[Frame | PeerError]:
        swarm = Swarm([profile(1.0)] * (1 + num_others), num_elements=30_000)
        trainer, *others = swarm.trainers
        for other in others:
            other.service.on_swap = busy  # pyright: ignore[reportAttributeAccessIssue]
        await trainer.begin()
        trainer.service.state = state
        if is_listed:
            swarm.network.listed[CALLER] = None
            swarm.network.closed.add(CALLER)  # so it makes offers and gets none
        heard: list[Frame | PeerError] = []
        streams = []
        for offer in offers:
            here, there = MemoryStream.pair(trainer.name, CALLER)
            swarm.network.own(asyncio.create_task(trainer.service.on_swap(there)))
            await here.send(offer)
            try:
                heard.append(await here.receive(5.0))
            except PeerError as error:
                heard.append(error)
            streams.append(here)
            if hangs_up:
                await here.close()
                await asyncio.sleep(1.0)
        await trainer.service.stop()
        await swarm.network.close()
        return heard

    return run_virtual(main())


def test_an_offer_is_accepted_with_a_slice_of_what_was_offered() -> None:
    [answer] = answers(replace(OFFER, ages=bytes([0, 0, 1, 9, 9, 1, 0, 0]), at_most=2))
    assert isinstance(answer, Accept)
    assert answer.part in (Slice(3, 1), Slice(3, 2)), "the oldest units that both can swap"


@pytest.mark.parametrize(
    ("offer", "options", "code"),
    [
        (replace(OFFER, hello=replace(HELLO, protocol_version="2.0")), {}, RefuseCode.OTHER_VERSION),
        (replace(OFFER, hello=replace(HELLO, run_name="other")), {}, RefuseCode.OTHER_RUN),
        (replace(OFFER, hello=replace(HELLO, spec_digest="other")), {}, RefuseCode.OTHER_SPEC),
        (OFFER, {"state": "paused"}, RefuseCode.NOT_TRAINING),
        (OFFER, {"is_listed": False}, RefuseCode.UNLISTED),
        (replace(OFFER, standing=Standing(STALE_FURTHEST * SPEC.furthest + 0.01, 1.0, 0.0)), {}, RefuseCode.STALE),
        (replace(OFFER, standing=Standing(0.0, 1.0, 1e6)), {}, RefuseCode.BUSY),
        (replace(OFFER, standing=Standing(0.0, float("nan"), 0.0)), {}, RefuseCode.MALFORMED),
        (replace(OFFER, ages=bytes(NUM_UNITS)), {}, RefuseCode.BUSY),
        (replace(OFFER, ages=b"\x01" * 9), {}, RefuseCode.MALFORMED),
        (replace(OFFER, at_most=0), {}, RefuseCode.MALFORMED),
        (replace(OFFER, swap_id=b"short"), {}, RefuseCode.MALFORMED),
        (replace(OFFER, hello=replace(HELLO, peer_id="")), {}, RefuseCode.MALFORMED),
        (Alive(), {}, RefuseCode.MALFORMED),
    ],
)
def test_an_offer_is_refused_with_the_reason(offer: Frame, options: dict[str, object], code: RefuseCode) -> None:
    [answer] = answers(offer, **options)  # pyright: ignore[reportArgumentType]
    assert isinstance(answer, Refuse)
    assert answer.code is code
    assert answer.sentence


def test_who_accepts_from_far_away_is_no_partner() -> None:
    """An honest peer would have refused the offer. Alone with this one, a liar could end its run."""

    async def main() -> str:
        swarm = Swarm([profile(1.0)] * 2, num_elements=30_000)
        trainer, other = swarm.trainers

        async def accepts(stream: FrameStream) -> None:
            offer = await stream.receive(5.0)
            assert isinstance(offer, Offer)
            hello = Hello(other.name, SPEC.name, SPEC.digest())
            await stream.send(Accept(hello, Standing(1.0, 1.0, 0.0), Slice(offer.ages.index(1), 1)))

        other.service.on_swap = accepts  # pyright: ignore[reportAttributeAccessIssue]
        await trainer.begin()
        await asyncio.sleep(1.0)
        await trainer.service.stop()
        await swarm.network.close()
        return trainer.counts.last_failure

    assert "its position in the run is impossible" in run_virtual(main())


def test_one_swap_at_a_time_until_it_moves() -> None:
    first, second = answers(OFFER, replace(OFFER, swap_id=b"2" * 16), hangs_up=False)
    assert isinstance(first, Accept)
    assert isinstance(second, Refuse)
    assert second.code is RefuseCode.BUSY


def test_who_breaks_off_its_swaps_pays_for_them() -> None:
    *accepted, refused = answers(*[OFFER] * (int(START) + 1), num_others=20)
    assert all(isinstance(answer, Accept) for answer in accepted)
    assert isinstance(refused, Refuse)
    assert refused.code is RefuseCode.OVER_SHARE


# whom a peer asks


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name, name) for name in names]


def drawn(pairing: Pairing, live: list[Candidate], *, now_s: float = 0.0) -> set[str]:
    return {peer.peer_id for _ in range(200) if (peer := pairing.next(live, now_s))}


def test_peers_that_cannot_swap_are_not_drawn() -> None:
    pairing = Pairing(random.Random(1))
    live = [
        *candidates("here", "other-spec"),
        Candidate("paused", "p", state="paused"),
        Candidate("closed", "c", can_be_called=False),
    ]
    pairing.refused("other-spec", RefuseCode.OTHER_SPEC, retry_after_s=0.0, now_s=0.0)
    assert drawn(pairing, live) == {"here"}
    assert drawn(pairing, live, now_s=1e9) == {"here"}
    assert pairing.next([], 0.0) is None


def test_who_failed_or_refused_is_drawn_again_after_a_while() -> None:
    pairing, live = Pairing(random.Random(1)), candidates("a", "b")
    pairing.failed("a", 0.0)
    assert drawn(pairing, live) == {"b"}
    for _ in range(20):
        pairing.refused("b", RefuseCode.BUSY, retry_after_s=1.0, now_s=0.0)
    assert drawn(pairing, live, now_s=1.0) == set()
    assert pairing.wait_s(live, 0.0) > 1.0
    assert drawn(pairing, live, now_s=1.0 + 1.5 * MOST_RETRY_S) == {"b"}
    assert drawn(pairing, live, now_s=FAILED_RETRY_S) == {"a", "b"}


def test_who_has_had_more_than_its_share_is_drawn_only_when_there_is_nobody_else() -> None:
    pairing, live = Pairing(random.Random(1)), candidates("greedy", "other")
    for _ in range(20):
        pairing.began("greedy", live, num_live=100)
    assert drawn(pairing, live) == {"other"}
    assert drawn(pairing, live[:1]) == {"greedy"}


def test_who_has_held_this_peer_up_is_drawn_only_when_the_others_are_away() -> None:
    pairing, live = Pairing(random.Random(1)), candidates("late", "other")
    pairing.shares.held_up("late", 20.0)
    pairing.refused("other", RefuseCode.BUSY, retry_after_s=9.0, now_s=0.0)
    assert drawn(pairing, live) == set()
    assert pairing.wait_s(live, 0.0) > 1.0
    assert pairing.avoids("late", live)
    pairing.failed("other", 0.0)
    assert drawn(pairing, live) == {"late"}


@pytest.mark.parametrize("is_busy", [False, True], ids=["silent", "always busy"])
def test_made_up_records_do_not_shrink_the_share_of_honest_peers(is_busy: bool) -> None:
    """Nine tenths of the records lead nowhere. The honest peers can still swap with each other all the time."""
    pairing, real = Pairing(random.Random(1)), candidates(*(f"real-{number}" for number in range(4)))
    live = real + candidates(*(f"made-up-{number}" for number in range(36)))
    for peer in live[4:]:
        for _ in range(MANY_REFUSALS if is_busy else 0):
            pairing.refused(peer.peer_id, RefuseCode.BUSY, retry_after_s=0.0, now_s=0.0)
        if not is_busy:
            pairing.failed(peer.peer_id, 0.0)
    for number in range(100):
        pairing.began(real[number % 4].peer_id, live, num_live=41)
    assert not any(pairing.shares.owes(peer.peer_id) for peer in real)


def test_nobody_keeps_a_peer_from_looking_for_new_peers() -> None:
    pairing = Pairing(random.Random(1))
    pairing.refused("a", RefuseCode.BUSY, retry_after_s=3600.0, now_s=0.0)
    assert pairing.wait_s(candidates("a"), 0.0) <= MOST_RETRY_S
