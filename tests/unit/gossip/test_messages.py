"""Several chunks in one message: which travel together, and what a receiver makes of messages that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
import torch

from noloco_p2p.codec import CHUNK_ELEMENTS, chunk_bounds
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Chunk, Payload, SectionName, chunk_digest
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.pipeline import MESSAGE_BYTES, CheckBehind, code_ahead
from noloco_p2p.gossip.sections import Coding, Squares, section_plans
from noloco_p2p.net.options import MAX_MESSAGE_BYTES
from noloco_p2p.spec import CodecSpec

NUM_CHUNKS = 9
NUM_ELEMENTS = (NUM_CHUNKS - 1) * CHUNK_ELEMENTS + 77
VALUES = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))


def coding(codec: str) -> Coding:
    plans = section_plans(CodecSpec(outer_gradient=codec), swap_momentum=False, num_elements=NUM_ELEMENTS)  # pyright: ignore[reportArgumentType]
    return Coding(plans[-1])


def payloads(codec: str) -> list[bytes]:
    return [coding(codec).plan.codec.encode(VALUES[start:stop]) for start, stop in chunk_bounds(NUM_ELEMENTS)]


async def messages_of(codec: str, indices: Sequence[int]) -> list[Chunk]:
    slab = PayloadMemory().take(coding(codec).plan.num_bytes)
    own: list[Payload | None] = [None] * NUM_CHUNKS
    with ThreadPoolExecutor(1) as executor:
        coded = code_ahead(coding(codec), indices, VALUES, executor=executor, slab=slab, own=own, squares=Squares())
        async with aclosing(coded) as messages:
            sent = [message async for message in messages]
    assert [payload for payload in own if payload is not None] == [payloads(codec)[index] for index in indices]
    return sent


async def check(codec: str, messages: Sequence[Chunk], indices: Sequence[int]) -> CheckBehind:
    slab = PayloadMemory().take(coding(codec).plan.num_bytes)
    with ThreadPoolExecutor(1) as executor:
        check = CheckBehind(coding(codec), indices, executor=executor, slab=slab)
        for message in messages:
            assert message.index == check.next_index
            await check.add(message)
        await check.finish()
    return check


def message(index: int, payload: bytes) -> Chunk:
    return Chunk(SectionName.OUTER_GRADIENT, index, payload, chunk_digest(payload))


@pytest.mark.parametrize(
    ("codec", "first_chunks"),
    [
        ("fp32", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("bf16", [0, 1, 2, 3, 4, 5, 6, 7]),  # the last chunk is short
        ("int8", [0, 2, 4, 6]),
        ("int4", [0, 4, 8]),
    ],
)
def test_as_many_chunks_travel_together_as_a_message_holds(codec: str, first_chunks: list[int]) -> None:
    sent = asyncio.run(messages_of(codec, range(NUM_CHUNKS)))
    assert [message.index for message in sent] == first_chunks
    assert all(len(message.payload) <= max(MESSAGE_BYTES, 4 * CHUNK_ELEMENTS) < MAX_MESSAGE_BYTES for message in sent)
    assert b"".join(message.payload for message in sent) == b"".join(payloads(codec))
    assert asyncio.run(check(codec, sent, range(NUM_CHUNKS))).kept == payloads(codec)


def test_chunks_that_are_sent_again_travel_together_too() -> None:
    indices = [1, 2, 5, 6, 8]
    sent = asyncio.run(messages_of("int4", indices))
    assert [message.index for message in sent] == [1, 8]
    kept = asyncio.run(check("int4", sent, indices))
    assert kept.kept == [payloads("int4")[index] for index in indices]
    assert kept.next_index is None


def test_a_sender_may_put_any_number_of_chunks_into_a_message() -> None:
    parts = payloads("int4")
    sent = [message(0, parts[0]), message(1, b"".join(parts[1:7])), message(7, b"".join(parts[7:]))]
    assert asyncio.run(check("int4", sent, range(NUM_CHUNKS))).kept == parts


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ([message(0, b"")], "must have"),
        ([message(0, payloads("int4")[0][:-1])], "must have"),
        ([message(0, payloads("int4")[0] + b"x")], "must have"),
        ([message(0, b"".join(payloads("int4")) + b"x")], "the rest of outer_gradient must have"),
        ([Chunk(SectionName.OUTER_GRADIENT, 0, b"".join(payloads("int4")[:2]), bytes(16))], "is damaged"),
    ],
    ids=["empty", "cut", "longer", "too many", "digest"],
)
def test_a_message_that_holds_no_whole_chunks_is_refused(sent: list[Chunk], sentence: str) -> None:
    with pytest.raises(CorruptPayload, match=sentence):
        asyncio.run(check("int4", sent, range(NUM_CHUNKS)))
