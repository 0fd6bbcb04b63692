"""Run the gRPC server of a peer. It maps calls to gossip's Service, and errors to refusals.

The proxy authenticates the callers (`proxy.py`), and closes a connection after one refused call. The server decides
whether their calls may continue, and limits the number of open calls per peer id. `proxy.py` and `options.py` limit the
sizes of messages. Each accepted swap limits the number of its own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, SettingsError, Unreachable
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.frames import RefuseCode
from noloco_p2p.gossip.seams import Service
from noloco_p2p.identity import short_id
from noloco_p2p.net import convert, options
from noloco_p2p.net.connection import MEMBERSHIP_KEY, REFUSE_KEY, SERVICE, nobody_is_banned
from noloco_p2p.net.proxy import Inbound, Proxy
from noloco_p2p.net.session import Session, check_name
from noloco_p2p.net.swap_stream import MAX_CONNECTIONS, SwapStream, call_cancelled
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

JOIN_S = 5.0  # from the call of a further connection to its Join
FIRST_WORDS_S = 5.0  # from any other call to its request
TAKE_S = 20.0  # to read one answer of at most 1 MiB; without a limit, a slow reader could hold an upload slot forever
MANIFEST_DIGESTS_PER_REPLY = 16_384
MAX_CALLS_PER_PEER = 16  # for two swaps over six connections, an offer, a status request, a fetch and one more call
MAX_FETCHES_PER_PEER = 2  # fetches of chunks: the current one and the previous one
TELL_EVERY_S = 60.0


class GrpcServer:
    """The gRPC server. `port` is the actual port once `start` has returned.

    Without a session, every caller is accepted under any name. This is for measurements and tests on one machine.
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
        self._why_banned = why_banned
        self._proxy = Proxy(tls=session.server_context() if session else None)
        self._session = session
        self._open = Counter[str]()  # calls by caller
        self._fetches: dict[str, list[object]] = {}  # by caller, with the newest fetch last
        self._turned_away = TurnedAway()
        self._swaps = OwnedTasks("a swap offered by another peer")
        self._joinable: dict[bytes, SwapStream] = {}  # by swap id, once the offer is accepted
        self._server = grpc.aio.server(options=[*options.SERVER, *limits.options()])
        # All of these are streaming handlers, because gRPC would wait forever for the request of a unary call.
        methods = {
            "Swap": self._on_swap,
            "Lane": self._on_lane,
            "Flow": self._on_flow,
            "Fetch": self._on_fetch,
            "Status": self._on_status,
        }
        handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self, host: str, port: int) -> None:
        """Start listening. Raises SettingsError if the port is in use."""
        try:
            self.port = self._proxy.listen(host, port)
            self._server.add_insecure_port(f"unix:{self._proxy.behind}")
        except (OSError, RuntimeError) as error:
            await self._proxy.close()
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error}; if the port is in use or not permitted, choose another one "
                "with --listen HOST:PORT"
            ) from None
        await self._server.start()
        self._proxy.open()

    def take(self, connection: socket.socket, relay: str = "") -> None:
        """Serve a peer over a connection that this machine opened, or that a relay brings."""
        self._proxy.take(connection, relay)

    async def stop(self, grace_s: float) -> None:
        await self._proxy.shut()
        await self._server.stop(grace_s)
        await self._proxy.close()
        await self._swaps.stop(grace_s=0.0)

    # who calls

    @contextlib.asynccontextmanager
    async def _visit(self, context: Any) -> AsyncIterator[Inbound]:
        """Yield the caller's connection for the duration of one call. If the call may not continue, end it."""
        inbound = None
        try:
            inbound = self._proxy.inbound(context.peer())
            caller = inbound.peer_id
            if inbound.is_turned_away:
                raise _busy("an earlier call on this connection was refused")
            if why := self._why_banned(caller):
                raise Refused(f"you are {why}", code=RefuseCode.BANNED.name, retry_after_s=60.0, peer=caller)
            if self._session:
                self._session.check_membership(inbound.membership, caller)
            if caller and self._open[caller] >= MAX_CALLS_PER_PEER:
                raise _busy(f"you already have {MAX_CALLS_PER_PEER} open calls, which is the maximum")
            inbound.began()
        except PeerError as error:
            await self._turn_away(context, inbound, error)
        self._open[caller] += 1
        try:
            await context.send_initial_metadata(((MEMBERSHIP_KEY, self._session.membership if self._session else b""),))
            yield inbound
        finally:
            inbound.ended()
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    async def _turn_away(self, context: Any, inbound: Inbound | None, error: PeerError) -> NoReturn:
        """End the call with a refusal, and then close its connection."""
        self._turned_away.note(inbound.address if inbound else context.peer(), error)
        if inbound:
            inbound.turned_away()
        refuse = refuse_to_wire(error)
        metadata = ((REFUSE_KEY, refuse.SerializeToString()),)
        raise await context.abort(grpc.StatusCode.PERMISSION_DENIED, refuse.sentence, metadata)

    def _admitted(self, message: pb.Hello, caller: Inbound) -> frames.Hello:
        """Check and return the caller's Hello.

        Raises PeerError if the caller is not the peer that it claims to be, or belongs to another run.
        """
        hello = convert.from_wire(frames.Hello, message)
        check_name(caller.peer_id, hello)
        self._service.admit(hello)
        return hello

    # the calls

    async def _on_swap(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._visit(context) as caller:
            wire = ServerWire(requests, context, caller.address, self._limits)

            def on_accepted(offer: frames.Offer) -> None:
                caller.accepted()
                self._joinable.setdefault(offer.swap_id, stream)

            stream = SwapStream(wire, peer=wire.peer, proven=caller.peer_id, is_caller=False, on_accepted=on_accepted)
            swap = self._swaps.start(self._swap(stream))
            closed = asyncio.create_task(wire.closed())
            try:
                # gRPC cancels this handler when the caller is gone. The swap is notified, and ends by its own rules.
                await asyncio.wait({swap, closed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
                if not wire.is_closed:
                    stream.lose(Unreachable("the connection was lost", peer=stream.peer))

    async def _swap(self, stream: SwapStream) -> None:
        try:
            await self._service.on_swap(stream)
        finally:
            if stream.accepted and self._joinable.get(stream.accepted.swap_id) is stream:
                del self._joinable[stream.accepted.swap_id]
            await stream.close()

    async def _on_lane(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._visit(context) as caller:
            wire = ServerWire(requests, context, caller.address, self._limits)
            try:
                async with asyncio.timeout(JOIN_S):
                    stream = self._joined(await wire.read() or b"", caller)
                caller.accepted()
                stream.add(wire, first_words=pb.Frame(join=pb.Join()).SerializeToString())
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

    def _joined(self, data: bytes, caller: Inbound) -> SwapStream:
        """Return the swap to which a connection belongs. Raises PeerError if there is none that the caller can join."""
        message = _parsed(pb.Frame, data)
        if not message.HasField("join"):
            raise CorruptPayload("an additional connection must begin with a Join")
        hello = self._admitted(message.join.hello, caller)
        stream = self._joinable.get(message.join.swap_id)
        if not stream or stream.is_lost or not stream.accepted or stream.accepted.hello.peer_id != hello.peer_id:
            raise _no_connection("no swap with this id is in progress between us")
        if stream.num_connections >= MAX_CONNECTIONS:
            raise _no_connection(f"this swap already has {MAX_CONNECTIONS} connections, which is the maximum")
        return stream

    async def _on_flow(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._visit(context) as caller:
            if not self.serve_flow:
                await _asked(requests, context, pb.FlowFrame)
                no_stage = Refused("this peer is not part of a pipeline", code=RefuseCode.OTHER_MODEL.name)
                return await _answer(context, pb.FlowFrame(refuse=refuse_to_wire(no_stage)))

            def admit(hello: frames.Hello) -> None:
                check_name(caller.peer_id, hello)
                self._service.admit(hello)
                caller.accepted()

            wire = ServerWire(requests, context, caller.address, self._limits)
            await self.serve_flow(wire, caller.peer_id, admit)

    async def _on_fetch(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._visit(context) as caller:
            request = await _asked(requests, context, pb.FetchRequest)
            try:
                self._admitted(request.hello, caller)
                want = convert.want_from_wire(request)
                is_upload = isinstance(want, frames.WantChunks)  # it holds an upload slot
                with self._fetching(caller.peer_id if is_upload else "") as check:
                    async with aclosing(self._service.on_fetch(want)) as items:
                        async for item in items:
                            check()
                            if is_upload:
                                caller.accepted()
                            for reply in _replies(item):
                                await self._limits.uploading(reply.ByteSize())
                                await _answer(context, reply)
            except PeerError as error:
                await _answer(context, pb.FetchReply(refuse=refuse_to_wire(error)))

    @contextlib.contextmanager
    def _fetching(self, caller: str) -> Iterator[Callable[[], None]]:
        """Account for one fetch of chunks, and yield a function that checks whether it may continue.

        That function raises Refused once the same peer has begun another fetch. The newer fetch takes precedence,
        because the older one may be stuck on a dead connection. A third fetch raises Refused at once, because each
        fetch can occupy one of the donor's slots until it ends.
        """
        busy = _busy("you already have another fetch in progress")
        mine, fetches = object(), self._fetches.setdefault(caller, [])
        if caller and len(fetches) >= MAX_FETCHES_PER_PEER:
            raise busy
        fetches.append(mine)

        def check() -> None:
            if caller and fetches[-1] is not mine:
                raise busy

        try:
            yield check
        finally:
            fetches.remove(mine)
            if not fetches:
                del self._fetches[caller]

    async def _on_status(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._visit(context) as caller:
            request = await _asked(requests, context, pb.StatusRequest)
            try:
                self._admitted(request.hello, caller)
                reply = convert.to_wire(await self._service.on_status(request.swap_id[:64]))
            except PeerError as error:
                reply = pb.StatusReply(refuse=refuse_to_wire(error))
            await _answer(context, reply)


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


def _no_connection(sentence: str) -> Refused:
    return Refused(sentence, code=RefuseCode.MALFORMED.name)


def _busy(sentence: str) -> Refused:
    return Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=5.0)


class TurnedAway:
    """A log of refused calls, with at most one line per minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._told_at_s = -TELL_EVERY_S

    def note(self, address: str, error: PeerError) -> None:
        if isinstance(error, Unreachable):  # the caller has hung up
            return
        self._count += 1
        if self._clock() - self._told_at_s >= TELL_EVERY_S:
            who = f"..{short_id(error.peer)} at {address}" if error.peer else address
            is_banned = isinstance(error, Refused) and error.code == RefuseCode.BANNED.name
            why = str(error).replace("you are ", "it is ", 1) if is_banned else error  # the caller reads `error`
            log.warning("calls refused: %d; the most recent was from %s: %s", self._count, who, why)
            self._count, self._told_at_s = 0, self._clock()


def refuse_to_wire(error: PeerError) -> pb.Refuse:
    code, retry_after_s = RefuseCode.MALFORMED, 0.0
    if isinstance(error, Refused):
        code, retry_after_s = RefuseCode[error.code], error.retry_after_s
    return convert.to_wire(frames.Refuse(code, str(error), retry_after_s))


async def _asked(requests: AsyncIterator[bytes], context: Any, kind: type[M]) -> M:
    """Return the request of a call, which must arrive soon. Otherwise, end the call."""
    try:
        async with asyncio.timeout(FIRST_WORDS_S):
            return kind.FromString(await anext(aiter(requests), b""))
    except TimeoutError:
        code, sentence = grpc.StatusCode.DEADLINE_EXCEEDED, f"no request was received within {FIRST_WORDS_S:g} s"
    except DecodeError:
        code, sentence = grpc.StatusCode.INVALID_ARGUMENT, "the request is not a valid protocol message"
    raise await context.abort(code, sentence)


async def _answer(context: Any, answer: Message) -> None:
    """Send an answer, which the caller must read soon. Otherwise, end the call."""
    try:
        async with asyncio.timeout(TAKE_S):
            await context.write(answer.SerializeToString())
    except TimeoutError:
        sentence = f"the caller accepted no message for {TAKE_S:g} s"
        raise await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, sentence) from None


def _parsed(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise CorruptPayload("it sent data that is not a valid protocol message") from None


def _replies(item: frames.FetchItem) -> list[pb.FetchReply]:
    match item:
        case frames.SpecJson(data):
            return [pb.FetchReply(spec_json=data)]
        case frames.LayoutJson(data):
            return [pb.FetchReply(layout_json=data)]
        case frames.StateChunk():
            return [pb.FetchReply(chunk=convert.to_wire(item))]
        case frames.StateManifest(chunk_digests=digests):
            step = MANIFEST_DIGESTS_PER_REPLY
            parts = [digests[start : start + step] for start in range(0, len(digests), step)]
            return [pb.FetchReply(manifest=convert.to_wire(replace(item, chunk_digests=part))) for part in parts]
