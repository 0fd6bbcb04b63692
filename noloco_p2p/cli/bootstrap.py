"""noloco bootstrap"""

from __future__ import annotations

import asyncio
import signal

from noloco_p2p.cli.options import Announce, Bootstrap, Listen, StateDir


def bootstrap(
    listen: Listen = None,
    announce: Announce = None,
    state_dir: StateDir = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Run a DHT-only peer that others can enter through: no model, no data."""
    from noloco_p2p.settings import PeerSettings

    flags = {"listen": listen, "announce": announce, "state_dir": state_dir}
    settings = PeerSettings.load({**flags, "bootstrap": tuple(bootstrap) if bootstrap else None})
    from noloco_p2p.control import FolderLock
    from noloco_p2p.identity import Identity

    lock = FolderLock(settings.state_dir)
    lock.acquire()
    key_file = settings.state_dir / "identity.key"
    identity = Identity.load_or_create(key_file)

    async def serve() -> None:
        from noloco_p2p.swarm.address_book import AddressBook
        from noloco_p2p.swarm.dht import SwarmDirectory

        stop = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        port = settings.listen_port
        directory = await SwarmDirectory.start(
            identity_path=key_file,
            identity=identity,
            listen_host=settings.listen_host,
            listen_port=port + 1 if port else 0,
            announce_host=settings.announce.partition(":")[0] or None,
            bootstraps=settings.bootstrap,
            address_book=AddressBook(settings.state_dir / "address_book.json"),
            spec_digest=None,
        )
        try:
            for multiaddr in directory.multiaddrs():
                print(multiaddr, flush=True)
            print(f"others enter with: noloco join SPEC.toml --bootstrap {directory.multiaddrs()[0]}", flush=True)
            await stop.wait()
        finally:
            await directory.stop()

    asyncio.run(serve())
    lock.release()
