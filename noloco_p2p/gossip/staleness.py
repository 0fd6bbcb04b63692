"""These rules decide how to treat partners at different positions in the run.

The rules compare progress instead of round counters. A peer with longer rounds, or one that was paused for a while, has
a smaller counter, but it may have progressed as far as the others.

    age up to FRESH_ROUNDS     a partner's vectors have full weight
    age up to STALE_ROUNDS     both partners give the vectors less weight, by a factor of FRESH_ROUNDS / age
    beyond STALE_ROUNDS        the offer is refused; a peer this far behind most others fetches the state of a live peer
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from noloco_p2p.gossip.frames import Boundary, Refuse, RefuseCode
from noloco_p2p.gossip.pairing import too_far_s
from noloco_p2p.optim.mixing import agreed_inner_steps

FRESH_ROUNDS = 4.0  # the age that occurs if one peer is four times as fast as the other and rounds have a fixed length
STALE_ROUNDS = 32.0
STALE_RETRY_S = 30.0  # long enough for a peer with a small model to catch up


def told_lengths(mine: Boundary, theirs: Boundary) -> tuple[int, int]:
    """Return the number of inner steps in each peer's round. If only one peer announces a number, it is used for both.

    A peer therefore cannot hide its age by announcing nothing.
    """
    return mine.inner_steps or theirs.inner_steps, theirs.inner_steps or mine.inner_steps


def rounds_apart(mine: Boundary, theirs: Boundary, *, total_steps: int) -> float:
    """Return how many of the shorter rounds the peers are apart, or 0 if neither has announced a length."""
    agreed = agreed_inner_steps(*told_lengths(mine, theirs))
    return abs(mine.progress - theirs.progress) * total_steps / agreed if agreed else 0.0


def age_weight(age_rounds: float) -> float:
    """Return the factor by which both partners scale their half-differences. It is 1 for most swaps."""
    return min(1.0, FRESH_ROUNDS / age_rounds) if age_rounds else 1.0


def too_long(told: Boundary, longest_round: int) -> str:
    """Return a description of the error if a round is longer than the run allows, and "" otherwise.

    By announcing such a length, a partner would increase its own weight.
    """
    if told.inner_steps <= longest_round:
        return ""
    return f"a round of {told.inner_steps} inner steps exceeds the run's maximum of {longest_round}"


def refuse_stale(mine: Boundary, theirs: Boundary, *, total_steps: int) -> Refuse | None:
    """Return a refusal if the other peer is too far behind or ahead, and None otherwise."""
    age = rounds_apart(mine, theirs, total_steps=total_steps)
    if age <= STALE_ROUNDS:
        return None
    here, there = (f"round {each.round} ({100 * each.progress:.2f} % of the run)" for each in (mine, theirs))
    if theirs.progress < mine.progress:
        advice = "you are too far behind and must fetch the state of a live peer"
    else:
        advice = "I am too far behind and must catch up"
    return Refuse(RefuseCode.STALE, f"I am in {here} and you are in {there}; {advice}", STALE_RETRY_S)


def refuse_distant(mine: Boundary, theirs: Boundary, *, total_steps: int, longest_round: int) -> Refuse | None:
    """Return a refusal if the other peer's boundary, round length or progress rules out a swap, or None."""
    far_s = too_far_s(mine, theirs)
    if far_s > 0:
        sentence = f"our boundaries are {far_s:.2f} s further apart than the limit of 0.6 rounds"
        return Refuse(RefuseCode.TOO_FAR, sentence, far_s)
    if wrong := too_long(theirs, longest_round):
        return Refuse(RefuseCode.MALFORMED, wrong)
    return refuse_stale(mine, theirs, total_steps=total_steps)


def is_left_behind(progress: float, others: Sequence[float], *, round_progress: float) -> bool:
    """Return whether most other peers are too far ahead for a swap. The median decides, so a minority has no effect."""
    return bool(others) and median(others) - progress > STALE_ROUNDS * round_progress
