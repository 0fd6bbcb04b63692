"""The state machine of one round of one peer. Pure: no clock, no network; the exchange drives it.

    SEEKING -> OFFERING -> SWAPPING -> EARLY -> DONE
       ^          |           |          |
       +--refused-+--failed---+          +--late part failed--> HALF
    any -> CLOSED when the main thread collects the outcome

A round has at most one partner whose early part is committed. Nothing is reserved before Accept.
"""

from __future__ import annotations

from enum import Enum, auto

from noloco_p2p.gossip.frames import Boundary, Offer, Refuse, RefuseCode
from noloco_p2p.gossip.pairing import too_far_s


class Phase(Enum):
    SEEKING = auto()  # no partner, no offer out
    OFFERING = auto()  # an offer of mine is out
    SWAPPING = auto()  # a partner is found, the early part is on its way
    EARLY = auto()  # the early part is committed
    DONE = auto()  # both parts are committed
    HALF = auto()  # the early part is committed, the late part will never come
    CLOSED = auto()


class Round:
    """`partner` is the peer of the swap, `target` the peer that an offer of mine is out to."""

    def __init__(self, index: int, *, own_id: str, progress: float = 0.0) -> None:
        self.index = index
        self.progress = progress
        self.phase = Phase.SEEKING
        self.partner = ""
        self.target = ""
        self._own_id = own_id

    @property
    def wants_partner(self) -> bool:
        return self.phase is Phase.SEEKING

    @property
    def early_committed(self) -> bool:
        return self.phase in (Phase.EARLY, Phase.DONE, Phase.HALF)

    def offer_to(self, peer_id: str) -> None:
        assert self.phase is Phase.SEEKING, self.phase
        self.phase, self.target = Phase.OFFERING, peer_id

    def is_offering_to(self, peer_id: str) -> bool:
        """False once the offer was overtaken: the target's own offer was accepted, or the round was closed."""
        return self.phase is Phase.OFFERING and self.target == peer_id

    def offer_failed(self) -> None:
        assert self.phase is Phase.OFFERING, self.phase
        self.phase, self.target = Phase.SEEKING, ""

    def bind(self, peer_id: str) -> None:
        """The swap begins: my offer was accepted, or I accept one (`answer` said so)."""
        assert self.phase in (Phase.SEEKING, Phase.OFFERING), self.phase
        self.phase, self.partner, self.target = Phase.SWAPPING, peer_id, ""

    def commit_early(self) -> None:
        assert self.phase is Phase.SWAPPING, self.phase
        self.phase = Phase.EARLY

    def commit_late(self) -> None:
        assert self.phase is Phase.EARLY, self.phase
        self.phase = Phase.DONE

    def swap_failed(self) -> None:
        """Before the early part is committed another partner may be found; after it, only the late part is lost."""
        if self.phase is Phase.SWAPPING:
            self.phase, self.partner = Phase.SEEKING, ""
        elif self.phase is Phase.EARLY:
            self.phase = Phase.HALF

    def close(self) -> None:
        self.phase = Phase.CLOSED

    def holds(self, offer: Offer) -> bool:
        """Whether the answer to this offer waits for that to an own one, which would else be BUSY.

        Only offers of higher ids wait, so that no ring of peers waits for itself.
        """
        caller = offer.hello.peer_id
        return self.phase is Phase.OFFERING and caller not in (self.target, self._own_id) and caller > self._own_id

    def answer(self, offer: Offer, *, mine: Boundary) -> Refuse | None:
        """None = accept. Decides and changes nothing; the caller binds in the same breath."""
        caller = offer.hello.peer_id
        match self.phase:
            case Phase.CLOSED:
                return Refuse(RefuseCode.BETWEEN_ROUNDS, "my round is not open yet", 0.05)
            case Phase.OFFERING if self.target != caller:
                return Refuse(RefuseCode.BUSY, "an offer of mine is out", 0.1)
            case Phase.OFFERING if self._own_id > caller:
                return Refuse(RefuseCode.CROSSED, "our offers crossed, and mine stands", 0.1)
            case Phase.SEEKING | Phase.OFFERING:
                pass
            case _:
                wait_s = mine.seconds_to_boundary if mine.seconds_to_boundary is not None else 1.0
                return Refuse(RefuseCode.TAKEN, f"I have a partner for round {self.index}", wait_s)
        far_s = too_far_s(mine, offer.boundary)
        if far_s > 0:
            sentence = f"our boundaries are {far_s:.2f} s further apart than 0.6 of a round"
            return Refuse(RefuseCode.TOO_FAR, sentence, far_s)
        return None
