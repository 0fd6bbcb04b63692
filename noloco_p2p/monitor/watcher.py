"""Describes a swarm from the outside, based on the records of its peers in the DHT.

The directory forgets a peer when its record expires, but an operator wants to know which peers were lost, and when.
`Watcher` therefore keeps the records that it has seen, and returns the JSON that docs/operators.md describes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import Any, NamedTuple

from noloco_p2p.errors import Unreachable
from noloco_p2p.monitor.notices import WINDOW_S, notices
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.peer_name import named
from noloco_p2p.presets import describe_size
from noloco_p2p.spec import MAX_STAGES, TrainerSpec
from noloco_p2p.swarm.clock import DhtClock
from noloco_p2p.swarm.directory import WHOLE_S, SwarmDirectory, find_somebody, reader
from noloco_p2p.swarm.records import SERVING, TTL_S, PeerRecord
from noloco_p2p.telemetry.metrics import FAILED, RECORDED
from noloco_p2p.telemetry.totals import TOTALS, is_living
from noloco_p2p.ticket import Ticket
from noloco_p2p.transfer.fetch import fetch_spec

SUMMARY_VERSION = 1
ABOUT_S = 5.0  # for the spec
SETTLE_S = 2.0  # wait after the first record; the others arrive with the same read or the next one
SILENT_AFTER_S = 35.0  # after this long without a new record, a peer has missed two announcements
LEAVING_FOR_S = 20.0  # after being in the state "leaving" for this long, a peer counts as having left
FORGET_AFTER_S = 3600.0
MAX_PEERS = 20_000
MAX_MEETINGS = 5_000
MAX_PARTNERS = 16  # of one peer, whose last report of a swap with it counts
WINDOW_STEP_S = 10.0
COUNTED = ("swaps", *FAILED)  # over the last WINDOW_S
SUMMED = ("capacity", "queue", "microbatches", "lost_microbatches", "late_microbatches")  # over the peers of a stage


class Health(StrEnum):
    """The health of a peer, judged by the age of its last record. Monitors list peers in this order."""

    ALIVE = "alive"
    SILENT = "silent"  # it has missed two announcements
    LEAVING = "leaving"
    LEFT = "left"  # it announced that it was leaving
    GONE = "gone"  # its record expired before it announced leaving

    @classmethod
    def of(cls, state: str, age_s: float) -> Health:
        """Return the health of a peer whose last record has this state and age."""
        if state == "leaving":
            return cls.LEAVING if age_s <= LEAVING_FOR_S else cls.LEFT
        if age_s > TTL_S:
            return cls.GONE
        return cls.SILENT if age_s > SILENT_AFTER_S else cls.ALIVE


@dataclass(slots=True)
class Member:
    """A peer's newest record, when it was made, and since when the peer has been training without a swap.

    Times are Unix seconds on this machine's clock.
    """

    record: PeerRecord
    made_at_s: float
    quiet_since_s: float
    moved: dict[str, float] = field(default_factory=dict)  # how far this peer's slices moved others, by their reports

    def moved_another(self, peer_id: str, moved: float) -> None:
        self.moved.pop(peer_id, None)
        self.moved[peer_id] = moved
        if len(self.moved) > MAX_PARTNERS:
            del self.moved[next(iter(self.moved))]

    def row(self, *, now_s: float) -> dict[str, Any]:
        """Describe the peer as JSON values. This is the row that monitors show."""
        record, age_s = self.record, max(0.0, now_s - self.made_at_s)
        return {
            "peer_id": record.peer_id,
            "name": record.name,
            "shown": named(record.peer_id, record.name),
            "health": str(Health.of(record.state, age_s)),
            "state": record.state,
            "paused_by": record.paused_by if record.state == "paused" else "",
            **{name: getattr(record.metrics, name) for name in RECORDED},
            "moves_others": median(self.moved.values()) if self.moved else None,
            "failed": record.metrics.failed,
            "reachability": record.reachability,
            "addresses": list(record.addresses),
            "stage": record.stage if record.stages else None,
            "stages": record.stages,
            "sends_to": list(record.sends_to),
            "software": record.software,
            "age_s": round(age_s, 1),
            "quiet_s": round(max(0.0, now_s - self.quiet_since_s), 1),
        }


class Own(NamedTuple):
    """The peer of the run on this machine, and why it cannot announce itself. Both are "" if there is none."""

    peer_id: str = ""
    fault: str = ""


class Watcher:
    """Observes one run. Each `look` reads the current records of the directory, and returns a summary.

    `members` are the peers that have been seen. `meetings` are swaps between two peers: the Unix time at which a peer
    first reported the swap, the peer, and its partner. `own` returns the peer on this machine. `about` describes the
    model and the data.
    """

    def __init__(self, ticket: Ticket, own: Callable[[], Own] = Own) -> None:
        self.about = ""
        self.members: dict[str, Member] = {}
        self.meetings: deque[tuple[float, str, str]] = deque(maxlen=MAX_MEETINGS)
        self._ticket = ticket
        self._own = own
        self._clock = DhtClock()  # what this machine's clock said at the start, because a later jump must not count
        self._counts: Counter[str] = Counter()  # since this watcher was created
        self._window: deque[tuple[float, Counter[str]]] = deque()

    def look(self, directory: SwarmDirectory) -> dict[str, Any]:
        headcount = directory.headcount()
        return self.take(
            directory.records(),
            directory_age_s=directory.read_age_s(),
            now_s=self._clock.now(),
            num_estimated=headcount.others if headcount.is_estimate else None,
            own=self._own(),
        )

    def take(
        self,
        records: Iterable[tuple[PeerRecord, float]],
        *,
        directory_age_s: float,
        now_s: float,
        num_estimated: int | None = None,
        own: Own = Own(),  # noqa: B008 - it is immutable
    ) -> dict[str, Any]:
        """Take the records and their ages, and return a summary of the swarm as JSON values.

        `num_estimated` is the estimated number of live peers, or None if all of them have been read.
        """
        for record, age_s in records:
            self._take(record, now_s - age_s)
        newest_first = sorted(self.members.items(), key=lambda item: -item[1].made_at_s)[:MAX_PEERS]
        self.members = {peer: known for peer, known in newest_first if now_s - known.made_at_s <= FORGET_AFTER_S}
        if not self._window or now_s - self._window[-1][0] >= WINDOW_STEP_S:
            self._window.append((now_s, Counter(self._counts)))
        while len(self._window) > 1 and now_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()
        rows = [member.row(now_s=now_s) for _, member in sorted(self.members.items())]
        shown = {row["peer_id"]: row["shown"] for row in rows}
        for row in rows:
            row["is_own"] = row["peer_id"] == own.peer_id
            row["last_shown"] = shown.get(last, named(last)) if (last := row["last_partner"]) else ""
        stages = stage_rows([row for row in rows if is_living(row)])
        lately = {name: self._counts[name] - self._window[0][1][name] for name in COUNTED}
        lately_s = now_s - self._window[0][0]
        lately_s = WINDOW_S if lately_s > WINDOW_S - WINDOW_STEP_S else lately_s
        health = Counter(row["health"] for row in rows)
        return {
            "version": SUMMARY_VERSION,
            "run": self._ticket.run_name,
            "spec_digest": self._ticket.spec_digest,
            "about": self.about,
            "time_s": round(now_s, 3),
            "directory_age_s": round(directory_age_s, 1),
            "estimate": num_estimated,
            "totals": {
                **{str(kind): health[kind] for kind in Health},
                **{total.name: total.over(rows) for total in TOTALS},
                "lately": lately,
                "lately_s": round(lately_s, 1),
            },
            "stages": stages,
            "notices": notices(
                rows,
                stages=stages,
                lately=lately,
                lately_s=lately_s,
                directory_age_s=directory_age_s,
                num_estimated=num_estimated,
                own_fault=own.fault,
            ),
            "peers": rows,
        }

    def _take(self, new: PeerRecord, made_at_s: float) -> None:
        """Remember a record if it is newer than the known one, and count what has happened between the two."""
        known = self.members.get(new.peer_id)
        if known is None:
            self.members[new.peer_id] = Member(new, made_at_s, quiet_since_s=made_at_s)
            return
        if new.sequence == known.record.sequence:  # it may be lower after a clock was set back; the directory decides
            return
        for name in COUNTED:
            self._counts[name] += max(0, getattr(new.metrics, name) - getattr(known.record.metrics, name))
        has_swapped = new.metrics.swaps > known.record.metrics.swaps
        if has_swapped and new.metrics.last_partner:
            self.meetings.append((made_at_s, new.peer_id, new.metrics.last_partner))
            if (partner := self.members.get(new.metrics.last_partner)) and new.metrics.moved is not None:
                partner.moved_another(new.peer_id, new.metrics.moved)
        if has_swapped or new.state != "training":
            known.quiet_since_s = made_at_s
        known.record, known.made_at_s = new, made_at_s


def stage_rows(living: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize the peers of each stage, in ascending order of capacity. Without stages, the list is empty.

    `living` has the rows of the peers that are alive or silent. A stage that no peer serves has 0 peers.
    """
    # The number of stages is the one that most peers report, so that one peer cannot invent stages.
    told = Counter(row["stages"] for row in living if row["stages"] <= MAX_STAGES)
    found = []
    for stage in range(max(told, key=lambda number: (told[number], number), default=0)):
        peers = [row for row in living if row["stage"] == stage and row["state"] in SERVING]
        sums = {name: sum(peer[name] for peer in peers) for name in SUMMED}
        done = sums["microbatches"]
        apart = [peer["apart"] for peer in peers if peer["apart"] is not None]
        found.append(
            {
                "stage": stage,
                "peers": len(peers),
                "tokens_per_s": sum(peer["tokens_per_s"] for peer in peers if peer["state"] == "training"),
                **sums,
                "lost_share": sums["lost_microbatches"] / done if done else None,
                "late_share": sums["late_microbatches"] / done if done else None,
                "apart": fmean(apart) if apart else None,
            }
        )
    return sorted(found, key=lambda row: (row["capacity"], row["stage"]))


