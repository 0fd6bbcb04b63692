"""Convert frames to the bytes of a protobuf `Frame` message, and back.

Nearly all bytes of a swap are payloads of chunks. Between sender and receiver, protobuf would copy each payload three
times. Here, chunks are encoded by hand with one copy, and decoded without any. A test verifies that the bytes are the
same as protobuf's.

If a swap uses several connections, its frames are numbered (`swap_stream.py`). The number is the last field, and 0
means that the frame is not numbered.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Chunk, Frame
from noloco_p2p.net import convert
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

# Tags: field number << 3 | wire type (0 varint, 2 length-delimited); see peer.proto.
FRAME_CHUNK, FRAME_SEQUENCE = 0x32, 0x78
CHUNK_INDEX, CHUNK_PAYLOAD, CHUNK_DIGEST = 0x08, 0x12, 0x1A


def encode(frame: Frame, *, sequence: int = 0) -> bytes:
    numbered = _tagged(FRAME_SEQUENCE, sequence) if sequence else b""
    if not isinstance(frame, Chunk):
        return convert.frame_to_wire(frame).SerializeToString() + numbered
    index = _tagged(CHUNK_INDEX, frame.index) if frame.index else b""  # protobuf omits zeros
    head = index + _tagged(CHUNK_PAYLOAD, len(frame.payload))
    tail = _tagged(CHUNK_DIGEST, len(frame.digest)) + frame.digest
    length = len(head) + len(frame.payload) + len(tail)
    return b"".join((_tagged(FRAME_CHUNK, length), head, frame.payload, tail, numbered))


def decode(data: bytes) -> tuple[Frame, int]:
    """Return a frame and its sequence number. The payload of a chunk is a view of `data`.

    Raises CorruptPayload if `data` is not a frame of this protocol version.
    """
    chunk = _decode_chunk(data) if data[:1] == bytes((FRAME_CHUNK,)) else None
    if chunk is not None:
        return chunk
    try:
        message = pb.Frame.FromString(data)
    except DecodeError:
        raise CorruptPayload("received a message that is not a valid frame") from None
    return convert.frame_from_wire(message), message.sequence


def _decode_chunk(data: bytes) -> tuple[Chunk, int] | None:
    """Decode a chunk in the form that `encode` writes. For any other form, the result is None, and protobuf decodes the
    chunk instead.
    """
    try:
        length, at = _varint(data, 1)
        end, sequence = at + length, 0
        if end != len(data):
            sequence, numbered_end = _varint(data, end + 1)
            if data[end] != FRAME_SEQUENCE or numbered_end != len(data):
                return None
        index = 0
        if data[at] == CHUNK_INDEX:
            index, at = _varint(data, at + 1)
        if data[at] != CHUNK_PAYLOAD:
            return None
        size, start = _varint(data, at + 1)
        at = start + size
        if data[at] != CHUNK_DIGEST:
            return None
        digest_size, digest_at = _varint(data, at + 1)
        if digest_at + digest_size != end:
            return None
    except IndexError:  # the data ends too early
        return None
    return Chunk(index, memoryview(data)[start:at], data[digest_at:end]), sequence


def _tagged(tag: int, value: int) -> bytes:
    """Encode a tag and a varint."""
    out = bytearray((tag,))
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value of a varint and the position after it. A varint has at most ten bytes, as in protobuf.

    Raises IndexError if `data` ends too early.
    """
    value = 0
    for position in range(10):
        byte = data[at + position]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, at + position + 1
    raise IndexError
