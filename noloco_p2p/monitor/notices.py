"""Notices about problems that an operator of a swarm should look at first. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from noloco_p2p.monitor.roster import WINDOW_S, Health, Member, Roster
from noloco_p2p.monitor.stages import Stage
from noloco_p2p.swarm.dial_back import OPEN, Reach
from noloco_p2p.telemetry.console import counted, duration, named, numbered_stages, percent
from noloco_p2p.telemetry.metrics import FAILED

STALE_AFTER_S = 20.0  # the directory is read every 5 s, and counts as stale after this long without a successful read
FAILED_SHARE = 0.25
ENOUGH_SWAPS = 10
ASTRAY = 4.0  # a peer is reported if its distance from its partners is this multiple of the median distance
ENOUGH_PEERS = 4  # for a median
UNREACHED_SWAPS = 10
NAMED = 3  # at most so many peers are named in a notice

CAUSES = {
    "failed_unreachable": "partners could not be reached",
    "failed_slow": "partners did not answer in time",
    "failed_corrupt": "partners sent invalid data",
    "failed_abandoned": "partners ended them",
}


Level = Literal["bad", "warn", "info"]


@dataclass(frozen=True, slots=True)
class Notice:
    level: Level
    text: str


def notices(
    roster: Roster,
    *,
    stages: Sequence[Stage],
    directory_age_s: float,
    now_s: float,
    num_estimated: int | None = None,
) -> list[Notice]:
    """Return the notices, with the worst first. There are none if all is well.

    `num_estimated` is the estimated number of peers of a swarm that has not been read completely.
    """
    health = {peer: member.health(now_s) for peer, member in roster.members.items()}
    alive = [roster.members[peer] for peer, state in health.items() if state in (Health.ALIVE, Health.SILENT)]
    told: dict[Level, Iterable[str]] = {
        "bad": _broken(stages, alive, directory_age_s),
        "warn": (*_lost(roster, health, now_s), *_swapping(roster, alive, now_s)),
        "info": _remarks(alive, num_estimated),
    }
    return [Notice(level, text) for level, texts in told.items() for text in texts]


def _broken(stages: Sequence[Stage], alive: Sequence[Member], directory_age_s: float) -> Iterator[str]:
    if directory_age_s > STALE_AFTER_S:
        yield f"The directory has not answered for {duration(directory_age_s)}, so the values shown are out of date."
    if not alive:
        yield "No peer is alive."
    empty = sorted(row["stage"] for row in stages if not row["peers"])
    if empty and any(member.record.state == "training" for member in alive):
        yield f"No peer holds {numbered_stages(empty)}, so no microbatch can be completed."


def _lost(roster: Roster, health: dict[str, Health], now_s: float) -> Iterator[str]:
    ages = {peer: roster.members[peer].age_s(now_s) for peer, state in health.items() if state is Health.GONE}
    lately = sorted((age_s, peer) for peer, age_s in ages.items() if age_s <= WINDOW_S)
    if lately:
        yield (
            f"Lost {counted(len(lately), 'peer')} that left without notice: {_names([peer for _, peer in lately])}. "
            f"The newest record is {duration(lately[0][0])} old."
        )
    silent = sum(state is Health.SILENT for state in health.values())
    if silent:
        yield f"{counted(silent, 'peer')} missed two announcements and may be gone."


def _swapping(roster: Roster, alive: Sequence[Member], now_s: float) -> Iterator[str]:
    """Yield notices about peers that do not swap, about swaps that fail, and about weights that are far apart."""
    training = [member for member in alive if member.record.state == "training"]
    num_mates = Counter(member.record.stage for member in training)
    quiet = [
        member.record.peer_id
        for member in training
        if now_s - member.quiet_since_s > WINDOW_S and num_mates[member.record.stage] > 1
    ]
    if quiet:
        yield (
            f"{counted(len(quiet), 'peer')} did not swap for {duration(WINDOW_S)}: {_names(quiet)}. "
            "`noloco doctor TICKET` on such a machine may find the reason."
        )
    lately = roster.lately()
    num_failed = sum(lately[name] for name in FAILED)
    attempts = lately["swaps"] + num_failed
    if attempts >= ENOUGH_SWAPS and num_failed >= FAILED_SHARE * attempts:
        cause = CAUSES[max(FAILED, key=lambda name: lately[name])]
        share, window = percent(num_failed / attempts), duration(WINDOW_S)
        yield f"{share} of the swaps in the last {window} failed, mostly because {cause}."
    for stage in num_mates:
        apart = {m.record.peer_id: m.record.metrics.apart or 0.0 for m in training if m.record.stage == stage}
        usual = median(apart.values())
        if len(apart) >= ENOUGH_PEERS and usual and (far := [p for p, own in apart.items() if own > ASTRAY * usual]):
            yield f"The weights of {_names(far)} are far from those of the other replicas."


def _remarks(alive: Sequence[Member], num_estimated: int | None) -> Iterator[str]:
    unreached = sum(
        member.record.reachability not in (*OPEN, Reach.PUNCHED) and member.record.metrics.swaps >= UNREACHED_SWAPS
        for member in alive
    )
    if unreached and len(alive) > 1:
        peers = counted(unreached, "peer")
        yield f"{peers} may be behind a firewall: no incoming connection has succeeded yet."
    if num_estimated is not None:
        read = f"the records of {len(alive)} have been read so far"
        yield f"The swarm has about {counted(num_estimated, 'peer')}; {read}."
    versions = Counter(member.record.software for member in alive)
    if len(versions) > 1:
        told = ", ".join(f"{version} ({number})" for version, number in sorted(versions.items()))
        yield f"Peers are running {len(versions)} versions: {told}."


def _names(peers: Sequence[str]) -> str:
    return ", ".join(map(named, peers[:NAMED])) + (" and others" if len(peers) > NAMED else "")
