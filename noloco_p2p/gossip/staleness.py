"""How far apart two peers are in the run, and what follows from it. Pure.

Progress is compared, not the round counters: a peer with longer rounds, or one that was paused for a while, has a
smaller counter and may be as far as the others.

    up to FRESH_ROUNDS     a partner counts fully
    up to STALE_ROUNDS     its vectors have less weight, by the same factor on both sides: FRESH_ROUNDS / age
    beyond                 the offer is refused; a peer that is this far behind most others fetches a live state
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from noloco_p2p.gossip.frames import Boundary, Refuse, RefuseCode
from noloco_p2p.gossip.pairing import too_far_s
from noloco_p2p.optim.mixing import agreed_inner_steps

FRESH_ROUNDS = 4.0  # the difference in one run when one peer is four times faster, and rounds have a fixed length
STALE_ROUNDS = 32.0
STALE_RETRY_S = 30.0  # long enough to have caught up with a small model


def told_lengths(mine: Boundary, theirs: Boundary) -> tuple[int, int]:
    """The inner steps of both rounds. A peer that announces none counts with the other's, so silence hides no age."""
    return mine.inner_steps or theirs.inner_steps, theirs.inner_steps or mine.inner_steps


def rounds_apart(mine: Boundary, theirs: Boundary, *, total_steps: int) -> float:
    """The age of the older one, in rounds of the agreed length: the same for both. 0 = no length is announced."""
    agreed = agreed_inner_steps(*told_lengths(mine, theirs))
    return abs(mine.progress - theirs.progress) * total_steps / agreed if agreed else 0.0


def age_weight(age_rounds: float) -> float:
    """The factor of the half-differences of a swap, on both sides; 1 for most swaps."""
    return min(1.0, FRESH_ROUNDS / age_rounds) if age_rounds else 1.0


def too_long(told: Boundary, longest_round: int) -> str:
    """Describe a round that is longer than the run allows, or return "".

    With such a length the partner would gain weight, and pass for being near.
    """
    if told.inner_steps <= longest_round:
        return ""
    return f"a round of {told.inner_steps} inner steps, but the longest of this run has {longest_round}"


def refuse_stale(mine: Boundary, theirs: Boundary, *, total_steps: int) -> Refuse | None:
    """The answer to an offer from a peer that is too far behind, or ahead; None when it is neither."""
    age = rounds_apart(mine, theirs, total_steps=total_steps)
    if age <= STALE_ROUNDS:
        return None
    here, there = (f"round {each.round} ({100 * each.progress:.2f} % of the run)" for each in (mine, theirs))
    if theirs.progress < mine.progress:
        advice = "you are too far behind: take the state of a live peer"
    else:
        advice = "I am too far behind, and have to catch up"
    return Refuse(RefuseCode.STALE, f"I am in {here}, you are in {there}; {advice}", STALE_RETRY_S)


def refuse_distant(mine: Boundary, theirs: Boundary, *, total_steps: int, longest_round: int) -> Refuse | None:
    """The answer to an offer whose round does not fit this peer's; None when it fits."""
    far_s = too_far_s(mine, theirs)
    if far_s > 0:
        sentence = f"our boundaries are {far_s:.2f} s further apart than 0.6 of a round"
        return Refuse(RefuseCode.TOO_FAR, sentence, far_s)
    if wrong := too_long(theirs, longest_round):
        return Refuse(RefuseCode.MALFORMED, wrong)
    return refuse_stale(mine, theirs, total_steps=total_steps)


def is_left_behind(progress: float, others: Sequence[float], *, round_progress: float) -> bool:
    """Whether most other peers are too far ahead for a swap. A single peer that claims to be ahead has no effect."""
    return bool(others) and median(others) - progress > STALE_ROUNDS * round_progress
