"""Fuzz targets for every decoder of bytes from the network: `make fuzz MINUTES=5`.

Each target reads arbitrary bytes and damaged payloads of honest peers. It may raise only the errors that the decoder
documents, no example may take long, and the process may not grow. The frames of `flow/` have no wire form.
"""

from __future__ import annotations

import argparse
import base64
import json
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from blake3 import blake3
from google.protobuf.message import DecodeError
from harness.identities import identity_of
from harness.patience import AT_ONCE_S
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_p2p import ticket as tickets
from noloco_p2p.codec import ACTIVATION_CODECS, CODECS, Codec
from noloco_p2p.codec.modulo import EIGHT_BITS, FOUR_BITS, SIX_BITS, Grid
from noloco_p2p.errors import CorruptPayload, SpecError, TicketError
from noloco_p2p.flow.frames import Forward, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.coder import Coder, check_proposal
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.units import Slice, Units
from noloco_p2p.invitation import Invitation, invite
from noloco_p2p.net import convert, flow_wire
from noloco_p2p.net.flow_wire import FlowHello, Piece
from noloco_p2p.net.session import Session, caller_in
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.spec import RunSpec
from noloco_p2p.swarm.dial_back import DialBack
from noloco_p2p.swarm.punch import Words
from noloco_p2p.swarm.records import DOMAIN, PeerRecord, RecordError, _pack, believable, decode_record, encode_record
from noloco_p2p.swarm.relay import relays_of

MOST_MIB = 256.0  # limit to the growth of the process during one target
NUM_ELEMENTS = 1000
SHAPE = (3, 40)
ME = identity_of("fuzzer")
SESSION = Session(ME)
HELLO = frames.Hello(ME.peer_id, "run", "ab" * 32, layout="cd" * 32)
STANDING = frames.Standing(0.25, 1.5, 0.5)
FRAMES: list[frames.Frame] = [
    frames.Offer(HELLO, b"i" * 16, STANDING, b"\x00\x01\xff", 2),
    frames.Accept(HELLO, STANDING, Slice(1, 2)),
    frames.Refuse(frames.RefuseCode.BUSY, "not now", 1.0),
    frames.Grid(b"\x01\x02\x03"),
    frames.Header(b"d" * 32),
    frames.Chunk(b"payload" * 9),
    frames.Received(),
    frames.Ready(),
    frames.Alive(),
    frames.Abort(frames.AbortCode.CORRUPT, "no"),
]
ONES, GRID = torch.ones(9), Grid((0,), seed=1)
RECORD = PeerRecord(
    ME.peer_id,
    "run",
    "ab" * 32,
    addresses=("192.0.2.7:29500",),
    multiaddrs=(f"/ip4/192.0.2.7/tcp/29501/p2p/{ME.peer_id}",),
    expires_at_s=2e9,
)


@dataclass(frozen=True, slots=True)
class Target:
    """`decode` may raise `faults` only; `seeds` are payloads of honest peers."""

    decode: Callable[[bytes], object]
    faults: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...] = ()


