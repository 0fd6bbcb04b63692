"""Implements the command `noloco bootstrap`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.collection import spare_what_is_loaded
from noloco_p2p.cli.options import takes_settings
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.control import ControlServer
    from noloco_p2p.identity import Identity
    from noloco_p2p.swarm.directory import SwarmDirectory


log = logging.getLogger(__name__)


@takes_settings("listen", "announce", "state_dir", "bootstrap")
def bootstrap(
    settings: PeerSettings,
    address_file: Annotated[
        Path | None,
        typer.Option(help="Write this node's address to FILE, for use with --bootstrap @FILE.", show_default=False),
    ] = None,
) -> None:
    """Run a DHT node through which peers can join a run. It has no model and no data."""
    import uvloop

    from noloco_p2p.control import FolderLock
    from noloco_p2p.identity import Identity
    from noloco_p2p.peer.ports import check_free

    entry.check_writable(address_file, flag="--address-file")
    lock = FolderLock(settings.state_dir)
    lock.acquire()
    if settings.libp2p_port:
        check_free(settings.listen_host, settings.libp2p_port)
    identity = Identity.load_or_create(settings.state_dir / "identity.key")
    print("starting (loading hivemind takes a few seconds)", flush=True)
    uvloop.run(_serve(settings, identity, address_file=address_file))
    lock.release()
    print("left", flush=True)


async def _serve(settings: PeerSettings, identity: Identity, *, address_file: Path | None) -> None:
    from noloco_p2p.swarm.dialer import AddressBook
    from noloco_p2p.swarm.directory import SwarmDirectory
    from noloco_p2p.tcp import Mirror

    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, _stop_or_exit, stop, signum)
    announce_host, announce_port = settings.announced
    directory = await SwarmDirectory(
        identity_path=settings.state_dir / "identity.key",
        identity=identity,
        listen_host=settings.listen_host,
        listen_port=settings.libp2p_port,
        announce_host=announce_host or None,
        announce_port=announce_port + 1 if announce_port else 0,
        bootstraps=settings.bootstrap,
        address_book=AddressBook(settings.state_dir / "address_book.json"),
        spec_digest=None,
    ).start()
    mirror = Mirror()
    try:
        mirror_port = await mirror.start(settings.listen_host, settings.listen_port)
        if directory.relay:
            directory.relay.mirror_port = announce_port or mirror_port
    except OSError as error:
        log.warning(
            "cannot listen on port %d, so this node cannot help peers punch holes through their routers: %s",
            settings.listen_port,
            error,
        )
    control = _control(settings, directory, leave=stop.set)
    try:
        await control.start()
        for multiaddr in directory.multiaddrs():
            print(multiaddr)
        entry.write(address_file, directory.multiaddrs()[0], flag="--address-file")
        print(f"others can join with: noloco join SPEC.toml --bootstrap {directory.multiaddrs()[0]}", flush=True)
        spare_what_is_loaded()
        await stop.wait()
    finally:
        await control.stop()
        await mirror.stop()
        await directory.stop()


def _stop_or_exit(stop: asyncio.Event, signum: int) -> None:
    """Stop the node cleanly at the first signal, and exit immediately at the second."""
    if stop.is_set():
        os._exit(128 + signum)
    stop.set()


def _control(settings: PeerSettings, directory: SwarmDirectory, *, leave: Callable[[], None]) -> ControlServer:
    """Create the server that answers `noloco status` and `noloco leave`."""
    from noloco_p2p.control import ControlServer

    def on_leave() -> dict[str, object]:
        leave()
        return {"leaving": True, "pid": os.getpid()}

    def on_status() -> dict[str, object]:
        own = {"peer_id": directory.peer_id, "pid": os.getpid(), "state": "bootstrap"}
        return {**own, "addresses": directory.multiaddrs(), "neighbours": len(directory.node.neighbours())}

    return ControlServer(settings.state_dir, {"status": on_status, "leave": on_leave})
