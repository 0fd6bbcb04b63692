"""The server's door: who makes a call, whether the call may go on, and how many of them at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload, PeerError, Refused
from noloco_p2p.gossip import frames
from noloco_p2p.net import convert
from noloco_p2p.net.connection import REFUSE_KEY
from noloco_p2p.net.handshake import PROOF_KEY, Challenges
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)


class Door:
    """Without a session everybody may enter, under any name: for measurements and tests on one machine."""

    def __init__(self, session: Session | None = None) -> None:
        self._challenges = Challenges(session) if session else None

    async def greet(self, request: pb.GreetRequest, context: Any) -> pb.GreetReply:
        try:
            if self._challenges is None:
                raise Refused("nobody is greeted here", code=frames.RefuseCode.NOT_PROVEN.name)
            return self._challenges.answer(request, context.peer())
        except PeerError as error:
            await turn_away(context, error)

    @contextlib.asynccontextmanager
    async def visit(self, context: Any) -> AsyncIterator[str]:
        """For the time of one call: the proven peer id of its caller. Ends the call when it may not go on."""
        try:
            caller = self._proven(context)
        except PeerError as error:
            await turn_away(context, error)
        yield caller

    def _proven(self, context: Any) -> str:
        if self._challenges is None:
            return ""
        for key, value in context.invocation_metadata() or ():
            if key == PROOF_KEY and isinstance(value, bytes):
                return self._challenges.check(_parsed(value), context.peer())
        raise Refused(
            "who calls is not proven: greet first, and put the proof into the metadata of the call",
            code=frames.RefuseCode.NOT_PROVEN.name,
        )


async def turn_away(context: Any, error: PeerError) -> NoReturn:
    """End the call with a refusal in words. Raises, as gRPC wants it."""
    refuse = refuse_to_wire(error)
    metadata = ((REFUSE_KEY, refuse.SerializeToString()),)
    raise await context.abort(grpc.StatusCode.PERMISSION_DENIED, refuse.sentence, metadata)


def refuse_to_wire(error: PeerError) -> pb.Refuse:
    code, retry_after_s = frames.RefuseCode.MALFORMED, 0.0
    if isinstance(error, Refused):
        code, retry_after_s = frames.RefuseCode[error.code], error.retry_after_s
    return convert.refuse_to_wire(frames.Refuse(code, str(error), retry_after_s))


def _parsed(value: bytes) -> pb.Proof:
    try:
        return pb.Proof.FromString(value)
    except DecodeError:
        raise CorruptPayload("the proof of who calls is no message of this protocol") from None
