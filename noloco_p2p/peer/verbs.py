"""Answer the requests of `noloco status`, `leave`, `pause` and `resume` in a running peer."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from noloco_p2p.control import Handler
from noloco_p2p.peer.pausing import Pausing


class Controlled(Protocol):
    """The part of a peer that the verbs use."""

    leave_requested: threading.Event
    pausing: Pausing

    @property
    def state(self) -> str: ...

    @property
    def has_entered(self) -> bool: ...

    def status(self) -> dict[str, Any]: ...

    def request_leave(self) -> None: ...


def verbs(peer: Controlled) -> dict[str, Handler]:
    """Map each verb of the control socket to a function that acts on `peer` and returns the answer."""

    def leave() -> dict[str, Any]:
        peer.request_leave()
        return {"leaving": True, "pid": os.getpid()}

    def pause() -> dict[str, Any]:
        refusal = why_no_pause(peer)
        was_asked = peer.pausing.is_asked
        if not refusal:
            peer.pausing.ask()
        return {"refusal": refusal, "was_asked": was_asked, "state": peer.state, "pid": os.getpid()}

    def resume() -> dict[str, Any]:
        was_asked = peer.pausing.is_asked
        peer.pausing.resume()
        return {
            "was_asked": was_asked,
            "state": peer.state,
            "stays_because": "" if peer.state == "done" else peer.pausing.sentence,
            "pid": os.getpid(),
        }

    return {"status": peer.status, "leave": leave, "pause": pause, "resume": resume}


def why_no_pause(peer: Controlled) -> str:
    """Return why `peer` cannot be paused now, or "" if it can."""
    if peer.leave_requested.is_set():
        return "the peer is leaving"
    if not peer.has_entered:
        return "the peer has not started training yet; try again later, or stop it with `noloco leave`"
    return "the run is done, so the peer is no longer training" if peer.state == "done" else ""
