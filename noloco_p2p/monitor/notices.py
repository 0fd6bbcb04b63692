"""Notices about problems that an operator of a swarm should look at first. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_p2p.gossip.outcome import LonelyCause
from noloco_p2p.monitor.roster import WINDOW_S, Health, Roster
from noloco_p2p.monitor.spread import Spread
from noloco_p2p.monitor.stages import Stage
from noloco_p2p.swarm.dial_back import OPEN, Reach
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.console import counted, duration, named, numbered_stages

STALE_AFTER_S = 20.0  # the directory is read every 5 s, and counts as stale after this long without a successful read
SOLO_SHARE = 0.25
ENOUGH_ROUNDS = 10
ASTRAY = 4.0  # a peer is reported if its distance from the mean of all peers is this multiple of the median distance
UNREACHED_ROUNDS = 10

CAUSES = {
    LonelyCause.NOBODY: "no other peer was training",
    LonelyCause.REFUSED: "partners refused",
    LonelyCause.NO_ANSWER: "partners did not answer",
    LonelyCause.FAILED: "swaps failed",
    LonelyCause.SLOW: "swaps were not ready in time",
    LonelyCause.REFUSED_STATE: "the data from partners was rejected",
}


@dataclass(frozen=True, slots=True)
class Notice:
    level: Literal["bad", "warn", "info"]
    text: str


def notices(
    roster: Roster,
    *,
    spreads: Sequence[Spread],
    stages: Sequence[Stage],
    directory_age_s: float,
    now_s: float,
    num_estimated: int | None = None,
) -> list[Notice]:
    """Return the notices, with the worst first. There are none if all is well.

    `spreads` has one spread per stage. `num_estimated` is the estimated number of peers of a swarm that has not been
    read completely.
    """
    found: list[Notice] = []
    health = {peer: member.health(now_s) for peer, member in roster.members.items()}
    alive = [roster.members[peer].record for peer, state in health.items() if state in (Health.ALIVE, Health.SILENT)]
    if directory_age_s > STALE_AFTER_S:
        found.append(
            Notice(
                "bad",
                f"The directory has not answered for {duration(directory_age_s)}, so the values shown are out of date.",
            )
        )
    if not alive:
        found.append(Notice("bad", "No peer is alive."))
    found += _empty(stages, alive)
    found += _lost(roster, health, now_s)
    silent = sum(state is Health.SILENT for state in health.values())
    if silent:
        found.append(Notice("warn", f"{counted(silent, 'peer')} missed two announcements and may be gone."))
    found += _solo(roster, "no other peer held the same stage" if stages else CAUSES[LonelyCause.NOBODY])
    far = [peer for spread in spreads if spread.num_peers >= 4 for peer in _astray(spread)]
    found += [
        Notice("warn", f"The weights of {named(peer)} are far from those of the other replicas.") for peer in far[:3]
    ]
    unreached = [
        r
        for r in alive
        if r.reachability not in (*OPEN, Reach.PUNCHED) and r.metrics.swaps + r.metrics.alone >= UNREACHED_ROUNDS
    ]
    if unreached and len(alive) > 1:
        found.append(
            Notice(
                "info",
                f"{counted(len(unreached), 'peer')} may be behind a firewall: "
                "no incoming connection has succeeded yet.",
            )
        )
    if num_estimated is not None:
        read = f"the records of {len(alive)} have been read so far"
        found.append(Notice("info", f"The swarm has about {counted(num_estimated, 'peer')}; {read}."))
    versions = Counter(record.software for record in alive)
    if len(versions) > 1:
        told = ", ".join(f"{version} ({number})" for version, number in sorted(versions.items()))
        found.append(Notice("info", f"Peers are running {len(versions)} versions: {told}."))
    return found


def _lost(roster: Roster, health: dict[str, Health], now_s: float) -> list[Notice]:
    ages = {peer: roster.members[peer].age_s(now_s) for peer, state in health.items() if state is Health.GONE}
    lately = sorted((age_s, peer) for peer, age_s in ages.items() if age_s <= WINDOW_S)
    if not lately:
        return []
    names = ", ".join(named(peer) for _, peer in lately[:3]) + (" and others" if len(lately) > 3 else "")
    said = (
        f"Lost {counted(len(lately), 'peer')} that left without notice: {names}. "
        f"The newest record is {duration(lately[0][0])} old."
    )
    return [Notice("warn", said)]


def _solo(roster: Roster, nobody: str) -> list[Notice]:
    """Return notices about solo rounds. `nobody` is the text for `LonelyCause.NOBODY`."""
    lately = roster.lately()
    rounds = lately["swaps"] + lately["halves"] + lately["alone"]
    if rounds < ENOUGH_ROUNDS or lately["alone"] < SOLO_SHARE * rounds:
        return []
    cause = max(LonelyCause, key=lambda cause: lately[cause])
    words = nobody if cause is LonelyCause.NOBODY else CAUSES[cause]
    why = f", mostly because {words}" if lately[cause] else ""
    share = f"{100 * lately['alone'] / rounds:.0f} %"
    return [Notice("warn", f"{share} of the rounds in the last {duration(WINDOW_S)} were solo{why}.")]


def _empty(stages: Sequence[Stage], alive: Sequence[PeerRecord]) -> list[Notice]:
    empty = sorted(row["stage"] for row in stages if not row["peers"])
    if not empty or all(record.state != "training" for record in alive):
        return []
    return [Notice("bad", f"No peer holds {numbered_stages(empty)}, so no microbatch can be completed.")]


def _astray(spread: Spread) -> list[str]:
    usual = _median(list(spread.of_each.values()))
    return [peer for peer, own in spread.of_each.items() if own > ASTRAY * usual]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
