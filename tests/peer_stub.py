"""The calls with one request, as a caller makes them that does not use `GrpcTransport`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from noloco_p2p.net.connection import SERVICE
from noloco_p2p.net.wire.v1 import peer_pb2 as pb


class PeerStub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Status: Any = channel.unary_unary(
            f"/{SERVICE}/Status", pb.StatusRequest.SerializeToString, pb.StatusReply.FromString
        )
        self.Fetch: Any = channel.unary_stream(
            f"/{SERVICE}/Fetch", pb.FetchRequest.SerializeToString, pb.FetchReply.FromString
        )
