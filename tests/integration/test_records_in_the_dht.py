"""Real DHT nodes reject what a rogue node stores, and lose nothing when it replays old records."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from harness.identities import identity_of
from harness.patience import PATIENCE_S, until
from recorded import changed

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.buckets import bucket_of, run_key
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.directory import SwarmDirectory, Timing
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import TTL_S, PeerRecord, encode_record

RUN = "ab" * 32
QUICK = Timing(heartbeat_s=0.5, view_s=0.2, quick_view_s=0.2, dial_s=0.5, freshen_s=1.0)


def key_of(peer_id: str) -> str:
    """Return the DHT key of a peer in a small run."""
    return bucket_of(peer_id, 0).key(run_key(RUN))


def record_of(name: str, *, in_s: float = TTL_S, **changes: Any) -> PeerRecord:
    record = PeerRecord(identity_of(name).peer_id, "demo", RUN, addresses=("127.0.0.1:4000",), sequence=1)
    return changed(record, expires_at_s=time.time() + in_s, **changes)


@asynccontextmanager
async def directory(
    folder: Path,
    name: str,
    *,
    bootstraps: tuple[str, ...] = (),
    describe: Callable[[], PeerRecord] | None = None,
    key: Path | None = None,
    spec_digest: str | None = RUN,
    on_copy: Callable[[PeerRecord], None] = lambda record: None,
) -> AsyncIterator[SwarmDirectory]:
    path = key or folder / f"{name}.key"
    started = await SwarmDirectory(
        identity_path=path,
        identity=Identity.load_or_create(path),
        listen_host="127.0.0.1",
        listen_port=0,
        bootstraps=bootstraps,
        spec_digest=spec_digest,
        describe=describe,
        timing=QUICK,
        on_copy=on_copy,
    ).start()
    try:
        yield started
    finally:
        await started.stop(farewell=False)


@asynccontextmanager
async def rogue(folder: Path, bootstrap: str) -> AsyncIterator[SwarmNode]:
    """Run a node without a validator, which stores any record."""
    path = folder / "rogue.key"
    identity = Identity.load_or_create(path)
    node = await SwarmNode(path, identity.peer_id, ListenOn("127.0.0.1", 0)).start()
    try:
        assert node._dht is not None
        node._dht.protocol.record_validator = None
        address, _, peer_id = bootstrap.partition("/p2p/")
        await node.dial(peer_id, [address])
        yield node
    finally:
        await node.stop()


async def put(node: SwarmNode, record: PeerRecord, signed_by: Identity, *, subkey: str = "") -> None:
    """Store a record that the wrong key has signed."""
    made = replace(record, peer_id=signed_by.peer_id)
    value = encode_record(made, signed_by).replace(signed_by.peer_id.encode(), record.peer_id.encode())
    with suppress(DirectoryError):  # a refusal does not matter here
        await node.store(
            key_of(record.peer_id),
            subkey or record.peer_id,
            value,
            expires_at_s=record.expires_at_s,
            timeout_s=PATIENCE_S,
        )


async def test_a_rogue_node_can_neither_forge_nor_outlive_nor_erase(tmp_path: Path) -> None:
    async with (
        directory(tmp_path, "hub", spec_digest=None) as hub,
        rogue(tmp_path, hub.multiaddrs()[0]) as node,
        directory(tmp_path, "reader", bootstraps=tuple(hub.multiaddrs())) as reader,
    ):
        honest, thief = identity_of("honest"), identity_of("thief")
        # An old record, a newer one, and the old one again: the newer one must outlive the expiry of the old one.
        old, new = record_of("honest", in_s=3.0, swaps=1), record_of("honest", sequence=2, swaps=2)
        for record in (old, new, old):
            await put(node, record, honest)
        await put(node, record_of("honest", sequence=9, swaps=66), thief)  # with the wrong key
        await put(node, record_of("thief", sequence=9), thief, subkey=honest.peer_id)  # at the subkey of another
        await put(node, record_of("eternal", in_s=10 * 365 * 86400.0), identity_of("eternal"))
        await put(node, record_of("late", in_s=2 * TTL_S + 30), identity_of("late"))
        await until(lambda: time.time() > old.expires_at_s + 0.2, "the time of the old word is over")
        await reader.refresh_now()
        assert [(record.peer_id, record.metrics.swaps) for record, _ in reader.records()] == [(honest.peer_id, 2)]
        assert [candidate.peer_id for candidate in reader.live()] == [honest.peer_id]


async def test_a_rogue_node_can_neither_surround_a_key_nor_answer_for_another(tmp_path: Path) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    async with (
        directory(tmp_path, "hub", spec_digest=None) as hub,
        rogue(tmp_path, hub.multiaddrs()[0]) as node,
    ):
        assert node._dht is not None
        protocol, key, other = node._dht.protocol, DHTID.generate(key_of("any")), PeerID.from_base58(hub.peer_id)
        await put(node, record_of("honest"), identity_of("honest"))
        late = record_of("late", in_s=2 * TTL_S - 1)
        packed = protocol.serializer.dumps(encode_record(late, identity_of("late")))
        await protocol.call_store(other, [key], [packed], [late.expires_at_s], subkeys=[late.peer_id], in_cache=True)
        for number in range(1, 21):  # closer to the key than any other node
            request: Any = vars(dht_pb2)["PingRequest"](
                peer=vars(dht_pb2)["NodeInfo"](node_id=DHTID(key ^ number).to_bytes())
            )
            await protocol.get_stub(other).rpc_ping(request, timeout=PATIENCE_S)
        found = await protocol.call_find(other, [key])
        assert found
        value = cast(Any, found[key][0])
        assert [subkey for subkey, _ in value.value.items()] == [identity_of("honest").peer_id]
        assert hub.node._dht is not None
        known = hub.node._dht.protocol.routing_table.uid_to_peer_id
        assert {place: str(peer) for place, peer in known.items()} == {protocol.node_id: node.peer_id}


async def test_a_key_used_twice_is_noticed_by_both(tmp_path: Path) -> None:
    key = tmp_path / "copied.key"
    identity = Identity.load_or_create(key)
    heard: dict[str, PeerRecord] = {}

    def start(name: str, started_at_ms: int) -> Any:
        mine = PeerRecord(identity.peer_id, "demo", RUN, session_key=name, started_at_ms=started_at_ms)
        return {"describe": lambda: mine, "key": key, "on_copy": lambda record: heard.setdefault(name, record)}

    async with (
        directory(tmp_path, "hub", spec_digest=None) as hub,
        directory(tmp_path, "1", bootstraps=tuple(hub.multiaddrs()), **start("older", 1000)) as older,
    ):
        await until(lambda: older.node.neighbours() == {hub.peer_id}, "the first is in the DHT")
        async with directory(tmp_path, "2", bootstraps=tuple(hub.multiaddrs()), **start("newer", 2000)):
            await until(lambda: "older" in heard, "the older hears of the newer")
            await older.stop(farewell=False)
            await until(lambda: "newer" in heard, "the newer has heard of the older, which says no more")
        assert {name: record.session_key for name, record in heard.items()} == {"older": "newer", "newer": "older"}
