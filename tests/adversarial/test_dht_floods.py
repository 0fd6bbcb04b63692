"""A DHT node under a flood of requests bounds what it answers, stores and holds in memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.identities import identity_of
from harness.patience import PATIENCE_S, until
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import invite
from noloco_p2p.swarm.buckets import ROOT, run_key
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.swarm.kademlia.client import ANSWER_FAULTS
from noloco_p2p.swarm.kademlia.storage import MAX_RECORDS_PER_KEY
from noloco_p2p.swarm.kademlia.whereabouts import LOCATE
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import TTL_S, PeerRecord, encode_record

RUN = "ab" * 32
KEY = DHTID.generate(run_key(RUN))
MOST_ANSWERED = 2_000  # answers to a flood; a node answers a burst of 500 and then 50 a second
FLOOD = 20_000
NUM_STRANGERS = 10_000
LONG_ID = b"\xff" * (16 * 1024)  # encoding this in base58 takes 0.3 to 0.8 s; zeros would take no time
MOST_CPU_S = 0.5  # for requests or answers with long ids, all together
PRIVATE = invite(identity_of("run key"), expires_at_s=4e9, seed=bytes(32)).listing(RUN).view


@asynccontextmanager
async def node(folder: Path, name: str, door: SwarmNode | None = None) -> AsyncIterator[Any]:
    path = folder / f"{name}.key"
    made = await SwarmNode(path, Identity.load_or_create(path).peer_id, ListenOn("127.0.0.1", 0)).start()
    try:
        if door:
            address, _, peer_id = door.multiaddrs()[0].partition("/p2p/")
            await made.dial(peer_id, [address])
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def victim_and_attacker(folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    async with node(folder, "victim") as victim, node(folder, "attacker", victim) as attacker:
        yield victim, attacker


def message(name: str, **fields: Any) -> Any:
    return vars(dht_pb2)[name](**fields)


async def ask(asker: Any, victim: SwarmNode, what: str, request: Any) -> Any:
    """Send the request without hivemind, as any host that knows the address can; raises the error that comes back."""
    handler, peer = f"DHTProtocol.rpc_{what.lower()}", PeerID.from_base58(victim.peer_id)
    calling = asker._p2p._client.call_unary_handler(peer, handler, request.SerializeToString())
    answer = message(f"{what}Response")
    answer.ParseFromString(await asyncio.wait_for(calling, PATIENCE_S))
    return answer


def fill(victim: Any, num_records: int, num_bytes: int = 1000) -> None:
    storage, ends_s = victim._dht.protocol.storage, time.time() + TTL_S
    for number in range(num_records):
        storage.store_subkey(KEY, f"peer {number}", bytes(num_bytes), ends_s)


def store_request(identity: Identity, digests: list[str]) -> Any:
    """Return a request that stores one record of the same peer under each of these runs."""
    records = [
        PeerRecord(identity.peer_id, "x", digest, sequence=1, expires_at_s=time.time() + TTL_S) for digest in digests
    ]
    return message(
        "StoreRequest",
        keys=[DHTID.generate(ROOT.key(run_key(digest))).to_bytes() for digest in digests],
        subkeys=[MSGPackSerializer.dumps(identity.peer_id)] * len(digests),
        values=[MSGPackSerializer.dumps(encode_record(record, identity)) for record in records],
        expiration_time=[record.expires_at_s for record in records],
        in_cache=[False] * len(digests),
    )


async def test_a_question_is_short_and_so_is_its_answer(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        fill(victim, 250)
        answer = await ask(attacker, victim, "Find", message("FindRequest", keys=[KEY.to_bytes()]))
        assert 64 * 1024 < answer.ByteSize() < 160 * 1024
        found = await attacker._dht.protocol.call_find(PeerID.from_base58(victim.peer_id), [KEY])
        assert found is not None, "an answer that is full is one"
        for keys, words in (
            ([KEY.to_bytes()] * 6000, "the request has .* bytes"),
            ([KEY.to_bytes()] * 2, "no duplicates"),
            ([DHTID.generate(str(number)).to_bytes() for number in range(5)], "at most 4 keys"),
            ([b"short"], "a key must be 20 bytes long"),
        ):
            with pytest.raises(ANSWER_FAULTS, match=words):
                await ask(attacker, victim, "Find", message("FindRequest", keys=keys))


def find_response(*ids: bytes, value: bytes = b"", place: bytes = b"") -> Any:
    """Return an answer that names nodes with these ids, all at the same place."""
    nodes = {"nearest_node_ids": [bytes(DHTID.HASH_NBYTES)] * len(ids), "nearest_peer_ids": ids}
    result = message("FindResult", value=value, **nodes)
    return message("FindResponse", results=[result], peer=message("NodeInfo", node_id=place))


def answers_with(monkeypatch: pytest.MonkeyPatch, liar: Any, response: Any) -> asyncio.Event:
    """Let a node give this answer to every question. Returns an event that is set when it has been asked."""
    asked = asyncio.Event()

    def lie(data: bytes, peer: PeerID) -> bytes:
        asked.set()
        return response.SerializeToString()

    monkeypatch.setitem(liar._p2p._client.control.unary_handlers, "DHTProtocol.rpc_find", lie)
    return asked


@pytest.mark.parametrize(
    "ids",
    [[b"\xff" * 100_000], [b"\xff" * 200_000], [bytes([n]) * 10_000 for n in range(1, 21)]],
    ids=["100 kB", "200 kB", "20 x 10 kB"],
)
@pytest.mark.parametrize("view", [RUN, PRIVATE], ids=["public", "private"])
async def test_answers_with_long_ids_do_not_stop_the_peer_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[bytes], view: str
) -> None:
    """A peer asks every node that it meets. The stranger needs no invitation to be asked."""
    path = tmp_path / "victim.key"
    async with node(tmp_path, "stranger") as stranger:
        asked = answers_with(monkeypatch, stranger, find_response(*ids))
        began_s = time.thread_time()
        victim = await SwarmDirectory(
            identity_path=path,
            identity=Identity.load_or_create(path),
            listen_host="127.0.0.1",
            listen_port=0,
            bootstraps=stranger.multiaddrs(),
            spec_digest=view,
        ).start()
        try:
            await asked.wait()
            await until(lambda: stranger.peer_id not in victim.node.neighbours())
            assert time.thread_time() - began_s < MOST_CPU_S
        finally:
            await victim.stop()


@pytest.mark.parametrize(
    "response",
    [
        find_response(bytes(65)),
        find_response(place=bytes(21)),
        find_response(place=bytes(100_000)),
        find_response(value=bytes(200_000)),
    ],
    ids=["long id", "long place", "very long place", "long value"],
)
async def test_answers_that_no_node_gives_are_refused_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, response: Any
) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        peer, protocol = PeerID.from_base58(attacker.peer_id), victim._dht.protocol
        for good in (bytes(38), bytes(64)):
            answers_with(monkeypatch, attacker, find_response(good))
            assert await protocol.call_find(peer, [KEY]) == {KEY: (None, {})}
        answers_with(monkeypatch, attacker, response)
        assert await protocol.call_find(peer, [KEY]) is None


async def test_requests_with_long_ids_take_milliseconds_and_are_charged_by_their_length(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        answer, peer = victim._p2p._client.control.unary_handlers[LOCATE], PeerID.from_base58(attacker.peer_id)
        outcomes: Counter[str] = Counter()
        began_s = time.thread_time()
        for number in range(222):
            try:
                answer(LONG_ID[number:], peer)
            except ValueError:
                outcomes["no id"] += 1
            except DirectoryError:
                outcomes["too many"] += 1
        assert time.thread_time() - began_s < MOST_CPU_S
        assert 100 < outcomes["no id"] < 222 == outcomes.total(), "500 of an empty request are admitted"
        with pytest.raises(ANSWER_FAULTS, match="at most 64 bytes"):
            await victim._p2p.ask(PeerID.from_base58(attacker.peer_id), LOCATE, LONG_ID, most_bytes=1000)


async def test_a_flood_of_questions_is_refused_and_neighbours_are_answered(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker), node(tmp_path, "neighbour", victim) as third:
        outcomes: Counter[str] = Counter()

        async def flood(number: int) -> None:
            for _ in range(number):
                try:
                    await ask(attacker, victim, "Ping", message("PingRequest"))
                    outcomes["answered"] += 1
                except ANSWER_FAULTS as fault:
                    outcomes["refused"] += "too many requests" in str(fault)
                if outcomes["refused"] >= 100:
                    return

        began_s = time.monotonic()
        await asyncio.gather(*(flood(FLOOD // 50) for _ in range(50)))
        assert outcomes["refused"] >= 100
        assert outcomes["answered"] < MOST_ANSWERED + 100 * (time.monotonic() - began_s)
        assert await third._dht.protocol.call_ping(PeerID.from_base58(victim.peer_id)) is not None


async def test_strangers_that_call_themselves_nodes_leave_a_neighbour_its_answers(tmp_path: Path) -> None:
    """A node enters the victim's routing table with a single request that names its DHT id."""
    async with node(tmp_path, "victim") as victim, node(tmp_path, "neighbour", victim) as neighbour:
        await victim._dht.protocol.call_find(PeerID.from_base58(neighbour.peer_id), [KEY])
        answer = victim._p2p._client.control.unary_handlers["DHTProtocol.rpc_ping"]
        strangers = [PeerID(b"\x00\x24\x08\x01\x12\x20" + bytes(30) + bytes([each, 0])) for each in range(200)]
        outcomes: Counter[str] = Counter()

        def flood() -> None:
            for number, stranger in enumerate(strangers):
                own = message("NodeInfo", node_id=DHTID.generate(str(number)).to_bytes())
                try:
                    answer(message("PingRequest", peer=own).SerializeToString(), stranger)
                    outcomes["answered"] += 1
                except DirectoryError:
                    outcomes["refused"] += 1

        for _ in range(20):
            flood()
        assert min(outcomes["answered"], outcomes["refused"]) > 0
        for _ in range(50):
            flood()
            await ask(neighbour, victim, "Ping", message("PingRequest"))


