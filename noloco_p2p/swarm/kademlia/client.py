"""The connection to p2pd, with bounds: hivemind's client, which answers strangers' requests in small portions.

hivemind creates a task for each request that p2pd passes on, without limit, and reads all that have arrived in one turn
of the event loop. Here most requests are answered as they are read, the rest by a bounded number of tasks, and the loop
runs other callbacks every TURN_S. p2pd waits when answers are not taken.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError, read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.addresses import host_in
from noloco_p2p.swarm.daemon import MAX_MESSAGE_BYTES
from noloco_p2p.swarm.streams import StreamHandler

T = TypeVar("T")
Handler = Callable[[bytes, PeerID], bytes | Awaitable[bytes]]

TURN_S = 0.002  # of reading, before other callbacks of the loop run
MAX_ANSWERING, MAX_ANSWERING_OF_ONE = 64, 4  # requests whose answer has to wait; of one peer
MAX_UNSENT = 256  # messages to p2pd
MESSAGE_BYTES = 1024  # of a message to p2pd, besides the answer

# The errors of a call to another node: p2pd, sockets, timeouts, and bytes that are not an answer.
ANSWER_FAULTS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, ValueError, DecodeError, DirectoryError)

_opened: ContextVar[list[asyncio.StreamWriter]] = ContextVar("connections to p2pd that a question has opened")
known_id = lru_cache(maxsize=1024)(PeerID)  # each costs a hash and a base58 text


class NotingConnector(DaemonConnector):
    """Records the connections that a question opens, because hivemind leaves that of a failed one open."""

    async def open_connection(self) -> Any:
        reader, writer = await super().open_connection()
        _opened.get([]).append(writer)
        return reader, writer


class BoundedControl(ControlClient):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_messages = asyncio.Queue(MAX_UNSENT)
        self._answering: dict[asyncio.Task[None], bytes] = {}  # and the asking peer

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        began_s = time.monotonic()
        while True:
            message: Any = vars(p2pd_pb2)["PersistentConnectionResponse"]()
            try:
                await read_pbmsg_safe(reader, message)
            except asyncio.IncompleteReadError:
                return
            if message.HasField("requestHandling"):
                await self._answer(message.callId, message.requestHandling)
            else:
                self._resolve(message)
            if time.monotonic() - began_s > TURN_S:
                await asyncio.sleep(0)
                began_s = time.monotonic()

    def _resolve(self, message: Any) -> None:
        """Handle an answer to a call of this side. If the caller has given up, or never asked, it is dropped."""
        future = self._pending_calls.get(UUID(bytes=message.callId))
        if future is None or future.done():
            return
        if message.HasField("daemonError"):
            future.set_exception(P2PDaemonError(message.daemonError.message))
        elif not message.HasField("callUnaryResponse"):
            future.set_result(b"")
        elif message.callUnaryResponse.HasField("error"):
            future.set_exception(P2PHandlerError(message.callUnaryResponse.error.decode(errors="replace")))
        else:
            future.set_result(message.callUnaryResponse.response)

    async def _answer(self, call_id: bytes, request: Any) -> None:
        """Run a handler. Bytes are the answer; a handler that has to wait gets a task."""
        handler: Handler | None = self.unary_handlers.get(request.proto)  # pyright: ignore[reportAssignmentType]
        if handler is None:
            return await self._reply(call_id, error=b"no such handler")
        try:
            answer = handler(request.data, known_id(request.peer))
        except Exception as error:  # noqa: BLE001 - of a stranger's bytes; it ends this request alone
            return await self._reply(call_id, error=str(error).encode())
        if isinstance(answer, bytes):
            return await self._reply(call_id, response=answer)
        num_of_one = sum(asker == request.peer for asker in self._answering.values())
        if len(self._answering) >= MAX_ANSWERING or num_of_one >= MAX_ANSWERING_OF_ONE:
            if inspect.iscoroutine(answer):
                answer.close()
            return await self._reply(call_id, error=b"too many requests at once")
        task = asyncio.create_task(self._answer_later(call_id, answer), name="answer to a peer")
        self._answering[task] = request.peer
        task.add_done_callback(self._answering.pop)

    async def _answer_later(self, call_id: bytes, answer: Awaitable[bytes]) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - the same
            await self._reply(call_id, error=str(error).encode())
        else:
            await self._reply(call_id, response=response)

    async def _reply(self, call_id: bytes, **answer: bytes) -> None:
        """Send an answer. p2pd ends when a message is longer than announced."""
        if sum(map(len, answer.values())) > MAX_MESSAGE_BYTES - MESSAGE_BYTES:
            answer = {"error": b"the answer is too long"}
        response = vars(p2pd_pb2)["CallUnaryResponse"](**answer)
        request = vars(p2pd_pb2)["PersistentConnectionRequest"](callId=call_id, unaryResponse=response)
        await self._pending_messages.put(request)

    def close(self) -> None:
        super().close()
        for task in self._answering:
            task.cancel()


class DaemonClient(P2P):
    """A client of a running p2pd. Create it with `attach()`, and end it with `detach()`."""

    def __init__(self) -> None:
        super().__init__()
        listen = f"{self._UNIX_SOCKET_PREFIX}p2pclient-{secrets.token_urlsafe(8)}.sock"
        self._client_listen_maddr = Multiaddr(listen)
        self._daemon_listen_maddr = None  # its creator removes its socket
        self._child, self._alive = None, True

    @classmethod
    async def attach(cls, control_socket: str) -> DaemonClient:
        self = cls()
        self._client = await self._connected(control_socket)
        await self._ping_daemon()
        return self

    async def _connected(self, control_socket: str) -> Any:
        client: Any = Client(_initialized_with_create=True)
        client.control = await BoundedControl.create(
            NotingConnector(Multiaddr(f"/unix{control_socket}")),
            self._client_listen_maddr,
            persistent_conn_max_msg_size=MAX_MESSAGE_BYTES,
        )
        return client

    async def detach(self) -> None:
        """Close the client, even if the daemon is dead, and its tasks, whose exceptions hivemind would log."""
        tasks = [*self.connection_tasks(), *self._control._answering]
        if self._listen_task is not None:
            tasks.append(self._listen_task)
        await self.shutdown()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _control(self) -> BoundedControl:
        control: Any = self._client
        return control.control

    def connection_tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the one permanent connection; when the first of them ends, it is lost.

        hivemind has no public signal for that: afterwards all its calls wait for their timeouts.
        """
        control: Any = self._control
        return [control._read_task, control._write_task]

    @property
    def own_id(self) -> bytes:
        """The peer id."""
        return self.peer_id.to_bytes() if self.peer_id else b""

    async def handle_requests(self, protocol: str, handler: Handler) -> None:
        """Let `handler` answer the requests of this protocol from now on; its errors are sent to the caller."""
        await self._control.add_unary_handler(protocol, handler)  # pyright: ignore[reportArgumentType]

    async def ask(self, peer: PeerID, protocol: str, request: bytes) -> bytes:
        """Return the answer of another peer."""
        return await self._control.call_unary_handler(peer, protocol, request)

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect libp2p to a peer at one of `addresses` (without /p2p/...)."""
        multiaddrs = [Multiaddr(address) for address in addresses]
        await _asked(self._control.connect(PeerID.from_base58(peer_id), multiaddrs))

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw byte stream to a peer that libp2p is connected to, or can dial."""
        _, reader, writer = await _asked(self.call_binary_stream_handler(PeerID.from_base58(peer_id), protocol))
        return reader, writer

    async def remote_addresses(self) -> list[tuple[str, str]]:
        """(peer id, multiaddr) of every connection."""
        peers = await _asked(self.list_peers())
        return [(str(peer.peer_id), str(address)) for peer in peers for address in peer.addrs]

    async def hosts_of(self, peer_id: str) -> set[str]:
        """The hosts of a peer, by its connections; "" stands for a relay, and an empty set for no connection.

        If there is a connection, libp2p dials none of the addresses that `connect` gets.
        """
        return {host_in(address) for peer, address in await self.remote_addresses() if peer == peer_id}

    async def handle_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Pass (peer id, reader, writer) of each stream of this protocol to `handler`, which need not close it."""

        async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(str(info.peer_id), reader, writer)
            finally:
                writer.close()

        await _asked(self.add_binary_stream_handler(protocol, on_stream))

    async def answers(self) -> None:
        """Return when the daemon has answered a question."""
        await _asked(self.get_visible_maddrs(latest=True))


async def _asked(question: Awaitable[T]) -> T:
    """Return p2pd's answer. hivemind leaves the connection open if a question fails or is cancelled."""
    writers: list[asyncio.StreamWriter] = []
    before = _opened.set(writers)
    try:
        return await question
    except BaseException:
        for writer in writers:
            writer.close()
        raise
    finally:
        _opened.reset(before)
