"""Notices about problems that an operator of a swarm should look at first. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from noloco_p2p.swarm.dial_back import OPEN, Reach
from noloco_p2p.telemetry.console import counted, duration, numbered_stages, percent
from noloco_p2p.telemetry.metrics import FAILED
from noloco_p2p.telemetry.totals import Row, is_living, is_training

WINDOW_S = 600.0  # the time over which swaps are counted
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


def notices(
    rows: Sequence[Row],
    *,
    stages: Sequence[Row],
    lately: Mapping[str, int],
    lately_s: float = WINDOW_S,
    directory_age_s: float,
    num_estimated: int | None = None,
    own_fault: str = "",
) -> list[dict[str, str]]:
    """Return the notices, each with its level ("bad", "warn" or "info") and its text, with the worst first.

    `lately` has the number of swaps in the last `lately_s`. `num_estimated` is the estimated number of peers
    of a swarm that has not been read completely. `own_fault` is why the peer on this machine cannot announce itself.
    """
    living = [row for row in rows if is_living(row)]
    told: dict[str, Iterable[str]] = {
        "bad": (*([f"On this machine, {own_fault}."] if own_fault else []), *_broken(stages, living, directory_age_s)),
        "warn": (*_lost(rows), *_swapping([row for row in living if is_training(row)], lately, lately_s)),
        "info": _remarks(living, num_estimated),
    }
    return [{"level": level, "text": text} for level, texts in told.items() for text in texts]


def _broken(stages: Sequence[Row], living: Sequence[Row], directory_age_s: float) -> Iterator[str]:
    if directory_age_s > STALE_AFTER_S:
        yield f"The directory has not answered for {duration(directory_age_s)}, so the values shown are out of date."
    if not living:
        yield "No peer is alive."
    empty = sorted(stage["stage"] for stage in stages if not stage["peers"])
    if empty and any(map(is_training, living)):
        yield f"No peer holds {numbered_stages(empty)}, so no microbatch can be completed."


def _lost(rows: Sequence[Row]) -> Iterator[str]:
    lost = sorted((row["age_s"], row["shown"]) for row in rows if row["health"] == "gone" and row["age_s"] <= WINDOW_S)
    if lost:
        yield (
            f"Lost {counted(len(lost), 'peer')} that left without notice: {_names([peer for _, peer in lost])}. "
            f"The newest record is {duration(lost[0][0])} old."
        )
    silent = sum(row["health"] == "silent" for row in rows)
    if silent:
        yield f"{counted(silent, 'peer')} missed two announcements and may be gone."


def _swapping(training: Sequence[Row], lately: Mapping[str, int], lately_s: float) -> Iterator[str]:
    """Yield notices about peers that do not swap, about swaps that fail, and about weights that are far apart."""
    num_mates = Counter(row["stage"] for row in training)
    quiet = [row["shown"] for row in training if row["quiet_s"] > WINDOW_S and num_mates[row["stage"]] > 1]
    if quiet:
        yield (
            f"{counted(len(quiet), 'peer')} did not swap for {duration(WINDOW_S)}: {_names(quiet)}. "
            "`noloco doctor TICKET` on such a machine may find the reason."
        )
    num_failed = sum(lately[name] for name in FAILED)
    attempts = lately["swaps"] + num_failed
    if attempts >= ENOUGH_SWAPS and num_failed >= FAILED_SHARE * attempts:
        cause = CAUSES[max(FAILED, key=lambda name: lately[name])]
        share, window = percent(num_failed / attempts), duration(lately_s)
        yield f"{share} of the swaps in the last {window} failed, mostly because {cause}."
    for stage in num_mates:
        apart = {row["shown"]: row["apart"] or 0.0 for row in training if row["stage"] == stage}
        usual = median(apart.values())
        if len(apart) >= ENOUGH_PEERS and usual and (far := [p for p, own in apart.items() if own > ASTRAY * usual]):
            yield f"The weights of {_names(far)} are far from those of the other replicas."


def _remarks(living: Sequence[Row], num_estimated: int | None) -> Iterator[str]:
    if living and all(row["state"] == "paused" for row in living):
        yield "All peers are paused, so nobody trains."
    unreached = sum(
        row["reachability"] not in (*OPEN, Reach.PUNCHED) and row["swaps"] >= UNREACHED_SWAPS for row in living
    )
    if unreached and len(living) > 1:
        peers = counted(unreached, "peer")
        yield f"{peers} may be behind a firewall: no incoming connection has succeeded yet."
    if num_estimated is not None:
        read = f"the records of {len(living)} have been read so far"
        yield f"The swarm has about {counted(num_estimated, 'peer')}; {read}."
    versions = Counter(row["software"] for row in living)
    if len(versions) > 1:
        told = ", ".join(f"{version} ({number})" for version, number in sorted(versions.items()))
        yield f"Peers are running {len(versions)} versions: {told}."


def _names(peers: Sequence[str]) -> str:
    return ", ".join(peers[:NAMED]) + (" and others" if len(peers) > NAMED else "")
