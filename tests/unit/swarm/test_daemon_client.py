"""Requests that p2pd forwards are read in portions and answered in bounded numbers, without long messages."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, cast
from uuid import uuid4

from harness.identities import identity_of
from harness.patience import PATIENCE_S
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import p2pd_pb2

from noloco_p2p.swarm.daemon import MAX_MESSAGE_BYTES
from noloco_p2p.swarm.kademlia.client import MAX_ANSWERING, MAX_ANSWERING_OF_ONE, MAX_UNSENT, TURN_S, BoundedControl

PEER = PeerID.from_base58(identity_of("peer").peer_id)


class Control(BoundedControl):
    """A control connection without p2pd: `feed` provides its messages, and `sent` holds the answers."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), _initialized_with_create=True)
        self.reader = asyncio.StreamReader()
        self.sent: Any = self._pending_messages

    def feed(self, **message: Any) -> None:
        data = vars(p2pd_pb2)["PersistentConnectionResponse"](**message).SerializeToString()
        size = len(data)
        self.reader.feed_data((bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])) + data)

    def feed_request(self, data: bytes = b"x", peer: PeerID = PEER) -> None:
        request = vars(p2pd_pb2)["CallUnaryRequest"](peer=peer.to_bytes(), proto="test", data=data)
        self.feed(callId=uuid4().bytes, requestHandling=request)

    async def read_all(self) -> None:
        self.reader.feed_eof()
        await self._read_from_persistent_conn(self.reader)


def run(main: Callable[[Control], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        control = Control()
        await asyncio.wait_for(main(control), PATIENCE_S)
        control.close()
        await asyncio.gather(*control._answering, return_exceptions=True)

    asyncio.run(within())


def test_others_get_their_turn_while_many_requests_are_read() -> None:
    async def main(control: Control) -> None:
        turns, num_requests = 0, MAX_UNSENT // 2

        def answer(data: bytes, peer: PeerID) -> bytes:
            until_s = time.monotonic() + TURN_S / 4
            while time.monotonic() < until_s:
                pass
            return data

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        control.unary_handlers["test"] = cast(Any, answer)
        for _ in range(num_requests):
            control.feed_request()
        counting = asyncio.create_task(count())
        await control.read_all()
        counting.cancel()
        assert control.sent.qsize() == num_requests
        assert turns > num_requests // 8

    run(main)


def test_answers_that_have_to_wait_are_few_at_a_time() -> None:
    async def main(control: Control) -> None:
        async def answer(data: bytes, peer: PeerID) -> bytes:
            await asyncio.Event().wait()
            return data

        control.unary_handlers["test"] = answer
        for _ in range(MAX_ANSWERING_OF_ONE + 10):
            control.feed_request()
        for number in range(MAX_ANSWERING):
            control.feed_request(peer=PeerID.from_base58(identity_of(f"peer {number}").peer_id))
        await control.read_all()
        assert Counter(control._answering.values())[PEER.to_bytes()] == MAX_ANSWERING_OF_ONE
        assert len(control._answering) == MAX_ANSWERING
        refused = [control.sent.get_nowait().unaryResponse.error for _ in range(control.sent.qsize())]
        assert refused == [b"too many requests at once"] * (10 + MAX_ANSWERING_OF_ONE)

    run(main)


def test_a_fault_and_a_long_answer_are_told_in_words() -> None:
    async def main(control: Control) -> None:
        answers: list[Any] = [bytes(MAX_MESSAGE_BYTES), ValueError("not so"), b"fine"]

        def answer(data: bytes, peer: PeerID) -> bytes:
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        control.unary_handlers["test"] = cast(Any, answer)
        for _ in range(3):
            control.feed_request()
        await control.read_all()
        told = [control.sent.get_nowait().unaryResponse for _ in range(3)]
        assert [one.error or one.response for one in told] == [b"the answer is too long", b"not so", b"fine"]

    run(main)


def test_what_another_node_says_of_a_request_is_short_and_printable() -> None:
    async def main(control: Control) -> None:
        call_id, refused = uuid4(), asyncio.get_running_loop().create_future()
        control._pending_calls[call_id] = refused
        error = b"no\x1b]0;title\x07\n" + b"x" * 10_000
        control.feed(callId=call_id.bytes, callUnaryResponse=vars(p2pd_pb2)["CallUnaryResponse"](error=error))
        await control.read_all()
        words = str(refused.exception())
        assert words.startswith("no]0;titlex")
        assert words.isprintable()
        assert len(words) < 200

    run(main)


def test_an_answer_that_nobody_waits_for_any_more_ends_nothing() -> None:
    """hivemind's own reader would stop at such an answer, and end all calls of this node with it."""

    async def main(control: Control) -> None:
        call_ids, loop = [uuid4() for _ in range(3)], asyncio.get_running_loop()
        given_up, failed, waited_for = (loop.create_future() for _ in range(3))
        given_up.cancel()
        control._pending_calls.update(zip(call_ids, (given_up, failed, waited_for), strict=True))
        response = vars(p2pd_pb2)["CallUnaryResponse"]
        control.feed(callId=uuid4().bytes, callUnaryResponse=response(response=b"to nobody"))
        control.feed(callId=call_ids[0].bytes, callUnaryResponse=response(response=b"late"))
        control.feed(callId=call_ids[1].bytes, callUnaryResponse=response(error=b"no"))
        control.feed(callId=call_ids[2].bytes, callUnaryResponse=response(response=b"yes"))
        await control.read_all()
        assert isinstance(failed.exception(), P2PHandlerError)
        assert await waited_for == b"yes"

    run(main)
