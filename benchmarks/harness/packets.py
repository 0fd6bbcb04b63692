"""Read the endpoints of IPv4 packets from the TUN devices of netlab.py, and change the endpoints."""

from __future__ import annotations

import struct

OFFLOAD_HEADER = struct.Struct("=BBHHHH")  # flags, segmentation, header bytes, bytes per segment, two checksum fields
NEEDS_CHECKSUM = 1  # a flag: the checksum field holds only the sum over addresses, as for a network card
TCP, UDP = 6, 17
CHECKSUM_AT = {TCP: 16, UDP: 6}  # bytes after the IP header

End = tuple[bytes, int]  # four bytes of address, and a port


def destination_address(frame: bytes) -> bytes | None:
    """Return the four bytes of the address, or None if the frame is not an IPv4 packet."""
    start = OFFLOAD_HEADER.size
    if len(frame) < start + 20 or frame[start] >> 4 != 4:
        return None
    return frame[start + 16 : start + 20]


def flow(frame: bytes, *, reverse: bool = False) -> bytes:
    """Return the protocol, addresses and ports of an IPv4 packet, or with `reverse` those of its answer."""
    start = OFFLOAD_HEADER.size
    packet = frame[start:]
    header_bytes = 4 * (packet[0] & 15)
    source, destination = packet[12:16], packet[16:20]
    near, far = packet[header_bytes : header_bytes + 2], packet[header_bytes + 2 : header_bytes + 4]
    ends = (source + near, destination + far)
    return packet[9:10] + b"".join(reversed(ends) if reverse else ends)


def ends_of(frame: bytes) -> tuple[int, End, End] | None:
    """Return (protocol, source, destination) of a TCP or UDP packet, or None for any other packet."""
    start = OFFLOAD_HEADER.size
    if destination_address(frame) is None or frame[start + 9] not in CHECKSUM_AT:
        return None
    ports_at = start + 4 * (frame[start] & 15)
    near, far = struct.unpack_from("!HH", frame, ports_at)
    return frame[start + 9], (frame[start + 12 : start + 16], near), (frame[start + 16 : start + 20], far)


def with_ends(frame: bytes, source: End, destination: End) -> bytes:
    """Return the packet with other endpoints, and with both checksums updated (RFC 1624)."""
    start = OFFLOAD_HEADER.size
    body_at = start + 4 * (frame[start] & 15)
    changed = bytearray(frame)
    changed[start + 12 : start + 20] = source[0] + destination[0]
    struct.pack_into("!HH", changed, body_at, source[1], destination[1])
    addresses = frame[start + 12 : start + 20], bytes(changed[start + 12 : start + 20])
    ports = frame[body_at : body_at + 4], bytes(changed[body_at : body_at + 4])
    _mend(changed, start + 10, *addresses)
    checksum_at = body_at + CHECKSUM_AT[frame[start + 9]]
    if frame[0] & NEEDS_CHECKSUM:  # the sum, not its complement, and without the ports
        (total,) = struct.unpack_from("!H", changed, checksum_at)
        struct.pack_into("!H", changed, checksum_at, _added(total, *addresses))
    elif frame[start + 9] == TCP or any(frame[checksum_at : checksum_at + 2]):  # UDP may have no checksum
        _mend(changed, checksum_at, addresses[0] + ports[0], addresses[1] + ports[1])
    return bytes(changed)


def _mend(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    (checksum,) = struct.unpack_from("!H", packet, at)
    struct.pack_into("!H", packet, at, ~_added(~checksum & 0xFFFF, old, new) & 0xFFFF)


def _added(total: int, old: bytes, new: bytes) -> int:
    """Return the ones' complement sum `total` with the words of `old` replaced by those of `new`."""
    total += sum(~word & 0xFFFF for (word,) in struct.iter_unpack("!H", old))
    total += sum(word for (word,) in struct.iter_unpack("!H", new))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
