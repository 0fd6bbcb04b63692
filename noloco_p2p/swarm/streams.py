"""Limits how many streams other peers can open to this one, and keeps an error in one from affecting the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from noloco_p2p.errors import NolocoError
from noloco_p2p.identity import short_id

logger = logging.getLogger(__name__)

K = TypeVar("K")
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MAX_STREAMS = 256  # each stream uses a file descriptor
MAX_STREAMS_OF_ONE = 64  # per peer; a relay carries the calls of many peers
MAX_LINE_BYTES = 512
KEPT_FOR_RELAYS = 64  # part of MAX_STREAMS that is kept for relays with a reservation for this peer
FAULTS = (OSError, EOFError, RuntimeError, ValueError, NolocoError)  # TimeoutError is an OSError


class Streams:
    """The incoming streams of one node, for all protocols.

    `relays` returns the peers that currently hold a reservation for this one.
    """

    def __init__(self) -> None:
        self.relays: Callable[[], Collection[str]] = tuple
        self._open: Counter[str] = Counter()

    def bounded(self, handler: StreamHandler) -> StreamHandler:
        """Wrap a handler so that it is called only within the limits, and so that its errors are logged."""

        async def on_stream(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            most = MAX_STREAMS if peer in self.relays() else MAX_STREAMS - KEPT_FOR_RELAYS
            if self._open[peer] >= MAX_STREAMS_OF_ONE or self._open.total() >= most:
                return
            self._open[peer] += 1
            try:
                await handler(peer, reader, writer)
            except FAULTS as error:
                logger.debug("a stream from %s ended: %s", short_id(peer), error)
            finally:
                count_down(self._open, peer)

        return on_stream


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Read a line from another peer. Raises ValueError if it is longer than MAX_LINE_BYTES."""
    line = await reader.readline()
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"received a line of {len(line)} bytes, but the limit is {MAX_LINE_BYTES}")
    return line


def count_down(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
