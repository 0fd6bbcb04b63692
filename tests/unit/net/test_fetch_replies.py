"""Invalid replies of a hostile donor, over real gRPC, are refused before they take memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import pytest
from harness.patience import PATIENCE_S
from rogue_server import rogue

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import MAX_CHUNKS_PER_REQUEST, FetchItem, Hello, WantChunks, WantManifest
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.convert import want_from_wire
from noloco_p2p.net.wire.v1 import peer_pb2 as pb


def repeating(reply: pb.FetchReply) -> AbstractAsyncContextManager[Candidate]:
    """Run a donor that answers every fetch with this reply, without end."""

    async def fetch(_: AsyncIterator[bytes], context: Any) -> None:
        while True:
            await context.write(reply.SerializeToString())

    return rogue("Fetch", fetch)


async def all_items(there: Candidate) -> list[FetchItem]:
    transport = GrpcTransport(lambda: Hello("caller", "r", "0" * 64))
    async with aclosing(transport.fetch(there, WantManifest(), timeout_s=PATIENCE_S)) as items:
        return [item async for item in items]


@pytest.mark.parametrize(
    "digests", [[], [bytes(32), b""], [bytes(1_000_000)], [bytes(32)] * 30_000], ids=["none", "empty", "long", "many"]
)
def test_a_manifest_without_end_is_refused(digests: list[bytes]) -> None:
    reply = pb.FetchReply(manifest=pb.Manifest(layout="x" * 50_000, num_elements=5, chunk_digests=digests))

    async def main() -> None:
        async with repeating(reply) as there:
            with pytest.raises(CorruptPayload, match="manifest"):
                await asyncio.wait_for(all_items(there), PATIENCE_S)

    asyncio.run(main())


def test_a_request_for_more_chunks_than_a_call_may_bring_is_refused() -> None:
    """The limit is checked before the state is looked up, as a list of chunk numbers is cheap to send."""
    indices = range(MAX_CHUNKS_PER_REQUEST)
    whole = pb.FetchRequest(chunks=pb.ChunksRequest(manifest_digest=bytes(32), indices=indices))
    assert want_from_wire(whole) == WantChunks(bytes(32), tuple(indices))
    whole.chunks.indices.append(MAX_CHUNKS_PER_REQUEST)
    with pytest.raises(CorruptPayload, match="at once"):
        want_from_wire(whole)
