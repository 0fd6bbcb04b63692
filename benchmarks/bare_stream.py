"""Provide a bare gRPC stream between two processes, which is the baseline for the cost of a swap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
from pair import PATIENCE_S, start_loop

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net import options
from noloco_p2p.net.session import SERVER_NAME, Session


class BareStream:
    """Sends messages of `sizes` bytes in both directions at once, without encoding or reading them.

    Side a calls, and side b answers. The stream uses TLS unless `is_plain` is true. `run_pair` drives both sides, each
    of which has its own network thread.
    """

    def __init__(self, name: str, pipe: Connection, sizes: Sequence[int], *, is_plain: bool = False) -> None:
        self._name, self._sizes, self._is_plain = name, sizes, is_plain
        self._payloads = {size: bytes(size) for size in set(sizes)}
        self._session = Session(Identity.from_seed(bytes(32)))
        self._served = threading.Event()
        self._loop = start_loop()
        self._server, port = self._on_loop(self._serve()).result(PATIENCE_S)
        pipe.send((port, self._session.key))
        _, self._address, self._key = pipe.recv()

    def start(self) -> None:
        """Start sending, and return at once."""
        self._served.clear()
        self._calling = self._on_loop(self._call()) if self._name == "a" else None

    def is_over(self) -> bool:
        return self._calling.done() if self._calling else self._served.is_set()

    def wait(self) -> None:
        if self._calling:
            self._calling.result(PATIENCE_S)
        else:
            assert self._served.wait(PATIENCE_S)

    def stop(self) -> None:
        self._on_loop(self._server.stop(0.1)).result(PATIENCE_S)

    def _on_loop(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _messages(self) -> AsyncIterator[bytes]:
        for size in self._sizes:
            yield self._payloads[size]

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async def send() -> None:
            async for message in self._messages():
                await context.write(message)

        sender = asyncio.create_task(send())
        async for _ in requests:
            pass
        await sender
        self._served.set()

    async def _serve(self) -> tuple[Any, int]:
        server = grpc.aio.server(options=options.SERVER)
        method = grpc.stream_stream_rpc_method_handler(self._answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", {"Stream": method}),))
        if self._is_plain:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            keys = self._session._private_pem(), self._session._certificate
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([keys]))
        await server.start()
        return server, port

    async def _call(self) -> None:
        async with self._channel() as channel:
            async for _ in channel.stream_stream("/bare.Bare/Stream")(self._messages()):
                pass

    def _channel(self) -> grpc.aio.Channel:
        if self._is_plain:
            return grpc.aio.insecure_channel(self._address, options=options.CLIENT)
        credentials = self._session.channel_credentials(Candidate("", self._address, session_key=self._key))
        named = ("grpc.ssl_target_name_override", SERVER_NAME)
        return grpc.aio.secure_channel(self._address, credentials, options=[*options.CLIENT, named])
