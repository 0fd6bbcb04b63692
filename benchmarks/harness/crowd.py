"""Make the records of a synthetic swarm of any size, so that the monitor shows more peers than fit on this machine."""

from __future__ import annotations

import random
from dataclasses import replace

from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.telemetry.metrics import Metrics

SWAP_S = 20.0
DIGEST = "c0" * 32


class Crowd:
    """A synthetic swarm, determined by a seed. `records` returns the content of its directory."""

    def __init__(self, num_peers: int, *, began_s: float, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._began_s = began_s
        self._gone: dict[int, float] = {}
        names = [f"12D3KooW{index:06d}{self._rng.randbytes(8).hex()}" for index in range(num_peers)]
        self.peers = [
            PeerRecord(name, "crowd", DIGEST, reachability="direct", metrics=Metrics(loss=6.0)) for name in names
        ]

    def kill(self, index: int, *, now_s: float) -> None:
        """Stop the announcements of a peer."""
        self._gone[index] = now_s

    def records(self, now_s: float) -> list[tuple[PeerRecord, float]]:
        """Return (record, age in seconds) of each peer at this Unix time. Records of live peers are under 15 s old."""
        found = []
        for index, record in enumerate(self.peers):
            phase_s = (index * 0.618 % 1) * TTL_S / 4
            until_s = min(now_s, self._gone.get(index, now_s))
            made_s = until_s - (until_s - phase_s) % (TTL_S / 4)
            if now_s - made_s <= TTL_S:
                found.append((self._tell(index, record, made_s), now_s - made_s))
        return found

    def _tell(self, index: int, record: PeerRecord, made_s: float) -> PeerRecord:
        attempts = max(0, int((made_s - self._began_s) / SWAP_S))
        failed = attempts // 20
        return replace(
            record,
            sequence=int(made_s * 1000),
            metrics=replace(
                record.metrics,
                progress=min(1.0, attempts / 2000),
                swaps=attempts - failed,
                failed_slow=failed,
                swaps_per_min=60 / SWAP_S,
                link_use=0.8,
                age_steps=2.0,
                apart=0.003,
                loss=2.0 + 4.0 / (1 + attempts / 10) + (index % 17) / 100,
                tokens_per_s=1000.0 + index % 500,
                last_partner=self.peers[(index + 1 + attempts * 7) % len(self.peers)].peer_id if attempts else "",
                bytes_sent=attempts << 22,
                bytes_received=attempts << 22,
            ),
        )