async def test_one_owner_has_few_records_whatever_runs_it_names(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        digests = [f"{number:064x}" for number in range(40)]
        for start in range(0, 40, 4):
            await ask(attacker, victim, "Store", store_request(identity_of("owner"), digests[start : start + 4]))
        storage = victim._dht.protocol.storage
        kept = [digest for digest in digests if storage.get(DHTID.generate(ROOT.key(run_key(digest))))]
        assert kept == digests[-8:]
        with pytest.raises(ANSWER_FAULTS, match="at most 8 records"):
            await ask(attacker, victim, "Store", store_request(identity_of("owner"), digests[:9]))


async def test_a_record_that_is_no_news_costs_no_signature_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        request = store_request(identity_of("owner"), [RUN])
        assert list((await ask(attacker, victim, "Store", request)).store_ok) == [True]
        checked: list[object] = []
        monkeypatch.setattr("noloco_p2p.swarm.kademlia.storage.open_envelope", lambda data: checked.append(data) or {})
        assert list((await ask(attacker, victim, "Store", request)).store_ok) == [False]
        request.values[0] = request.values[0][:-1] + b"x"
        assert list((await ask(attacker, victim, "Store", request)).store_ok) == [False]
        assert not checked


async def test_an_unknown_node_is_handed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, "victim") as victim:
        fill(victim, 50)
        sent: list[object] = []

        async def note(*args: object, **kwargs: object) -> None:
            sent.append(args)

        monkeypatch.setattr(victim._dht.protocol, "call_store", note)
        async with node(tmp_path, "attacker", victim) as attacker:
            assert victim.neighbours() == {attacker.peer_id}
            own = message("NodeInfo", node_id=attacker._dht.node_id.to_bytes())
            await ask(attacker, victim, "Ping", message("PingRequest", peer=own))
        assert not sent


