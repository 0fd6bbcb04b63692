"""A node survives any number of streams with any content from strangers, and keeps room for others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.errors import DirectoryError
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.swarm.dial_back import DialBackServer
from noloco_p2p.swarm.relay import BEATS_AT_ONCE, MAX_STREAMS_OF_A_RESERVATION, NO, YES, Relay
from noloco_p2p.swarm.streams import KEPT_FOR_RELAYS, MAX_LINE_BYTES, MAX_STREAMS, MAX_STREAMS_OF_ONE, Streams

NOBODY: Any = None


class Writer:
    def __init__(self) -> None:
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    async def drain(self) -> None:
        await asyncio.sleep(0)


def test_one_peer_holds_so_many_streams_and_all_together_so_many() -> None:
    async def main() -> None:
        begun: list[str] = []
        may_end = asyncio.Event()

        async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun.append(peer)
            await may_end.wait()

        async def open_streams(peer: str, number: int) -> None:
            for _ in range(number):
                opened.append(asyncio.create_task(cast(Any, bounded(peer, NOBODY, NOBODY))))
            await asyncio.sleep(0)

        streams, opened = Streams(), list[asyncio.Task[None]]()
        bounded = streams.bounded(handler)
        await open_streams("greedy", MAX_STREAMS_OF_ONE + 5)
        assert len(begun) == MAX_STREAMS_OF_ONE
        for number in range(MAX_STREAMS):
            await open_streams(f"one of many {number}", 1)
        assert len(begun) == MAX_STREAMS - KEPT_FOR_RELAYS
        streams.relays = lambda: {"relay"}
        await open_streams("relay", KEPT_FOR_RELAYS + 5)
        assert len(begun) == MAX_STREAMS, "its own relays still reach this peer"
        may_end.set()
        await asyncio.gather(*opened)
        await open_streams("greedy", 1)
        assert len(begun) == MAX_STREAMS + 1, "a stream that has ended makes room"
        await asyncio.gather(*opened)

    asyncio.run(main())


@pytest.mark.parametrize("fault", [ValueError("abc is no port"), DirectoryError("gone"), ConnectionResetError()])
def test_what_a_stranger_says_wrong_ends_its_stream_alone(fault: Exception) -> None:
    served: list[str] = []

    async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peer == "stranger":
            raise fault
        served.append(peer)

    async def main() -> None:
        bounded = Streams().bounded(handler)
        other = asyncio.create_task(cast(Any, bounded("friend", NOBODY, NOBODY)))
        for _ in range(MAX_STREAMS + 1):  # a stream that failed must free its place
            await bounded("stranger", NOBODY, NOBODY)
        await other
        await bounded("stranger's friend", NOBODY, NOBODY)
        await bounded("friend", NOBODY, NOBODY)

    asyncio.run(main())
    assert served == ["friend", "stranger's friend", "friend"]


def test_one_peer_has_few_streams_for_its_reservation() -> None:
    async def main() -> None:
        relay, writers = Relay(NOBODY), [Writer() for _ in range(MAX_STREAMS_OF_ONE)]
        keeping = [
            asyncio.create_task(relay._on_reserve("peer", asyncio.StreamReader(), cast(Any, writer)))
            for writer in writers
        ]
        await asyncio.sleep(0)
        assert [writer.said for writer in writers].count(YES) == MAX_STREAMS_OF_A_RESERVATION
        assert [writer.said for writer in writers].count(NO) == MAX_STREAMS_OF_ONE - MAX_STREAMS_OF_A_RESERVATION
        await end_tasks(keeping)
        assert not relay._reservations

    asyncio.run(main())


def test_a_reservation_is_lost_when_its_peer_beats_without_a_pause() -> None:
    async def main() -> None:
        reader, writer = asyncio.StreamReader(), Writer()
        reader.feed_data(b"." * (1 << 20))
        await asyncio.wait_for(Relay(NOBODY)._on_reserve("peer", reader, cast(Any, writer)), PATIENCE_S)
        assert BEATS_AT_ONCE <= writer.said.count(b".") < 4 * BEATS_AT_ONCE

    asyncio.run(main())


@pytest.mark.parametrize("line", [b"1 " * MAX_LINE_BYTES, b"9" * 60_000], ids=["many ports", "a long port"])
def test_a_line_is_not_parsed_if_it_is_longer_than_any_request(line: bytes) -> None:
    async def main() -> None:
        relay = Relay(NOBODY)
        dial = DialBackServer(NOBODY)._on_dial
        for handle in (dial, lambda *stream: relay._on_call("protocol", *stream)):
            reader, writer = asyncio.StreamReader(), Writer()
            reader.feed_data(line + b"\n")
            with pytest.raises(ValueError, match="but the limit is 512"):
                await handle("stranger", reader, cast(Any, writer))
            assert not writer.said

    asyncio.run(main())