@asynccontextmanager
async def watching(ticket: Ticket, own: Callable[[], Own] = Own) -> AsyncIterator[tuple[Watcher, SwarmDirectory]]:
    """Find the swarm, and yield a watcher and the directory to look at. Raises Unreachable if no peer is found."""
    watcher = Watcher(ticket, own)
    async with reader(ticket) as directory:
        await find_somebody(ticket, directory)
        watcher.about = await _about(ticket, directory)
        yield watcher, directory


async def _about(ticket: Ticket, directory: SwarmDirectory) -> str:
    """Describe the model and the data according to the spec, which one peer is asked for. "" if none answers."""
    transport = GrpcTransport.from_outside(ticket, directory.identity, directory.node.guard)
    peers = [peer for peer in directory.live() if peer.can_be_called]
    try:
        async with asyncio.timeout(ABOUT_S):
            spec = await fetch_spec(transport, peers, expected_digest=ticket.spec_digest)
    except (TimeoutError, Unreachable):
        return ""
    if not isinstance(spec, TrainerSpec):
        return "a model of a training script"
    return f"{describe_size(spec)}, trained on {', '.join(part.source for part, _ in spec.data.parts())}"


async def snapshot(ticket: Ticket, own: Callable[[], Own] = Own) -> dict[str, Any]:
    """Read the swarm once, and return its summary. Raises Unreachable if no peer of the run is found."""
    async with watching(ticket, own) as (watcher, directory):
        await asyncio.sleep(SETTLE_S)
        await directory.wait_until_whole(WHOLE_S)
        return watcher.look(directory)
