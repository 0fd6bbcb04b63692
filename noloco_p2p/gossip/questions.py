"""This module requests single items from other peers, such as a run spec, a manifest or a layout."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TypeVar

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut
from noloco_p2p.gossip.frames import FetchItem, FetchWant, LayoutJson, WantLayout
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate, Transport

log = logging.getLogger(__name__)

T = TypeVar("T", bound=FetchItem)

MESSAGE_TIMEOUT_S = 15.0  # for one chunk, or one part of a manifest
ANSWER_S = 60.0  # for a whole spec, layout or manifest; the manifest of a 64 GiB state takes 2 MiB


async def ask(transport: Transport, peer: Candidate, want: FetchWant, kind: type[T]) -> T:
    """Send the request `want` to `peer` and return the response.

    Raises PeerError if no response of type `kind` arrives.
    """
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aclosing(transport.fetch(peer, want, timeout_s=MESSAGE_TIMEOUT_S)) as items,
        ):
            item = await anext(items, None)
    except TimeoutError:
        raise TimedOut(f"it did not answer within {ANSWER_S:.0f} s", peer=peer.peer_id) from None
    if not isinstance(item, kind):
        raise CorruptPayload(f"it did not send a {kind.__name__}", peer=peer.peer_id)
    return item


async def find_difference(transport: Transport, peer: Candidate, ours: ModelLayout) -> str:
    """Describe the first tensor that differs in the model of `peer`.

    The result is empty if no tensor differs or the peer does not answer.
    """
    try:
        layout = await ask(transport, peer, WantLayout(), LayoutJson)
        return ours.first_difference(ModelLayout.from_json(layout.data))
    except (PeerError, ValueError) as error:
        log.debug("could not get the model layout of %s: %s", peer.address, error)
        return ""
