"""Provide the network services that the outer step uses besides swaps.

They let a peer enter, swap and catch up, and serve its state.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.status import PublishedStatus
from noloco_p2p.transfer.donor import SavedState

START_TIMEOUT_S = 120.0  # including the import of hivemind from a slow disk
HOLD_S = 10.0  # in which swaps may end before a pause
CHECK_CLOCK_S = 6.0  # for one attempt with each of the peers that this one enters through


class Membership:
    """The network services that `NoLoCo` uses on the main thread. `outer/noloco.py` has the protocol of the same name.

    `network` returns the running network, and raises SettingsError once the peer is closed. `call` runs a coroutine on
    the network's thread. `announce` changes the state that others see.
    """

    def __init__(
        self,
        status: PublishedStatus,
        *,
        network: Callable[[], Network],
        call: Callable[[Coroutine[Any, Any, Any], float], Any],
        announce: Callable[[str], None],
    ) -> None:
        self._status = status
        self._network = network
        self._call = call
        self._announce = announce

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Announce which model this peer trains. If `target` is given, fetch the state of a live peer into that file.

        Raises Left if this peer is asked to leave during the fetch, and ModelError if live peers train another model.
        The ModelError names the first tensor that differs.
        """
        network = self._network()
        self._status.layout = network.states.layout = layout
        manifest = None
        if target is not None:
            manifest = network.entering.enter(layout, target=target)
        self._call(network.directory.check_clock(CHECK_CLOCK_S), START_TIMEOUT_S)
        self._call(network.reachability.wait_for_dial_back(), START_TIMEOUT_S)
        self._status.enter()
        self._announce("training")
        return manifest

    def begin_swaps(self, num_elements: int) -> Exchange:
        """Begin to swap a vector of this size, and end the swaps of the vector before."""
        return self._call(self._network().service.begin(num_elements), START_TIMEOUT_S)

    def hold_swaps(self) -> None:
        """Begin no swap until `announce("training")`, and let the running swaps end. A closed peer has none."""
        if network := self._status.network:
            self._call(network.service.hold(timeout_s=HOLD_S), START_TIMEOUT_S)

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead, and return its manifest.

        Calling this is cheap. The result is None if the swarm is not far ahead. It is also None if no peer serves a
        newer state. A later call tries again.
        """
        if not (network := self._status.network):
            return None
        assert self._status.layout, "call `enter` first"
        return network.entering.catch_up(self._status.layout, progress=progress, target=target)

    def rescue(self, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, and return its manifest, or None if no peer serves a state."""
        assert self._status.layout, "call `enter` first"
        return self._network().entering.rescue(self._status.layout, target=target)

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on. If the peer is closed, this does nothing."""
        if network := self._status.network:
            network.states.saved = saved
