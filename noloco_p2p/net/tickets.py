"""Tickets of microbatches: signed by the head that launches them, and checked by each replica on the path."""

from __future__ import annotations

import struct
from dataclasses import replace

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.frames import MicrobatchTicket
from noloco_p2p.identity import Identity, short_id, verify

TICKET = b"noloco_p2p ticket 1\0"


class Tickets:
    """The tickets of one run, and of this peer if it is a head.

    max_tokens: in the loss of a microbatch, from the spec. A ticket with more would count for more than its gradient.
    """

    def __init__(self, identity: Identity, *, spec_digest: str, max_tokens: int) -> None:
        self._identity = identity
        self._spec_digest = bytes.fromhex(spec_digest)
        self._max_tokens = max_tokens

    def signed(self, ticket: MicrobatchTicket) -> MicrobatchTicket:
        """Return a ticket of this peer with its signature. Those of others, and signed ones, are unchanged."""
        if ticket.signature or ticket.id.head != self._identity.peer_id:
            return ticket
        return replace(ticket, signature=self._identity.sign(self._words(ticket)))

    def check(self, ticket: MicrobatchTicket) -> None:
        """Raise CorruptPayload for a ticket that its head has not signed, or that no head of this run would sign."""
        if ticket.num_tokens > self._max_tokens or not 0 <= ticket.mark <= 1:
            raise CorruptPayload(
                f"a ticket has {ticket.num_tokens} tokens at progress {ticket.mark:g}, which no microbatch has"
            )
        if not verify(ticket.id.head, self._words(ticket), ticket.signature):
            raise CorruptPayload(f"a ticket is not signed by its head, ..{short_id(ticket.id.head)}")

    def _words(self, ticket: MicrobatchTicket) -> bytes:
        """Join the signed parts. Each but the last has a fixed length, so the result is unambiguous."""
        number, head = ticket.id.number, ticket.id.head
        numbers = struct.pack(">QdQ?", number, ticket.mark, ticket.num_tokens, ticket.is_training)
        return TICKET + self._spec_digest + numbers + head.encode()
