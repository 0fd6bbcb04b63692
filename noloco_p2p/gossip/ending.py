"""Ends a round: waits at the boundary for what may still come, and tells what the round got."""

from __future__ import annotations

import asyncio
import contextlib

from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.live_round import POLL_S, LiveRound
from noloco_p2p.gossip.outcome import Alone, Half, LonelyCause, Outcome, Received, Swapped
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.running import Running
from noloco_p2p.telemetry.console import named


async def wait_for_partner(live: LiveRound, wait_s: float) -> None:
    """Returns when the round of now has all it can get, when nothing more can come in time, after `wait_s`, and soon
    when this peer is asked to leave."""
    round_, until_s = live.round, live.clock() + wait_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while not _is_settled(live, round_) and _is_worth_waiting(live, round_, until_s):
                await live.wait_for_change(POLL_S)


def conclude(live: LiveRound, round_: Round) -> Outcome:
    """Closes the round, and tells what it got; a late part that still travels becomes the trailing one."""
    outcome = _outcome(live, round_)
    round_.close()
    live.opening = None
    return outcome


def _is_settled(live: LiveRound, round_: Round) -> bool:
    return round_.phase in (Phase.DONE, Phase.HALF, Phase.CLOSED) or live.is_leaving or live.is_hopeless()


def _is_worth_waiting(live: LiveRound, round_: Round, until_s: float) -> bool:
    """False when what is still to come cannot be here by then, by measured rates and the partner's own word."""
    if live.running is None or round_.phase not in (Phase.SWAPPING, Phase.EARLY):
        return True
    return live.running.expected_s(live.clock(), live.goodput) <= until_s


def _outcome(live: LiveRound, round_: Round) -> Outcome:
    running, phase, now_s = live.running, round_.phase, live.clock()
    if running is not None and round_.early_committed:
        received, live.running = _received(running, now_s), None
        if phase is Phase.DONE:
            return Swapped(received)
        if phase is Phase.EARLY:
            live.trailing = running
            return Half(received, "its outer gradient is not here yet")
        return Half(received, live.reason)
    if phase is Phase.SWAPPING and running is not None:
        partner, live.running = running.swap.partner, None
        running.broken_off(now_s, live.goodput)
        running.swap.abandon(Unreachable("the round ended before the early part was committed"))
        reason = f"the swap with {named(partner)} was not ready at the boundary"
        return Alone(reason, LonelyCause.SLOW, running.link(now_s))
    others = live.directory.live()
    if not any(other.state == "training" for other in others):
        resting = ", ".join(sorted({other.state for other in others}))
        return Alone(f"no other live peer{f' trains: {resting}' if resting else ''}", LonelyCause.NOBODY)
    return Alone(live.reason or "no answer to an offer yet", live.cause, live.failed_link)


def _received(running: Running, now_s: float) -> Received:
    return Received(
        partner=running.swap.partner,
        partner_round=running.partner.round,
        partner_progress=running.partner.progress,
        agreed=running.agreed,
        sections=running.swap.pairs(),
        link=running.link(now_s),
        bytes_sent=running.swap.bytes_sent,
        bytes_received=running.swap.bytes_received,
        seconds=now_s - running.began_s,
        lateness_s=running.lateness_s(now_s),
        transfer_s=running.transfer_s(now_s),
    )
