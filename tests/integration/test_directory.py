"""The directory over loopback, with real daemons: peers find each other, and no single node is required."""

from __future__ import annotations

import asyncio
import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness.patience import PATIENCE_S
from harness.processes import until as wait_until

from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.swarm.buckets import bucket_of, run_key
from noloco_p2p.swarm.daemon import probe_port
from noloco_p2p.swarm.dialer import AddressBook
from noloco_p2p.swarm.directory import Headcount, SwarmDirectory, Timing
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import TTL_S, PeerRecord, encode_record

RUN = "ab" * 32
LONG_S = 1.9 * TTL_S  # the life of records that are stored once; readers reject twice the usual life
QUICK = Timing(heartbeat_s=2.0, view_s=0.2, quick_view_s=0.2, dial_s=0.5, freshen_s=1.0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = _sockets()
    yield
    # Other programs start and stop peers on this machine, so only a socket that stays without a listener is a leak.
    wait_until(lambda: all(_is_served(path) for path in _sockets() - before), what="no socket without a listener")
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]


def _sockets() -> set[str]:
    return {path for name in ("noloco", "hivemind") for path in glob.glob(f"{tempfile.gettempdir()}/{name}-*.sock")}


def _is_served(path: str) -> bool:
    """Return whether a process listens on this socket now."""
    return any(connection.laddr == path for connection in psutil.net_connections("unix"))


def record_of(identity: Identity, *, state: str = "training") -> PeerRecord:
    return PeerRecord(identity.peer_id, "demo", RUN, addresses=("127.0.0.1:4000",), state=state)


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


@asynccontextmanager
async def directory(
    folder: Path,
    name: str,
    *,
    bootstraps: tuple[str, ...] = (),
    port: int = 0,
    spec_digest: str | None = RUN,
    is_monitor: bool = False,
) -> AsyncIterator[SwarmDirectory]:
    path = folder / f"{name}.key"
    identity = Identity.load_or_create(path)
    started = await SwarmDirectory(
        identity_path=path,
        identity=identity,
        listen_host="127.0.0.1",
        listen_port=port,
        bootstraps=bootstraps,
        address_book=AddressBook(folder / f"{name}.json"),
        spec_digest=spec_digest,
        describe=(lambda: record_of(identity)) if spec_digest and not is_monitor else None,
        timing=QUICK,
    ).start()
    try:
        yield started
    finally:
        await started.stop(farewell=False)


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.05)


def sees(watcher: SwarmDirectory, *others: SwarmDirectory) -> Callable[[], bool]:
    return lambda: {candidate.peer_id for candidate in watcher.live()} == {other.peer_id for other in others}


