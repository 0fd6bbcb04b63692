"""Less common ways to join a swarm: a plain hivemind-dht as bootstrap, IPv6, and a clock that is wrong."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.identity import Identity
from noloco_p2p.swarm.addresses import host_port
from noloco_p2p.swarm.directory import SwarmDirectory, Timing
from noloco_p2p.swarm.records import PeerRecord

RUN = "cd" * 32
QUICK = Timing(heartbeat_s=2.0, view_s=0.2, quick_view_s=0.2, dial_s=0.5, freshen_s=5.0)

HIVEMIND_DHT = """
import sys
sys.argv = ["hivemind-dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--no_relay"]
from hivemind.hivemind_cli.run_dht import main
main()
"""

WRONG_CLOCK = """
import asyncio, sys, time
right, off_s = time.time, float(sys.argv[3])
time.time = lambda: right() + off_s  # the clock of a machine that nobody has set, before anything asks it
from pathlib import Path
from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.directory import SwarmDirectory, Timing

async def main():
    path = Path(sys.argv[1])
    directory = await SwarmDirectory(
        identity_path=path, identity=Identity.load_or_create(path), listen_host="127.0.0.1", listen_port=0,
        bootstraps=[sys.argv[2]], spec_digest="cd" * 32,
    ).start()
    began_s = time.monotonic()
    try:
        await directory.wait_for_peers(30.0)
        print("entered")
    except DirectoryError as error:
        print(f"refused after {time.monotonic() - began_s:.1f} s: {error}")
    finally:
        await directory.stop()

asyncio.run(main())
"""


@asynccontextmanager
async def directory(
    folder: Path, name: str, *bootstraps: str, host: str = "127.0.0.1"
) -> AsyncIterator[SwarmDirectory]:
    path = folder / f"{name}.key"
    identity = Identity.load_or_create(path)
    started = await SwarmDirectory(
        identity_path=path,
        identity=identity,
        listen_host=host,
        listen_port=0,
        bootstraps=bootstraps,
        spec_digest=RUN,
        describe=lambda: PeerRecord(identity.peer_id, "demo", RUN, addresses=(host_port(host, 4000),)),
        timing=QUICK,
    ).start()
    try:
        yield started
    finally:
        await started.stop(farewell=False)


@contextmanager
def hivemind_dht() -> Iterator[str]:
    """Run a bootstrap with hivemind's own command line and yield its multiaddr."""
    command = [sys.executable, "-W", "ignore", "-c", HIVEMIND_DHT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                if found := re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", line):
                    yield found[0]
                    return
            raise AssertionError("hivemind-dht told no address")
        finally:
            process.terminate()


async def test_a_plain_hivemind_dht_is_a_bootstrap(tmp_path: Path) -> None:
    with hivemind_dht() as door:
        async with directory(tmp_path, "a", door) as a, directory(tmp_path, "b", door) as b:
            assert await a.wait_for_peers(PATIENCE_S)
            assert await b.wait_for_peers(PATIENCE_S)
            assert [candidate.peer_id for candidate in a.live()] == [b.peer_id]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6, not even ::1")
async def test_ipv6_is_as_good(tmp_path: Path) -> None:
    async with directory(tmp_path, "a", host="::1") as a:
        assert a.multiaddrs()[0].startswith("/ip6/::1/tcp/")
        async with directory(tmp_path, "b", *a.multiaddrs(), host="::1") as b:
            assert await b.wait_for_peers(PATIENCE_S)
            assert b.live()[0].address == "[::1]:4000"


async def test_a_wrong_clock_is_refused_with_the_offset(tmp_path: Path) -> None:
    async with directory(tmp_path, "a") as a:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(WRONG_CLOCK)]
        process = await asyncio.create_subprocess_exec(
            *command, str(tmp_path / "late.key"), a.multiaddrs()[0], "-60", stdout=subprocess.PIPE
        )
        said = (await process.communicate())[0].decode()
        found = re.search(r"refused after ([\d.]+) s: this machine's clock is ([\d.]+) s behind", said)
        assert found, said
        assert float(found[2]) == pytest.approx(60, abs=2)
        assert "NTP" in said
        assert a.live() == []
