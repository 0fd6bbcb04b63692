"""How far apart two peers are in the run, and what follows from it. Pure: it is given places and lengths of rounds.

Progress is compared, not the counters of rounds: a peer whose rounds are longer, or who stood still for a while, has a
smaller counter and may be as far as everybody.

    up to FRESH_ROUNDS     a partner counts fully
    up to STALE_ROUNDS     its vectors are weighted down, by the same factor on both sides: FRESH_ROUNDS / age
    beyond                 the offer is refused; a peer that most others are so far ahead of fetches the state of one
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from noloco_p2p.gossip.frames import Boundary, Refuse, RefuseCode
from noloco_p2p.gossip.pairing import too_far_s
from noloco_p2p.optim.mixing import agreed_inner_steps

FRESH_ROUNDS = 4.0  # peers of one run differ by so much when one is four times faster, and rounds have a fixed length
STALE_ROUNDS = 32.0
STALE_RETRY_S = 30.0  # long enough to have caught up with a small model


def told_lengths(mine: Boundary, theirs: Boundary) -> tuple[int, int]:
    """Inner steps of both rounds; who tells none is taken to have the other's, so that to be silent hides no age."""
    return mine.inner_steps or theirs.inner_steps, theirs.inner_steps or mine.inner_steps


def rounds_apart(mine: Boundary, theirs: Boundary, *, total_steps: int) -> float:
    """Age of the older one, in rounds of the length that both agree on: the same number for both. 0 = none is told."""
    agreed = agreed_inner_steps(*told_lengths(mine, theirs))
    return abs(mine.progress - theirs.progress) * total_steps / agreed if agreed else 0.0


def age_weight(age_rounds: float) -> float:
    """What the half-differences of a swap are multiplied by, on both sides; 1 for most swaps."""
    return min(1.0, FRESH_ROUNDS / age_rounds) if age_rounds else 1.0


def too_long(told: Boundary, longest_round: int) -> str:
    """What is wrong with a round that is longer than the run allows, or ""; by its length the partner would weigh in
    and be believed to be near."""
    if told.inner_steps <= longest_round:
        return ""
    return f"a round of {told.inner_steps} inner steps, and this run has none of more than {longest_round}"


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
    """The answer to an offer whose round does not fit the own one; None when it fits."""
    far_s = too_far_s(mine, theirs)
    if far_s > 0:
        sentence = f"our boundaries are {far_s:.2f} s further apart than 0.6 of a round"
        return Refuse(RefuseCode.TOO_FAR, sentence, far_s)
    if wrong := too_long(theirs, longest_round):
        return Refuse(RefuseCode.MALFORMED, wrong)
    return refuse_stale(mine, theirs, total_steps=total_steps)


def is_left_behind(progress: float, others: Sequence[float], *, round_progress: float) -> bool:
    """Do most other peers stand too far ahead for a swap? One that says it is far ahead moves nobody."""
    return bool(others) and median(others) - progress > STALE_ROUNDS * round_progress
