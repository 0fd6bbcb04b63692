"""A gRPC server with a single method that writes raw bytes, which no honest peer would send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.server import SERVICE


@asynccontextmanager
async def rogue(method: str, handler: grpc.RpcMethodHandler) -> AsyncIterator[Candidate]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Candidate("rogue", f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