async def test_answers_are_checked_record_by_record_and_in_portions(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        honest = replace(PeerRecord(identity_of("h").peer_id, "x", RUN), expires_at_s=time.time() + TTL_S)
        value = MSGPackSerializer.dumps(encode_record(honest, identity_of("h")))
        fill(victim, 100)  # unsigned records
        victim._dht.protocol.storage.store_subkey(KEY, honest.peer_id, value, honest.expires_at_s)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        found = await attacker._dht.protocol.call_find(PeerID.from_base58(victim.peer_id), [KEY])
        counting.cancel()
        assert [*found[KEY][0].value.data] == [honest.peer_id], "one bad record does not take the others along"
        assert turns > 100 // 16


async def test_p2pd_serves_nothing_that_is_not_needed_and_holds_no_long_message(tmp_path: Path) -> None:
    async with victim_and_attacker(tmp_path) as (victim, attacker):
        for protocol in ("/ipfs/kad/1.0.0", "/meshsub/1.1.0", "/libp2p/dcutr"):
            with pytest.raises(DirectoryError, match="protocols not supported"):
                await attacker.open_stream(victim.peer_id, protocol)
        daemon = psutil.Process(victim.daemon_pid)
        before = daemon.memory_info().rss
        four_mib = bytes([0x80, 0x80, 0x80, 0x02])  # the length prefix, a varint
        writers = []
        for _ in range(100):
            _, writer = await attacker.open_stream(victim.peer_id, "DHTProtocol.rpc_ping")
            writer.write(four_mib + bytes(1000))
            await writer.drain()
            writers.append(writer)
        for _ in range(20):
            await ask(attacker, victim, "Ping", message("PingRequest"))
        grown = daemon.memory_info().rss - before
        for writer in writers:
            writer.close()
        assert grown < 64 << 20, f"{grown >> 20} MiB for 100 announced messages"


async def test_a_node_finds_its_way_to_one_that_another_tells_of(tmp_path: Path) -> None:
    """Nodes route by what their neighbours report: p2pd's own DHT, which used to do that, is switched off."""
    async with (
        node(tmp_path, "hub") as hub,
        node(tmp_path, "first", hub) as first,
        node(tmp_path, "second", hub) as second,
    ):
        assert second.neighbours() == {hub.peer_id, first.peer_id}
        assert first.neighbours() == {hub.peer_id, second.peer_id}


async def test_p2pd_that_has_grown_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted = asyncio.Event()
    monkeypatch.setattr("noloco_p2p.swarm.node.MAX_MEMORY_BYTES", 1)
    async with node(tmp_path, "victim") as victim:
        before, victim.on_restart = victim.daemon_pid, lambda: (monkeypatch.undo(), restarted.set())
        await restarted.wait()
        assert victim.daemon_pid not in (before, None)


async def test_strangers_in_the_buckets_of_a_private_run_hide_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that stores the records is in no run; it knows neither this run nor its secret."""
    listing = invite(identity_of("run key"), expires_at_s=time.time() + 1000, seed=bytes(32)).listing(RUN)
    key = DHTID.generate(ROOT.key(run_key(listing.view)))

    def record_of(owner: Identity, mark: str) -> DHTRecord:
        ends_s = time.time() + TTL_S
        record = PeerRecord(owner.peer_id, "", listing.view, mark=mark, expires_at_s=ends_s)
        dumps = MSGPackSerializer.dumps
        return DHTRecord(key.to_bytes(), dumps(owner.peer_id), dumps(encode_record(record, owner)), ends_s)

    strangers = [identity_of(f"stranger {number}") for number in range(NUM_STRANGERS)]
    member, others_mark = identity_of("member"), listing.mark(identity_of("another member").peer_id)
    async with node(tmp_path, "hub") as hub, node(tmp_path, "liar", hub) as liar, node(tmp_path, "me", hub) as me:
        protocol, lies = hub._dht.protocol, liar._dht.protocol.storage
        monkeypatch.setattr(protocol._allowance, "charge", lambda *_, **__: None)  # as if hours had passed
        for number, stranger in enumerate(strangers):
            record = record_of(stranger, others_mark if number % 2 else "")
            assert not protocol._keep(PeerID.from_base58(liar.peer_id), record)
            lies.store_subkey(key, stranger.peer_id, record.value, record.expiration_time)
        assert len(lies) == MAX_RECORDS_PER_KEY
        record = record_of(member, listing.mark(member.peer_id))
        assert protocol._keep(PeerID.from_base58(liar.peer_id), record)
        found = await me.get(ROOT.key(run_key(listing.view)), timeout_s=PATIENCE_S)
        assert [*found] == [member.peer_id]
