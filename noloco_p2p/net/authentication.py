"""Authenticate callers, decide whether their calls may continue, and limit the number of open calls per caller.

An unauthenticated caller can keep a connection for only a few seconds. The number of such connections per network is
limited (`proxy.py`). Such a connection allows at most two greetings, and it is closed after one refused call. Once a
peer has authenticated itself, its open calls are counted by peer id. `proxy.py` and `options.py` limit the sizes of
messages. Each accepted swap limits the number of its own connections.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload, PeerError, Refused
from noloco_p2p.gossip import frames
from noloco_p2p.identity import short_id
from noloco_p2p.net import convert
from noloco_p2p.net.connection import REFUSE_KEY, nobody_is_banned
from noloco_p2p.net.handshake import PROOF_KEY, Challenges
from noloco_p2p.net.proxy import Inbound, Proxy
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)

MAX_CALLS_PER_PEER = 16  # for two swaps over six connections, an offer, a status request, a fetch and one more call
MAX_FETCHES_PER_PEER = 2  # fetches of chunks: the current one and the previous one
TELL_EVERY_S = 60.0


class Authenticator:
    """A gate that authenticates the callers of a server.

    Without a session, every caller is accepted under any name. This is for measurements and tests on one machine.
    """

    def __init__(
        self,
        proxy: Proxy,
        session: Session | None = None,
        *,
        why_banned: Callable[[str], str] = nobody_is_banned,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proxy = proxy
        self._why_banned = why_banned
        self._challenges = Challenges(session, clock=clock) if session else None
        self._open = Counter[str]()
        self._fetches: dict[str, list[object]] = {}  # by caller, with the newest fetch last
        self._turned_away = TurnedAway(clock)

    async def greet(self, request: pb.GreetRequest, context: Any) -> pb.GreetReply:
        inbound = None
        try:
            if self._challenges is None:
                raise Refused("greetings are disabled on this peer", code=frames.RefuseCode.NOT_PROVEN.name)
            inbound = self._proxy.inbound(context.peer())
            inbound.check()
            inbound.greeted()
            return self._challenges.answer(request, inbound.address)
        except PeerError as error:
            await self._turn_away(context, inbound, error)

    @contextlib.asynccontextmanager
    async def visit(self, context: Any) -> AsyncIterator[Inbound]:
        """Yield the caller's connection for the duration of one call. If the call may not continue, end it."""
        inbound = None
        try:
            inbound = self._proxy.inbound(context.peer())
            inbound.check()
            caller = self._proven(context, inbound.address)
            if why := self._why_banned(caller):
                raise Refused(f"you are {why}", code=frames.RefuseCode.BANNED.name, retry_after_s=60.0, peer=caller)
            if caller and self._open[caller] >= MAX_CALLS_PER_PEER:
                raise Refused(
                    f"you already have {MAX_CALLS_PER_PEER} open calls, which is the maximum",
                    code=frames.RefuseCode.BUSY.name,
                    retry_after_s=5.0,
                )
            inbound.proven(caller)
        except PeerError as error:
            await self._turn_away(context, inbound, error)
        self._open[caller] += 1
        try:
            yield inbound
        finally:
            inbound.ended()
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    @contextlib.contextmanager
    def fetching(self, caller: str) -> Iterator[Callable[[], None]]:
        """Account for one fetch of chunks, and yield a function that checks whether it may continue.

        That function raises Refused once the same peer has begun another fetch. The newer fetch takes precedence,
        because the older one may be stuck on a dead connection. A third fetch raises Refused at once, because each
        fetch can occupy one of the donor's slots until it ends.
        """
        busy = Refused(
            "you already have another fetch in progress", code=frames.RefuseCode.BUSY.name, retry_after_s=5.0
        )
        mine, fetches = object(), self._fetches.setdefault(caller, [])
        if caller and len(fetches) >= MAX_FETCHES_PER_PEER:
            raise busy
        fetches.append(mine)

        def check() -> None:
            if caller and fetches[-1] is not mine:
                raise busy

        try:
            yield check
        finally:
            fetches.remove(mine)
            if not fetches:
                del self._fetches[caller]

    def _proven(self, context: Any, address: str) -> str:
        if self._challenges is None:
            return ""
        for key, value in context.invocation_metadata() or ():
            if key == PROOF_KEY and isinstance(value, bytes):
                return self._challenges.check(_parsed(value), address)
        raise Refused(
            "caller authentication failed: the call has no proof; call Greet first, and put the proof in the metadata",
            code=frames.RefuseCode.NOT_PROVEN.name,
        )

    async def _turn_away(self, context: Any, inbound: Inbound | None, error: PeerError) -> NoReturn:
        """End the call with a refusal, and then close its connection."""
        self._turned_away.note(inbound.address if inbound else context.peer(), error)
        if inbound:
            inbound.turned_away()
        refuse = refuse_to_wire(error)
        metadata = ((REFUSE_KEY, refuse.SerializeToString()),)
        raise await context.abort(grpc.StatusCode.PERMISSION_DENIED, refuse.sentence, metadata)


class TurnedAway:
    """A log of refused calls, with at most one line per minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._told_at_s = -TELL_EVERY_S

    def note(self, address: str, error: PeerError) -> None:
        self._count += 1
        if self._clock() - self._told_at_s >= TELL_EVERY_S:
            who = f"..{short_id(error.peer)} at {address}" if error.peer else address
            log.warning("calls refused: %d; the most recent was from %s: %s", self._count, who, error)
            self._count, self._told_at_s = 0, self._clock()


def refuse_to_wire(error: PeerError) -> pb.Refuse:
    code, retry_after_s = frames.RefuseCode.MALFORMED, 0.0
    if isinstance(error, Refused):
        code, retry_after_s = frames.RefuseCode[error.code], error.retry_after_s
    return convert.refuse_to_wire(frames.Refuse(code, str(error), retry_after_s))


def _parsed(value: bytes) -> pb.Proof:
    try:
        return pb.Proof.FromString(value)
    except DecodeError:
        raise CorruptPayload("the authentication proof is not a valid protocol message") from None
