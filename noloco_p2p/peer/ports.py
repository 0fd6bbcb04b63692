"""Which two ports a peer listens on, and that it finds them again at its next start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.errors import DirectoryError, SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.daemon import probe_port

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ports:
    """`--listen HOST:PORT`: PORT is gRPC, PORT+1 libp2p. With port 0, the two that were free last time, or any two."""

    def __init__(self, settings: PeerSettings) -> None:
        self._file = settings.state_dir / "ports.json"
        self._host = settings.listen_host
        self._fixed = settings.listen_port != 0
        remembered = self._read()
        self.grpc = settings.listen_port if self._fixed else remembered.get("grpc", 0)
        self.libp2p = settings.libp2p_port if self._fixed else remembered.get("libp2p", 0)

    def check(self) -> None:
        """Raises SettingsError when a port that the user named is taken: before anything is started."""
        if self._fixed:
            check_free(self._host, self.grpc, self.libp2p)

    async def try_both(self, port: int, start: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Start on `port`; a remembered port that is taken by now gives way to any free one."""
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
            log.warning("the ports are not remembered: %s", error)

    def _read(self) -> dict[str, int]:
        try:
            ports = json.loads(self._file.read_text())
            return {name: int(ports[name]) for name in ("grpc", "libp2p")}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def check_free(host: str, *ports: int) -> None:
    """Raises SettingsError when one of them is taken, or the host is no address of this machine."""
    try:
        for port in ports:
            probe_port(host, port)
    except DirectoryError as error:
        raise SettingsError(str(error)) from None
