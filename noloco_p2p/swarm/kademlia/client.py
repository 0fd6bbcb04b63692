"""Connects to p2pd with a client that is based on hivemind's, but limits how much work strangers can cause.

hivemind creates a task for every request that p2pd passes on, without a limit. In one turn of the event loop, it reads
all requests that have arrived. Here, most requests are answered as they are read, and the rest by a limited number of
tasks. The event loop gets to run other callbacks every TURN_S. If answers pile up, this node reads no more requests,
and p2pd waits.
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
from noloco_p2p.identity import MAX_ID_CHARS
from noloco_p2p.swarm.addresses import host_in, tcp_target
from noloco_p2p.swarm.daemon import MAX_MESSAGE_BYTES
from noloco_p2p.swarm.streams import StreamHandler

T = TypeVar("T")
Handler = Callable[[bytes, PeerID], bytes | Awaitable[bytes]]

TURN_S = 0.002  # the time for reading before other callbacks of the event loop run
MAX_ANSWERING, MAX_ANSWERING_OF_ONE = 64, 4  # requests whose answers need to wait, in total and per peer
MAX_UNSENT = 256  # unsent messages to p2pd
MESSAGE_BYTES = 1024  # space in a message to p2pd for everything except the answer
MAX_ERROR_BYTES = 200  # of the text with which another node refuses a request
MAX_ID_BYTES = 64  # an Ed25519 id has 38; encoding an id in base58, as PeerID() does, takes quadratic time

# The errors that a call to another node can raise, caused by p2pd, sockets, timeouts or malformed answers.
ANSWER_FAULTS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, ValueError, DecodeError, DirectoryError)

_opened: ContextVar[list[asyncio.StreamWriter]] = ContextVar("connections to p2pd that a request has opened")


@lru_cache(maxsize=1024)
def known_id(raw: bytes) -> PeerID:
    """Return a peer id that arrived as bytes. Raises ValueError if it is too long to be one."""
    if len(raw) > MAX_ID_BYTES:
        raise ValueError(f"a peer id has at most {MAX_ID_BYTES} bytes, not {len(raw)}")
    return PeerID(raw)


def id_in(text: str) -> PeerID:
    """Return the peer id in a text in base58. Raises ValueError if it is not one."""
    if len(text) > MAX_ID_CHARS:
        raise ValueError(f"a peer id has at most {MAX_ID_CHARS} characters, not {len(text)}")
    return PeerID.from_base58(text)


class NotingConnector(DaemonConnector):
    """Records the connections that a request opens, because hivemind does not close them if the request fails."""

    async def open_connection(self) -> Any:
        reader, writer = await super().open_connection()
        _opened.get([]).append(writer)
        return reader, writer


class BoundedControl(ControlClient):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_messages = asyncio.Queue(MAX_UNSENT)
        self._answering: dict[asyncio.Task[None], bytes] = {}  # task -> the peer that sent the request

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
        """Pass an answer to the call that waits for it, or drop the answer if there is no such call."""
        future = self._pending_calls.get(UUID(bytes=message.callId))
        if future is None or future.done():
            return
        if message.HasField("daemonError"):
            future.set_exception(P2PDaemonError(message.daemonError.message))
        elif not message.HasField("callUnaryResponse"):
            future.set_result(b"")
        elif message.callUnaryResponse.HasField("error"):
            error = message.callUnaryResponse.error[:MAX_ERROR_BYTES].decode(errors="replace")
            future.set_exception(P2PHandlerError("".join(filter(str.isprintable, error))))  # it is shown to the user
        else:
            future.set_result(message.callUnaryResponse.response)

    async def _answer(self, call_id: bytes, request: Any) -> None:
        """Answer a request by running its handler. If the handler returns an awaitable, a task waits for the answer."""
        handler: Handler | None = self.unary_handlers.get(request.proto)  # pyright: ignore[reportAssignmentType]
        if handler is None:
            return await self._reply(call_id, error=b"no such handler")
        try:
            answer = handler(request.data, known_id(request.peer))
        except Exception as error:  # noqa: BLE001 - caused by a stranger's bytes; it must end only this request
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
        except Exception as error:  # noqa: BLE001 - as above
            await self._reply(call_id, error=str(error).encode())
        else:
            await self._reply(call_id, response=response)

    async def _reply(self, call_id: bytes, **answer: bytes) -> None:
        """Send an answer, or an error if the answer is too long. A message over the limit would make p2pd exit."""
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
        self._daemon_listen_maddr = None  # the process that created the socket removes it
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
        """Close the client, even if the daemon is dead, and wait for its tasks.

        Otherwise, the exceptions of these tasks would be logged.
        """
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
        """Return the tasks of the permanent connection to p2pd. When one of them ends, the connection is lost.

        hivemind has no public signal for this. After the loss, all its calls simply time out.
        """
        control: Any = self._control
        return [control._read_task, control._write_task]

    @property
    def own_id(self) -> bytes:
        """The peer id of this node as bytes."""
        return self.peer_id.to_bytes() if self.peer_id else b""

    async def handle_requests(self, protocol: str, handler: Handler) -> None:
        """Let `handler` answer the requests of a protocol. Its errors are sent to the caller."""
        await self._control.add_unary_handler(protocol, handler)  # pyright: ignore[reportArgumentType]

    async def ask(self, peer: PeerID, protocol: str, request: bytes, *, most_bytes: int) -> bytes:
        """Send a request to another peer, and return the answer. Raises DirectoryError if the answer is longer than
        `most_bytes`.
        """
        answer = await self._control.call_unary_handler(peer, protocol, request)
        if len(answer) > most_bytes:
            raise DirectoryError(f"the answer has {len(answer)} bytes, but the limit is {most_bytes}")
        return answer

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect libp2p to a peer at one of `addresses`, which have no peer id.

        Raises DirectoryError if one of them is not a TCP address.
        """
        if not all(map(tcp_target, addresses)):
            raise DirectoryError(f"not all of these are TCP addresses: {', '.join(addresses)}")
        multiaddrs = [Multiaddr(address) for address in addresses]
        await _asked(self._control.connect(id_in(peer_id), multiaddrs))

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw byte stream to a peer to which libp2p is connected, or which it can dial."""
        _, reader, writer = await _asked(self.call_binary_stream_handler(id_in(peer_id), protocol))
        return reader, writer

    async def hosts_of(self, peer_id: str) -> set[str]:
        """Return the hosts of the connections to a peer.

        The host "" stands for a relay. If there is no connection, the set is empty. If there is one, libp2p does not
        dial the addresses that are passed to `connect`.
        """
        peers = await _asked(self.list_peers())
        return {host_in(str(address)) for peer in peers if str(peer.peer_id) == peer_id for address in peer.addrs}

    async def handle_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` with (peer id, reader, writer) for each stream of a protocol, then close the stream."""

        async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(str(info.peer_id), reader, writer)
            finally:
                writer.close()

        await _asked(self.add_binary_stream_handler(protocol, on_stream))

    async def answers(self) -> None:
        """Wait until p2pd has answered a request, which shows that it is alive."""
        await _asked(self.get_visible_maddrs(latest=True))


async def _asked(question: Awaitable[T]) -> T:
    """Return p2pd's answer. If the request fails or is cancelled, close its connection, which hivemind leaves open."""
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