def damaged(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Draw arbitrary bytes, or a seed with bytes replaced, deleted or inserted in some places."""
    if not seeds:
        return st.binary(max_size=4096)
    piece = st.tuples(st.integers(0, max(map(len, seeds))), st.integers(0, 8), st.binary(max_size=8))

    def apply(seed: bytes, pieces: list[tuple[int, int, bytes]]) -> bytes:
        for at, num_gone, new in pieces:
            seed = seed[:at] + new + seed[at + num_gone :]
        return seed

    return st.binary(max_size=4096) | st.builds(apply, st.sampled_from(seeds), st.lists(piece, max_size=5))


def _parsed_as(message: type, read: Callable[..., object]) -> Callable[[bytes], object]:
    """Pass only messages that parse to `read`, as gRPC does."""

    def decode(data: bytes) -> object:
        try:
            parsed = message.FromString(data)
        except DecodeError:
            return None
        return read(parsed)

    return decode


def _flow_frame_seeds() -> tuple[bytes, ...]:
    ticket = MicrobatchTicket(MicrobatchId(ME.peer_id, 7), 0.25, 30, signature=bytes(64))
    seeds = (Want(ticket, 1.5, ("sink",)), Forward(ticket.id, 1.5, 300), Piece(True, b"x"))
    return tuple(map(flow_wire.encode, (*seeds, FlowHello(HELLO, 1))))


def _signed_record(body: bytes) -> PeerRecord:
    """Sign the fuzzed body; a signature is no protection, as anybody can sign."""
    return believable(decode_record(ME.sign(DOMAIN + body) + body), is_outside=False)


def _last_bits(data: bytes) -> object:
    """Decode the last bits of a chunk whose first bits are known; only a wrong length is an error."""
    earlier = b"".join(codec.encode(-ONES, grid=GRID) for codec in (FOUR_BITS, SIX_BITS))
    return EIGHT_BITS.differences(ONES, data, grid=GRID, earlier=earlier)


def _sealed_ticket(fields: bytes) -> object:
    """Add a valid checksum, so that the decoder reads the fields."""
    data = fields + tickets._checksum(fields)
    return tickets.Ticket.decode(tickets.PREFIX + base64.b32encode(data).decode().rstrip("=").lower())


def _spec(data: bytes) -> object:
    return RunSpec.from_json(data, expected_digest=blake3(data).hexdigest(), origin="fuzz")


def _frame_seeds() -> tuple[bytes, ...]:
    return tuple(convert.encode(frame, sequence=sequence) for frame in FRAMES for sequence in (0, 5))


def _record_body() -> bytes:
    assert encode_record(RECORD, ME)
    return _pack(RECORD)


def _ticket_fields() -> tuple[bytes, bytes]:
    invitation = invite(identity_of("founder"), expires_at_s=2e9, seed=bytes(32))
    ticket = tickets.Ticket("run", "ab" * 32, RECORD.multiaddrs, invitation)
    body = ticket.encode().removeprefix(tickets.PREFIX).upper()
    fields = base64.b32decode(body + "=" * (-len(body) % 8))[: -tickets.CHECKSUM_BYTES]
    return fields, invitation.encode()


def _codec_targets() -> dict[str, Target]:
    families = {"weights": CODECS, "activations": ACTIVATION_CODECS}
    return {
        f"{what} {codec.name}": Target(
            partial(_decode, codec),
            (CorruptPayload,),
            (bytes(codec.encode(torch.linspace(-1.0, 1.0, 120).view(SHAPE))),),
        )
        for what, codecs in families.items()
        for codec in codecs.values()
    }


def _decode(codec: Codec, data: bytes) -> Tensor:
    codec.check(data, shape=SHAPE)
    return codec.decode(data, shape=SHAPE)


def targets() -> dict[str, Target]:
    fields, invitation = _ticket_fields()
    layout = ModelLayout((("a", (2, 3)),), (("b", (2,), "cd" * 32),))
    manifest = frames.StateManifest("cd" * 32, 10, 0.5, 80, (bytes(16),))
    status = frames.PeerStatus(HELLO, "training", 0.5)
    fetch = pb.FetchRequest(hello=convert.to_wire(HELLO))
    fetch.chunks.indices.extend([1, 2])
    wire = (CorruptPayload,)

    def parsed(kind: type, read: Callable[[Any], object], message: Any) -> Target:
        return Target(_parsed_as(kind, read), wire, (message.SerializeToString(),))

    return {
        "frame": Target(convert.decode, wire, _frame_seeds()),
        "pipeline frame": Target(flow_wire.decode, wire, _flow_frame_seeds()),
        "hello": parsed(pb.Hello, partial(convert.from_wire, frames.Hello), convert.to_wire(HELLO)),
        "status": parsed(pb.StatusReply, partial(convert.from_wire, frames.PeerStatus), convert.to_wire(status)),
        "fetch request": parsed(pb.FetchRequest, convert.want_from_wire, fetch),
        "manifest": parsed(pb.Manifest, convert.manifest_from_wire, convert.to_wire(manifest)),
        "certificate of a caller": Target(caller_in, wire, (ssl.PEM_cert_to_DER_cert(SESSION.caller_pem.decode()),)),
        "record": Target(decode_record, (RecordError,), (encode_record(RECORD, ME),)),
        "signed record": Target(_signed_record, (RecordError,), (_record_body(),)),
        "ticket": Target(lambda data: tickets.Ticket.decode(data.decode("latin-1")), (TicketError,), (b"noloco1aa",)),
        "sealed ticket": Target(_sealed_ticket, (TicketError,), (fields,)),
        "invitation": Target(Invitation.decode, (TicketError,), (invitation,)),
        "spec": Target(_spec, (SpecError,), (json.dumps({"name": "run"}).encode(),)),
        "layout": Target(ModelLayout.from_json, (ValueError,), (layout.as_json(),)),
        "grid": Target(partial(check_proposal, Coder("modulo", Units(9000)), Slice(0, 3)), wire, (bytes(3),)),
        "bits by need": Target(_last_bits, wire, (EIGHT_BITS.encode(ONES, grid=GRID),)),
        "report of a dial back": Target(
            lambda data: DialBack.parse(data, [9]), (ValueError,), (b'["192.0.2.7", {"9": ""}]\n',)
        ),
        "way by a relay": Target(
            lambda data: relays_of(believable(_told(data), is_outside=False).multiaddrs),
            (),
            (f"/ip4/192.0.2.7/tcp/1/p2p/{ME.peer_id}/p2p-circuit".encode(),),
        ),
        "words of a hole": Target(Words.parse, (ValueError,), (Words(("192.0.2.7", 1), ("10.0.0.7", 2)).line(),)),
    } | _codec_targets()


def _told(data: bytes) -> PeerRecord:
    return PeerRecord(ME.peer_id, "run", "ab" * 32, multiaddrs=(f"{data.decode('latin-1')}/p2p/{ME.peer_id}",))


def fuzz(target: Target, *, num_examples: int) -> None:
    """Run one target; raises the unexpected error of the decoder with the bytes that caused it."""
    process = psutil.Process()
    before_bytes = process.memory_info().rss

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(damaged(target.seeds))
    def one(data: bytes) -> None:
        began_s = time.monotonic()
        with suppress(*target.faults):
            target.decode(data)
        assert time.monotonic() - began_s < AT_ONCE_S

    one()
    grown_mib = (process.memory_info().rss - before_bytes) / 2**20
    assert grown_mib < MOST_MIB, f"the process has grown by {grown_mib:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    until_s = time.monotonic() + 60.0 * parser.parse_args().minutes
    found, num_rounds = targets(), 0
    while time.monotonic() < until_s:
        for target in found.values():
            fuzz(target, num_examples=500)
        num_rounds += 1
    sys.stdout.write(f"{len(found)} decoders, {500 * num_rounds} examples each: no other error than documented\n")


if __name__ == "__main__":
    main()
