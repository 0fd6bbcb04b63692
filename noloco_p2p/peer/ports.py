"""Choose the two ports of a peer, and reuse them at its next start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import DirectoryError, SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.daemon import probe_port

log = logging.getLogger(__name__)
FILE = "ports.json"
T = TypeVar("T")


class Ports:
    """The ports of `--listen HOST:PORT`: PORT is for gRPC, and PORT+1 is for libp2p.

    Port 0 stands for the two ports of the last start if they are free, and for any two free ports otherwise.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._file = settings.state_dir / FILE
        self._host = settings.listen_host
        self._fixed = settings.listen_port != 0
        remembered = remembered_ports(settings.state_dir)
        self.grpc = settings.listen_port if self._fixed else remembered.get("grpc", 0)
        self.libp2p = settings.libp2p_port if self._fixed else remembered.get("libp2p", 0)

    def check(self) -> None:
        """Raise SettingsError if a port that the user named is in use. Call this before anything is started."""
        if self._fixed:
            check_free(self._host, self.grpc, self.libp2p)

    async def try_both(self, port: int, start: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Start on `port`. If `port` is remembered and now in use, start on any free port instead."""
        try:
            return await start(port)
        except (SettingsError, DirectoryError):
            if self._fixed or port == 0:
                raise
            return await start(0)

    def remember(self, *, grpc: int, libp2p: int) -> None:
        try:
            write_atomically(self._file, json.dumps({"grpc": grpc, "libp2p": libp2p}).encode())
        except OSError as error:
            log.warning("the ports could not be saved for the next start: %s", error)


def remembered_ports(state_dir: Path) -> dict[str, int]:
    """Return the ports `grpc` and `libp2p` of the peer that runs or last ran in this folder, or {} if unknown."""
    try:
        ports = json.loads((state_dir / FILE).read_text())
        return {name: int(ports[name]) for name in ("grpc", "libp2p")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_free(host: str, *ports: int) -> None:
    """Raise SettingsError if a port is in use, or if the host is not an address of this machine."""
    try:
        for port in ports:
            probe_port(host, port)
    except DirectoryError as error:
        raise SettingsError(str(error)) from None
