"""Sign and check the tickets of microbatches. The head that launches a microbatch signs its ticket, and each replica
checks it.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.frames import MicrobatchTicket
from noloco_p2p.identity import Identity, short_id, verify

TICKET = b"noloco_p2p ticket 1\0"


class Tickets:
    """A checker of one run's tickets, which also signs this peer's own tickets if the peer is a head.

    `max_tokens` is the number of tokens that the loss of a microbatch covers, according to the spec. A ticket with more
    tokens would give the gradient of its microbatch too much weight.
    """

    def __init__(self, identity: Identity, *, spec_digest: str, max_tokens: int) -> None:
        self._identity = identity
        self._spec_digest = bytes.fromhex(spec_digest)
        self._max_tokens = max_tokens

    def signed(self, ticket: MicrobatchTicket) -> MicrobatchTicket:
        """Return the ticket with a signature if it is this peer's own. Other tickets and signed tickets are returned
        unchanged.
        """
        if ticket.signature or ticket.id.head != self._identity.peer_id:
            return ticket
        return replace(ticket, signature=self._identity.sign(self._words(ticket)))

    def check(self, ticket: MicrobatchTicket) -> None:
        """Raise CorruptPayload if the head has not signed the ticket, or if no head of this run would sign it."""
        if ticket.num_tokens > self._max_tokens or not 0 <= ticket.mark <= 1:
            raise CorruptPayload(
                f"a ticket has impossible values: {ticket.num_tokens} tokens at progress {ticket.mark:g}"
            )
        if not verify(ticket.id.head, self._words(ticket), ticket.signature):
            raise CorruptPayload(f"a ticket is not signed by the head that it names, ..{short_id(ticket.id.head)}")

    def _words(self, ticket: MicrobatchTicket) -> bytes:
        """Return the bytes to sign. They are unambiguous because all parts but the last have a fixed length."""
        number, head = ticket.id.number, ticket.id.head
        numbers = struct.pack(">QdQ?", number, ticket.mark, ticket.num_tokens, ticket.is_training)
        return TICKET + self._spec_digest + numbers + head.encode()