async def test_two_peers_see_each_other_and_a_leaving_one_vanishes_at_once(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        assert a.live() == []
        async with directory(tmp_path, "b", bootstraps=tuple(a.multiaddrs())) as b:
            assert await b.wait_for_peers(PATIENCE_S)
            await until(sees(a, b), "a sees b")
            assert b.live()[0].address == "127.0.0.1:4000"
            assert a.multiaddrs()[0].endswith(f"/tcp/{a.node.port}/p2p/{a.peer_id}")
            asked_s = time.monotonic()
            await b.stop(farewell=True)
            await a.refresh_now()
            assert a.live() == []
            [(record, age_s)] = a.records()
            assert (record.peer_id, record.state) == (b.peer_id, "leaving")
            assert 0 <= age_s < 5 + time.monotonic() - asked_s


async def test_the_swarm_outlives_its_bootstrap_and_takes_newcomers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        bootstrap = await stack.enter_async_context(directory(tmp_path, "boot", spec_digest=None))
        door = tuple(bootstrap.multiaddrs())
        a = await stack.enter_async_context(directory(tmp_path, "a", bootstraps=door))
        b = await stack.enter_async_context(directory(tmp_path, "b", bootstraps=door))
        await until(sees(a, b), "a sees b")
        await until(sees(b, a), "b sees a")
        await bootstrap.stop(farewell=False)
        c = await stack.enter_async_context(directory(tmp_path, "c", bootstraps=(*door, *b.multiaddrs())))
        await until(sees(c, a, b), "the newcomer sees both")
        await until(sees(a, b, c), "a sees the newcomer")
        await until(lambda: bootstrap.peer_id in c.dialer.failures(), "the dead bootstrap is told")


async def test_a_dead_bootstrap_does_not_stop_a_start_and_islands_merge(tmp_path: Path) -> None:
    port = probe_port("127.0.0.1", 0)
    boot_id = Identity.load_or_create(tmp_path / "boot.key").peer_id
    door = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{boot_id}",)
    async with directory(tmp_path, "a", bootstraps=door) as a, directory(tmp_path, "b", bootstraps=door) as b:
        await until(lambda: boot_id in a.dialer.failures() and boot_id in b.dialer.failures(), "both were refused")
        assert a.live() == b.live() == []
        async with directory(tmp_path, "boot", port=port, spec_digest=None):
            await until(sees(a, b), "a sees b")
            await until(sees(b, a), "b sees a")
            await until(lambda: a.dialer.failures() == {}, "a is through to the bootstrap")


async def test_remembered_peers_are_a_way_in(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        async with directory(tmp_path, "b", bootstraps=tuple(a.multiaddrs())) as b:
            await until(sees(b, a), "b sees a")
        async with directory(tmp_path, "b") as again:
            assert again.peer_id == b.peer_id
            await until(sees(again, a), "b finds a without any bootstrap")


async def test_a_killed_daemon_is_healed_with_the_same_id_and_port(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a, directory(tmp_path, "b", bootstraps=tuple(a.multiaddrs())) as b:
        await until(sees(a, b), "a sees b")
        await until(sees(b, a), "b sees a")
        old_pid, addresses = b.node.daemon_pid, b.multiaddrs()
        assert old_pid
        os.kill(old_pid, signal.SIGKILL)
        await until(lambda: b.node.daemon_pid not in (None, old_pid), "the daemon runs again")
        await until(lambda: a.peer_id in b.node.neighbours(), "b has dialled a again")
        assert b.multiaddrs() == addresses
        sequence = {record.peer_id: record.sequence for record, _ in a.records()}[b.peer_id]
        await b.announce_now()
        await a.refresh_now()
        assert {record.peer_id: record.sequence for record, _ in a.records()}[b.peer_id] > sequence


async def test_a_question_that_is_cut_short_leaves_no_connection_to_the_daemon(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        assert a.node.daemon_pid
        daemon = psutil.Process(a.node.daemon_pid)
        daemon.suspend()
        asking = asyncio.create_task(a.node.hosts_of(a.peer_id))
        await asyncio.sleep(0.2)
        asking.cancel()
        await asyncio.wait({asking})
        daemon.resume()
    gc.collect()  # raises a ResourceWarning for anything still open


async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        with pytest.raises(DirectoryError, match=rf"port {a.node.port} on 127\.0\.0\.1 is already in use.*--listen"):
            async with directory(tmp_path, "b", port=a.node.port):
                pass


async def test_a_monitor_reads_and_is_not_seen(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        door = tuple(a.multiaddrs())
        async with directory(tmp_path, "monitor", bootstraps=door, is_monitor=True) as monitor:
            await until(sees(monitor, a), "the monitor sees a")
            assert a.node.neighbours() == set()
            assert a.live() == []


async def test_a_large_run_is_counted_by_a_part_of_it_and_read_whole_by_a_monitor(tmp_path: Path) -> None:
    """The 120 peers exist only as records at depth 2, which one node stores."""
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(120)]
    many = [Identity(peer_id_of(public_bytes(key)), public_bytes(key), key) for key in keys]

    async def announce(node: SwarmNode, identity: Identity) -> None:
        expires_at_s = time.time() + LONG_S
        told = replace(record_of(identity), depths=(2,), sequence=1, expires_at_s=expires_at_s)
        key = bucket_of(identity.peer_id, 2).key(run_key(RUN))
        await node.store(key, identity.peer_id, encode_record(told, identity), expires_at_s=expires_at_s)

    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(directory(tmp_path, "a"))
        door = tuple(a.multiaddrs())
        b = await stack.enter_async_context(directory(tmp_path, "b", bootstraps=door))
        await until(sees(a, b), "a sees b")
        for start in range(0, len(many), 20):
            await asyncio.gather(*(announce(b.node, identity) for identity in many[start : start + 20]))
        await until(lambda: a.headcount().is_estimate and len(a.live()) > 40, "a looked aside and went there")
        await until(lambda: 90 <= a.headcount().others <= 150, "the estimate settles")
        drawn = {candidate.peer_id for candidate in a.live()}
        assert len(drawn) < 100, "two buckets of four"
        hidden = next(identity.peer_id for identity in many if identity.peer_id not in drawn)
        found = await a.find(hidden, timeout_s=PATIENCE_S)
        assert found
        assert found.peer_id == hidden
        assert await a.find("nobody", timeout_s=PATIENCE_S) is None
        monitor = await stack.enter_async_context(directory(tmp_path, "monitor", bootstraps=door, is_monitor=True))
        await until(lambda: len(monitor.live()) >= 122, "the monitor reads all buckets")
        assert await monitor.wait_until_whole(PATIENCE_S)
        assert monitor.headcount() == Headcount(122, is_estimate=False)


def test_the_daemon_dies_with_a_killed_parent(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from noloco_p2p.identity import Identity, peer_id_of
        from noloco_p2p.swarm.daemon import ListenOn
        from noloco_p2p.swarm.node import SwarmNode

        async def main():
            path = Path(sys.argv[1])
            identity = Identity.load_or_create(path)
            node = await SwarmNode(path, identity.peer_id, ListenOn("127.0.0.1")).start()
            print(node.daemon_pid, node._daemon.control_socket, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid, control_socket = parent.stdout.readline().split()
        daemon = psutil.Process(int(pid))
        assert os.path.exists(control_socket)
        assert os.getsid(daemon.pid) == daemon.pid  # Ctrl-C in the terminal does not reach it
        parent.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    while daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE:  # nobody may reap it
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert not os.path.exists(control_socket)
