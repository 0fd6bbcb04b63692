"""The server waits a bounded time for a caller's proof, and limits its log lines about rejected callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.errors import Refused, Unreachable
from noloco_p2p.net import server
from noloco_p2p.net.server import TurnedAway, _answer, _asked
from noloco_p2p.net.wire.v1 import peer_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_scan_is_told_in_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    turned_away = TurnedAway(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(600):
            turned_away.note("ipv4:192.0.2.7:1", Refused("you are banned", code="BANNED"))
            turned_away.note("unix:/folder/1", Unreachable("it has hung up"))
            clock.now_s += 0.2
    assert len(caplog.messages) == 2
    assert "calls refused: 300; the most recent was from ipv4:192.0.2.7:1: it is banned" in caplog.messages[1]


class Call:
    """The part of gRPC's server call that `_asked` and `_answer` use."""

    def __init__(self, *, takes: bool = True) -> None:
        self.answers: list[bytes] = []
        self._takes = takes

    async def write(self, data: bytes) -> None:
        if not self._takes:
            await asyncio.Event().wait()
        self.answers.append(data)

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise EndedError(code, sentence)


class EndedError(Exception):
    pass


async def words(*messages: bytes, then_waits: bool = False) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
    if then_waits:
        await asyncio.Event().wait()


async def ask(call: Call, requests: AsyncIterator[bytes]) -> None:
    request = await _asked(requests, call, pb.StatusRequest)
    await _answer(call, pb.StatusReply(progress=len(request.swap_id)))


def test_a_request_is_answered() -> None:
    call = Call()
    asyncio.run(ask(call, words(pb.StatusRequest(swap_id=bytes(7)).SerializeToString(), then_waits=True)))
    assert call.answers == [pb.StatusReply(progress=7).SerializeToString()]


@pytest.mark.parametrize(
    ("messages", "takes", "sentence"),
    [
        ((), True, "no request was received"),
        ((b"\xff",), True, "not a valid protocol message"),
        ((b"",), False, "accepted no message"),
    ],
)
def test_who_says_nothing_or_nonsense_or_takes_nothing_is_not_waited_for(
    messages: tuple[bytes, ...], takes: bool, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FIRST_WORDS_S", 0.05)
    monkeypatch.setattr(server, "TAKE_S", 0.05)
    with pytest.raises(EndedError, match=sentence):
        asyncio.run(asyncio.wait_for(ask(Call(takes=takes), words(*messages, then_waits=True)), PATIENCE_S))
