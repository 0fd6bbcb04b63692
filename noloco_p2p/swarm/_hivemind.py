"""The one door to hivemind: imported when a node starts, with what its import does to the program undone.

Importing it switches torch's sharing strategy for the whole program, installs a log handler that writes to the
terminal, and renames the level WARNING. Its averagers, optimizers and experts, which nothing here uses, cost 52 MB and
a third of the time: they are left for whoever asks the package for one of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.clock import CLOCK, Offset
from noloco_p2p.swarm.streams import StreamHandler

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P, PeerID

T = TypeVar("T")

WAIT_TIMEOUT_S = 3.0  # hivemind's limit for one call to one other node
_opened: ContextVar[list[asyncio.StreamWriter]] = ContextVar("connections to p2pd that a question has opened")


def load() -> None:
    """Import hivemind. Blocks for seconds the first time: run it in a thread. Idempotent."""
    import torch.multiprocessing

    _defer_package()
    strategy = torch.multiprocessing.get_sharing_strategy()
    warning_name = logging.getLevelName(logging.WARNING)
    import hivemind.dht.node  # noqa: F401
    from hivemind.utils.logging import use_hivemind_log_handler

    for name, module in list(sys.modules.items()):  # its time is time.time, which jumps when a machine's clock is set
        if name.startswith("hivemind.") and "get_dht_time" in vars(module):
            vars(module)["get_dht_time"] = CLOCK.now
    torch.multiprocessing.set_sharing_strategy(strategy)
    logging.addLevelName(logging.WARNING, warning_name)
    use_hivemind_log_handler("nowhere")
    verbose = logging.getLogger("noloco_p2p").isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if verbose else logging.CRITICAL)


def _defer_package() -> None:
    """Make `import hivemind.dht` run without what hivemind/__init__.py imports besides: that waits for a first use."""
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.loader is None:
        raise DirectoryError("hivemind is not installed; install noloco_p2p again, with all that it needs")
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def on_first_use(name: str) -> Any:
        if name.startswith("__"):  # asked for by the import system and by inspection, not by a user
            raise AttributeError(name)
        if submodule := sys.modules.get(f"hivemind.{name}"):  # loaded, or being loaded just now
            return submodule
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = on_first_use
    sys.modules["hivemind"] = package


async def attach(control_socket: str) -> P2P:
    """A client of a running p2pd."""
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    p2p = await P2P.replicate(Multiaddr(f"/unix{control_socket}"))
    client: Any = p2p._client
    connector = client.control.daemon_connector
    open_connection = connector.open_connection

    async def open_and_note() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection()
        _opened.get([]).append(writer)
        return reader, writer

    connector.open_connection = open_and_note
    return p2p


async def _asked(question: Awaitable[T]) -> T:
    """The answer of p2pd. hivemind leaves the connection of a question open that fails or is cut short."""
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


async def detach(p2p: P2P) -> None:
    """Close a client, dead daemon or not, and see its tasks off: hivemind leaves their exceptions to be logged."""
    tasks = connection_tasks(p2p)
    if p2p._listen_task is not None:
        tasks.append(p2p._listen_task)
    await p2p.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)


def connection_tasks(p2p: P2P) -> list[asyncio.Task[None]]:
    """The tasks behind the client's one lasting connection; the first of them to end means that it is lost.

    hivemind has no public sign for that: its calls then wait for their time-outs for ever after.
    """
    client: Any = p2p._client
    return [client.control._read_task, client.control._write_task]


async def create_dht(p2p: P2P, *, is_client: bool) -> DHTNode:
    """A DHT node on an attached client, without peers. Its place in the key space follows from the peer id, so that
    others need not learn it anew after a restart. Caches are off: the view is always read fresh, others would
    be answered from a cache that strangers fill, and hivemind's sharing of requests keeps an entry for every key ever
    asked for.
    """
    from hivemind.dht.node import DHTNode

    from noloco_p2p.swarm.neighbourhood import believe_less, place_of
    from noloco_p2p.swarm.storage import NewestStorage, NoStorage
    from noloco_p2p.swarm.validator import RecordValidator

    node = await DHTNode.create(
        p2p,
        node_id=place_of(str(p2p.peer_id)),
        client_mode=is_client,
        record_validator=RecordValidator(),
        wait_timeout=WAIT_TIMEOUT_S,
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        reuse_get_requests=False,
    )
    node.protocol.storage, node.protocol.cache = NewestStorage(), NoStorage()
    believe_less(node.protocol)
    return node


async def connect(p2p: P2P, peer_id: str, addresses: Sequence[str]) -> None:
    """Connect libp2p to a peer at one of `addresses` (without /p2p/...)."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    client: Any = p2p._client
    await _asked(client.connect(PeerID.from_base58(peer_id), [Multiaddr(address) for address in addresses]))


async def open_stream(p2p: P2P, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raw bytes both ways to a peer that libp2p is connected to, or can dial."""
    from hivemind.p2p import PeerID

    _, reader, writer = await _asked(p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), protocol))
    return reader, writer


async def remote_addresses(p2p: P2P) -> list[tuple[str, str]]:
    """(peer id, multiaddr) of every connection."""
    peers = await _asked(p2p.list_peers())
    return [(str(peer.peer_id), str(address)) for peer in peers for address in peer.addrs]


async def handle_streams(p2p: P2P, protocol: str, handler: StreamHandler) -> None:
    """From now on `handler` gets (peer id, reader, writer) of each stream of this protocol; it is closed for it."""

    async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(str(info.peer_id), reader, writer)
        finally:
            writer.close()

    await _asked(p2p.add_binary_stream_handler(protocol, on_stream))


async def greet(dht: DHTNode, peer_id: str) -> Offset | None:
    """Enter each other's routing tables, and learn this node's neighbours.

    Gives how far the peer's clock is from ours; None when it is no DHT node.
    """
    from hivemind.p2p import PeerID

    peer = PeerID.from_base58(peer_id)
    if await dht.protocol.call_ping(peer) is None:
        return None
    offset = await _offset(dht, peer)
    await dht.find_nearest_nodes([dht.node_id])
    return offset


async def _offset(dht: DHTNode, peer: PeerID) -> Offset:
    from hivemind.proto import dht_pb2

    request: Any = vars(dht_pb2)["PingRequest"]()
    asked_s, wall_s = time.monotonic(), CLOCK.now()
    answer: Any = await dht.protocol.get_stub(peer).rpc_ping(request, timeout=WAIT_TIMEOUT_S)
    unsure_s = (time.monotonic() - asked_s) / 2
    return Offset(answer.dht_time - (wall_s + unsure_s), unsure_s)


async def answers(p2p: P2P) -> None:
    """Returns when the daemon has answered a question."""
    await _asked(p2p.get_visible_maddrs(latest=True))


def routing_table(dht: DHTNode) -> set[str]:
    """Peer ids that this node knows and that answered lately."""
    return {str(peer_id) for peer_id in list(dht.protocol.routing_table.peer_id_to_uid)}
