"""Keeps the libp2p addresses of known peers in a JSON file, the address book.

A peer dials these addresses when it restarts, and when it has lost contact with the swarm. The file is only a
convenience. A damaged or missing file counts as empty, and a file that cannot be written causes only a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from noloco_p2p.atomic_file import write_atomically

logger = logging.getLogger(__name__)

CIRCUIT = "/p2p-circuit"
MAX_PEERS = 64
MAX_ADDRESSES = 4  # per peer
MAX_FILE_BYTES = 256 * 1024
MAX_ADDRESS_CHARS = 320


class AddressBook:
    """The multiaddrs of known peers, by peer id.

    Each multiaddr ends in /p2p/PEER_ID. Without a `path`, the book is kept only in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._peers: dict[str, tuple[str, ...]] = _read(path) if path else {}  # the most recently seen peer is last
        self._changed = False

    def remember(self, peer_id: str, multiaddrs: Sequence[str]) -> None:
        """Store the addresses of a live peer. If the book is full, the least recently seen peer is removed."""
        addresses = tuple(address for address in multiaddrs if _belongs(address, peer_id))[:MAX_ADDRESSES]
        if not addresses:
            return
        self._changed = self._changed or self._peers.get(peer_id) != addresses
        self._peers.pop(peer_id, None)
        self._peers[peer_id] = addresses
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses by peer id, with the most recently seen peer first."""
        return dict(reversed(self._peers.items()))

    def save(self) -> None:
        """Write the file atomically if the book has changed. This blocks on the disk and never raises an exception."""
        if self._path is None or not self._changed:
            return
        values = {"version": 1, "peers": list(self._peers.items())}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(values).encode())
            self._changed = False
        except OSError as error:
            logger.warning("could not save the addresses of %d peers to %s: %s", len(self._peers), self._path, error)


def _belongs(address: object, peer_id: str) -> bool:
    return (
        isinstance(address, str)
        and len(address) <= MAX_ADDRESS_CHARS
        and address.startswith("/")
        and CIRCUIT not in address  # usable for calls while a relay holds the reservation, but not for entering the DHT
        and address.endswith(f"/p2p/{peer_id}")
    )


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        peers: dict[str, tuple[str, ...]] = {}
        for peer_id, multiaddrs in json.loads(path.read_text(encoding="utf-8"))["peers"][-MAX_PEERS:]:
            addresses = tuple(address for address in multiaddrs if _belongs(address, peer_id))[:MAX_ADDRESSES]
            if addresses:
                peers[peer_id] = addresses
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s); starting without remembered peers", path, error)
        return {}
    return peers
