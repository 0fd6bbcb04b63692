"""Provide the network services that the outer step uses besides swaps.

They let a peer enter, swap and catch up, and serve its state.
"""

from __future__ import annotations

from pathlib import Path

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.network_thread import START_TIMEOUT_S
from noloco_p2p.transfer.donor import SavedState

HOLD_S = 10.0  # in which swaps may end before a pause


class Membership:
    """The network services that `NoLoCo` uses on the main thread: the `Membership` of `outer/noloco.py`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Announce which model this peer trains. If `target` is given, fetch the state of a live peer into that file.

        Raises Left if this peer is asked to leave during the fetch, and ModelError if live peers train another model.
        The ModelError names the first tensor that differs.
        """
        net = self._network
        net.states.layout = layout
        manifest = net.entering.enter(layout, target=target) if target else None
        net.thread.call(net.enter(), START_TIMEOUT_S)
        return manifest

    def begin_swaps(self, num_elements: int) -> Exchange:
        """Begin to swap a vector of this size, and end the swaps of the vector before."""
        return self._network.thread.call(self._network.service.begin(num_elements), START_TIMEOUT_S)

    def hold_swaps(self) -> None:
        """Begin no swap until the state is "training" again, and let the running swaps end. A closed peer has none."""
        if not self._network.thread.has_stopped:
            self._network.thread.call(self._network.service.hold(timeout_s=HOLD_S), START_TIMEOUT_S)

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead, and return its manifest.

        Calling this is cheap. The result is None if the swarm is not far ahead. It is also None if no peer serves a
        newer state. A later call tries again.
        """
        if self._network.thread.has_stopped:
            return None
        return self._network.entering.catch_up(self._layout, progress=progress, target=target)

    def rescue(self, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, and return its manifest, or None if no peer serves a state."""
        return self._network.entering.rescue(self._layout, target=target)

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on."""
        self._network.states.saved = saved

    @property
    def _layout(self) -> ModelLayout:
        assert self._network.states.layout, "call `enter` first"
        return self._network.states.layout
