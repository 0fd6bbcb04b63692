"""Run the gRPC server of a peer. It maps calls to gossip's Service, and errors to refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, SettingsError, Unreachable
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.frames import Frame, Offer
from noloco_p2p.gossip.seams import Service
from noloco_p2p.identity import short_id
from noloco_p2p.net import convert, options
from noloco_p2p.net.authentication import Authenticator, refuse_to_wire
from noloco_p2p.net.connection import nobody_is_banned
from noloco_p2p.net.proxy import Inbound, Proxy
from noloco_p2p.net.session import Session
from noloco_p2p.net.swap_stream import MAX_CONNECTIONS, SwapConnection, SwapStream, call_cancelled
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)

SERVICE = "noloco_p2p.wire.v1.Peer"
JOIN_S = 5.0  # from the call of a further connection to its Join
FIRST_WORDS_S = 5.0  # from any other call to its request
TAKE_S = 20.0  # to read one answer of at most 1 MiB; without a limit, a slow reader could hold an upload slot forever
MANIFEST_DIGESTS_PER_REPLY = 16_384


class GrpcServer:
    """The gRPC server. `port` is the actual port once `start` has returned.

    `serve_flow` is `FlowLinks.serve` while this peer holds a stage, and None otherwise.
    """

    def __init__(
        self,
        service: Service,
        limits: Limits = UNLIMITED,
        *,
        session: Session | None = None,
        why_banned: Callable[[str], str] = nobody_is_banned,
        serve_flow: ServeFlow | None = None,
    ) -> None:
        self.port = 0
        self.serve_flow = serve_flow
        self._service = service
        self._limits = limits
        self._proxy = Proxy(tls=session.server_context() if session else None)
        self._authenticator = Authenticator(self._proxy, session, why_banned=why_banned)
        self._swaps = OwnedTasks("a swap offered by another peer")
        self._joinable: dict[bytes, ServerStream] = {}  # by swap id
        self._server = grpc.aio.server(options=[*options.SERVER, *limits.options()])
        self._server.add_generic_rpc_handlers((self._handlers(),))

    async def start(self, host: str, port: int) -> None:
        """Start listening. Raises SettingsError if the port is in use."""
        try:
            self.port = self._proxy.listen(host, port)
            self._server.add_insecure_port(f"unix:{self._proxy.behind}")
        except (OSError, RuntimeError):
            self._proxy.close()
            raise SettingsError(
                f"cannot listen on {host}:{port}: the port is in use, or you are not permitted to use it; "
                "choose another port with --listen HOST:PORT"
            ) from None
        await self._server.start()
        self._proxy.open()

    def take(self, connection: socket.socket, relay: str = "") -> None:
        """Serve a peer over a connection that this machine opened, or that a relay brings."""
        self._proxy.take(connection, relay)

    async def stop(self, grace_s: float) -> None:
        self._proxy.shut()
        await self._server.stop(grace_s)
        self._proxy.close()
        await self._swaps.stop(grace_s=0.0)

    def _handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of all methods. All of them are streaming handlers, because gRPC would wait forever for
        the request of a unary call.
        """
        visit = self._authenticator.visit
        methods = {
            "Greet": _Asked(self._authenticator.greet, pb.GreetRequest, enter=contextlib.nullcontext).handler(),
            "Swap": grpc.stream_stream_rpc_method_handler(self._on_swap),
            "Lane": grpc.stream_stream_rpc_method_handler(self._on_lane),
            "Flow": grpc.stream_stream_rpc_method_handler(self._on_flow),
            "Fetch": _Asked(self._on_fetch, pb.FetchRequest, enter=visit).handler(),
            "Status": _Asked(self._on_status, pb.StatusRequest, enter=visit).handler(),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _on_swap(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._authenticator.visit(context) as caller:
            wire = ServerWire(requests, context, caller.address, self._limits)
            stream = ServerStream(wire, self._joinable, visitor=caller)
            swap = self._swaps.start(self._swap(stream))
            closed = asyncio.create_task(wire.closed())
            try:
                # gRPC cancels this handler when the caller is gone. The swap is notified, and ends by its own rules.
                await asyncio.wait({swap, closed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
                if not wire.is_closed:
                    stream.lose(Unreachable("the connection was lost", peer=stream.peer))

    async def _swap(self, stream: ServerStream) -> None:
        try:
            await self._service.on_swap(stream)
        finally:
            await stream.close()

    async def _on_lane(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._authenticator.visit(context) as caller:
            wire = ServerWire(requests, context, caller.address, self._limits)
            try:
                async with asyncio.timeout(JOIN_S):
                    stream = self._joined(await wire.read() or b"", caller)
                caller.accepted()
                stream.join(wire, pb.Frame(join=pb.Join()).SerializeToString())
            except (PeerError, TimeoutError) as error:
                refuse = refuse_to_wire(
                    error if isinstance(error, PeerError) else _no_connection("no Join was received")
                )
                with contextlib.suppress(PeerError):  # the caller did not wait for the answer
                    await wire.write(pb.Frame(refuse=refuse).SerializeToString())
                return
            try:
                await wire.closed()
            finally:
                if not wire.is_closed:  # the caller is gone, and the connection with it
                    stream.lose(Unreachable("one of the swap's connections was lost", peer=stream.peer))

    def _joined(self, data: bytes, caller: Inbound) -> ServerStream:
        """Return the swap to which a connection belongs. Raises PeerError if there is none that the caller can join."""
        try:
            message = pb.Frame.FromString(data)
        except DecodeError:
            raise CorruptPayload("it sent data that is not a valid protocol message") from None
        if not message.HasField("join"):
            raise CorruptPayload("an additional connection must begin with a Join")
        hello = self._admitted(message.join.hello, caller)
        stream = self._joinable.get(message.join.swap_id)
        if stream is None or stream.caller != hello.peer_id:
            raise _no_connection("no swap with this id is in progress between us")
        return stream

    async def _on_flow(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._authenticator.visit(context) as caller:
            if not self.serve_flow:
                no_stage = Refused("this peer is not part of a pipeline", code=frames.RefuseCode.OTHER_MODEL.name)
                await context.write(pb.FlowFrame(refuse=refuse_to_wire(no_stage)).SerializeToString())
                return

            def admit(hello: frames.Hello) -> None:
                self._admit(hello, caller)
                caller.accepted()

            wire = ServerWire(requests, context, caller.address, self._limits)
            await self.serve_flow(wire, caller.peer_id, admit)

    async def _on_fetch(self, request: pb.FetchRequest, caller: Inbound) -> AsyncGenerator[pb.FetchReply]:
        try:
            self._admitted(request.hello, caller)
            want = _want(request)
            is_upload = isinstance(want, frames.WantChunks)
            with self._authenticator.fetching(caller.peer_id if is_upload else "") as check:
                async with aclosing(self._service.on_fetch(want)) as items:
                    async for item in items:
                        check()
                        if is_upload:  # it holds an upload slot
                            caller.accepted()
                        for reply in _replies(item):
                            await self._limits.uploading(reply.ByteSize())
                            yield reply
        except PeerError as error:
            yield pb.FetchReply(refuse=refuse_to_wire(error))

    async def _on_status(self, request: pb.StatusRequest, caller: Inbound) -> pb.StatusReply:
        try:
            self._admitted(request.hello, caller)
            return convert.status_to_wire(await self._service.on_status(request.swap_id[:64]))
        except PeerError as error:
            return pb.StatusReply(refuse=refuse_to_wire(error))

    def _admitted(self, message: pb.Hello, caller: Inbound) -> frames.Hello:
        """Check and return the caller's Hello.

        Raises PeerError if the caller is not the peer that it claims to be, or belongs to another run.
        """
        hello = convert.hello_from_wire(message)
        self._admit(hello, caller)
        return hello

    def _admit(self, hello: frames.Hello, caller: Inbound) -> None:
        check_name(caller.peer_id, hello)
        self._service.admit(hello)


class ServerWire:
    """A call by another peer. Its handler returns when this object is closed."""

    def __init__(self, requests: AsyncIterator[bytes], context: Any, address: str, limits: Limits = UNLIMITED) -> None:
        self._limits = limits
        self.peer = address
        self._requests = aiter(requests)
        self._context = context
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def write(self, data: bytes) -> None:
        await self._limits.sending(len(data))
        try:
            await self._context.write(data)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Unreachable(f"the connection was lost: {error}", peer=self.peer) from None
        except asyncio.CancelledError:
            raise call_cancelled(self.peer) from None

    async def read(self) -> bytes | None:
        try:
            message = await anext(self._requests, None)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            raise Unreachable(f"the connection was lost: {error}", peer=self.peer) from None
        except asyncio.CancelledError:
            raise call_cancelled(self.peer) from None
        await self._limits.receiving(len(message or b""))
        return message

    async def finish(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed.set()

    async def closed(self) -> None:
        """Wait until this peer has closed the call."""
        await self._closed.wait()


ServeFlow = Callable[[ServerWire, str, Callable[[frames.Hello], None]], Awaitable[None]]


class ServerStream(SwapStream):
    """The acceptor's side of a swap. Once the swap is accepted, its caller can add more connections to it."""

    def __init__(self, first: ServerWire, running: dict[bytes, ServerStream], *, visitor: Inbound) -> None:
        self._running = running
        self._visitor = visitor
        self._swap_id = b""
        self.caller = ""  # a peer id; empty until the swap accepts more connections
        super().__init__(first.peer, first)

    def _agreed(self, offer: Offer) -> None:
        self._visitor.accepted()
        if offer.swap_id not in self._running:
            self._swap_id, self.caller = offer.swap_id, offer.hello.peer_id
            self._running[offer.swap_id] = self

    async def _put(self, connection: SwapConnection, frame: Frame, sequence: int) -> None:
        if isinstance(frame, Offer):
            check_name(self._visitor.peer_id, frame.hello)
        await super()._put(connection, frame, sequence)

    def join(self, wire: ServerWire, answer: bytes) -> None:
        """Add a connection. Raises Refused if the swap already has the maximum number of connections."""
        if self.num_connections >= MAX_CONNECTIONS:
            raise _no_connection(f"this swap already has {MAX_CONNECTIONS} connections, which is the maximum")
        self.add(SwapConnection(wire), first_words=answer)

    def lose(self, fault: PeerError) -> None:
        super().lose(fault)
        if self.caller and self._running.get(self._swap_id) is self:
            del self._running[self._swap_id]

    async def _end(self) -> None:
        self.lose(Unreachable("the stream is closed", peer=self._peer))
        await super()._end()

    def _check_end(self, connection: SwapConnection) -> None:
        # This is how a lost connection looks from here. The first connection always ends this way, so its end is not a
        # failure.
        if connection is not self._first:
            raise Unreachable("one of the swap's connections was lost", peer=self._peer)


def check_name(proven: str, hello: frames.Hello) -> None:
    """Raise CorruptPayload if the peer id in a caller's Hello is not the authenticated one."""
    if proven and hello.peer_id != proven:
        raise CorruptPayload(f"the caller is ..{short_id(proven)} but claims to be another peer", peer=proven)


def _no_connection(sentence: str) -> Refused:
    return Refused(sentence, code=frames.RefuseCode.MALFORMED.name)


class _Asked:
    """A method with one request, which must arrive soon, and one or more answers, which must be read soon.

    `enter` yields the caller before any byte of the request is read, and ends the call if the caller is not admitted.
    The method gets the request and the result of `enter`.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        request_type: type[Message],
        *,
        enter: Callable[[Any], AbstractAsyncContextManager[Any]],
        first_words_s: float = FIRST_WORDS_S,
        take_s: float = TAKE_S,
    ) -> None:
        self._method = method
        self._request_type = request_type
        self._enter = enter
        self._first_words_s = first_words_s
        self._take_s = take_s

    def handler(self) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._enter(context) as caller:
            request = await self._first(requests, context)
            answers = self._method(request, caller)
            if isinstance(answers, AsyncGenerator):
                async with aclosing(answers):
                    async for answer in answers:
                        await self._write(context, answer)
            else:
                await self._write(context, await answers)

    async def _first(self, requests: AsyncIterator[bytes], context: Any) -> Message:
        try:
            async with asyncio.timeout(self._first_words_s):
                return self._request_type.FromString(await anext(aiter(requests), b""))
        except TimeoutError:
            code, sentence = (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no request was received within {self._first_words_s:g} s",
            )
        except DecodeError:
            code, sentence = grpc.StatusCode.INVALID_ARGUMENT, "the request is not a valid protocol message"
        raise await context.abort(code, sentence)

    async def _write(self, context: Any, answer: Message) -> None:
        try:
            async with asyncio.timeout(self._take_s):
                await context.write(answer.SerializeToString())
        except TimeoutError:
            sentence = f"the caller accepted no message for {self._take_s:g} s"
            raise await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence) from None


def _want(request: pb.FetchRequest) -> frames.FetchWant:
    match request.WhichOneof("what"):
        case "spec":
            return frames.WantSpec()
        case "manifest":
            return frames.WantManifest()
        case "layout":
            return frames.WantLayout()
        case "chunks":
            if len(request.chunks.indices) > frames.MAX_CHUNKS_PER_REQUEST:
                raise CorruptPayload(f"at most {frames.MAX_CHUNKS_PER_REQUEST} chunks can be requested at once")
            return frames.WantChunks(request.chunks.manifest_digest, tuple(request.chunks.indices))
        case _:
            raise CorruptPayload("received a request of an unknown kind; the caller may use a newer protocol version")


def _replies(item: frames.FetchItem) -> list[pb.FetchReply]:
    match item:
        case frames.SpecJson(data):
            return [pb.FetchReply(spec_json=data)]
        case frames.LayoutJson(data):
            return [pb.FetchReply(layout_json=data)]
        case frames.StateChunk(index, payload):
            return [pb.FetchReply(chunk=pb.StateChunk(index=index, payload=payload))]
        case frames.StateManifest(chunk_digests=digests):
            step = MANIFEST_DIGESTS_PER_REPLY
            parts = [digests[start : start + step] for start in range(0, len(digests), step)]
            return [pb.FetchReply(manifest=convert.manifest_to_wire(item, part)) for part in parts]
