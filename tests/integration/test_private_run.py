"""Strangers to a private run fail in the TLS handshake, and peers with an expired invitation in their first call.

The tests use real gRPC. A refusal names the ban and its reason.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
from harness.identities import identity_of
from harness.patience import AT_ONCE_S, PATIENCE_S

from noloco_p2p.errors import Refused, Unreachable
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, RefuseCode
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.invitation import Invitation, invite
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session


class Answering:
    def __init__(self) -> None:
        self.admitted: list[str] = []

    def admit(self, hello: Hello) -> None:
        self.admitted.append(hello.peer_id)

    async def on_swap(self, stream: FrameStream) -> None:
        raise NotImplementedError

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(Hello("answerer", "run", "ab" * 32), "training", 0.5)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise NotImplementedError


def invitation(*, key: str = "run key", in_s: float = 1000.0) -> Invitation:
    return invite(identity_of(key), expires_at_s=time.time() + in_s, seed=bytes(32))


@asynccontextmanager
async def answering(
    held: Invitation | None, *, why_banned: Callable[[str], str] = lambda peer_id: ""
) -> AsyncGenerator[tuple[Answering, Candidate]]:
    service, session = Answering(), Session(identity_of("answerer"), held)
    server = GrpcServer(service, session=session, why_banned=why_banned)
    await server.start("127.0.0.1", 0)
    try:
        yield service, Candidate(session.identity.peer_id, f"127.0.0.1:{server.port}", session_key=session.key)
    finally:
        await server.stop(0.0)


async def status(
    there: Candidate, held: Invitation | None, *, why_banned: Callable[[str], str] = lambda peer_id: ""
) -> float:
    session = Session(identity_of("caller"), held)
    hello = Hello(session.identity.peer_id, "run", "ab" * 32)
    transport = GrpcTransport(lambda: hello, session=session, why_banned=why_banned)
    return (await transport.status(there, timeout_s=PATIENCE_S)).progress


async def test_the_invited_are_served_and_strangers_get_no_further_than_tls() -> None:
    async with answering(invitation()) as (service, there):
        assert await status(there, invitation()) == 0.5
        for held, words in ((None, "connect"), (invitation(key="another run"), "not invited")):
            began_s = time.monotonic()
            with pytest.raises(Unreachable, match=words):
                await status(there, held)
            assert time.monotonic() - began_s < AT_ONCE_S
        assert len(service.admitted) == 1


async def test_an_invitation_that_has_ended_is_told_in_words() -> None:
    async with answering(invitation()) as (service, there):
        with pytest.raises(Refused, match="the invitation expired on") as refused:
            await status(there, invitation(in_s=-10))
        assert refused.value.code == RefuseCode.NOT_INVITED.name
        assert not service.admitted


async def test_a_caller_asks_the_other_side_for_its_invitation_too() -> None:
    async with answering(invitation(in_s=-10)) as (service, former_member):
        with pytest.raises(Refused, match="the invitation expired on"):
            await status(former_member, invitation())
        assert not service.admitted
    async with answering(None) as (service, open_peer):
        with pytest.raises(Unreachable, match="could not connect"):
            await status(open_peer, invitation())
        assert not service.admitted


async def test_a_ban_holds_both_ways_and_says_why() -> None:
    caller, answerer = (identity_of(name).peer_id for name in ("caller", "answerer"))

    def why(banned: str) -> Callable[[str], str]:
        return lambda peer_id: "banned here for another 60 min: noise" if peer_id == banned else ""

    async with answering(None, why_banned=why(caller)) as (service, there):
        with pytest.raises(Refused, match="you are banned here for another 60 min: noise") as refused:
            await status(there, None)
        assert refused.value.code == RefuseCode.BANNED.name
        with pytest.raises(Refused, match="it is banned here"):
            await status(there, None, why_banned=why(answerer))
        assert not service.admitted
    async with answering(None) as (service, there):
        assert await status(there, None) == 0.5
