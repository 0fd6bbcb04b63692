"""Provide the network services that the outer step uses besides swaps.

They let a peer enter and catch up, serve its state, and publish sketches.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.status import PublishedStatus
from noloco_p2p.transfer.donor import SavedState

if TYPE_CHECKING:
    from torch import Tensor

START_TIMEOUT_S = 120.0  # including the import of hivemind from a slow disk
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
        total_steps: int,
        network: Callable[[], Network],
        call: Callable[[Coroutine[Any, Any, Any], float], Any],
        announce: Callable[[str], None],
    ) -> None:
        self._status = status
        self._total_steps = total_steps
        self._network = network
        self._call = call
        self._announce = announce

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Announce which model this peer trains. If `target` is given, fetch the state of a live peer into that file.

        Raises Left if this peer is asked to leave during the fetch, and ModelError if live peers train another model.
        The ModelError names the first tensor that differs.
        """
        network = self._network()
        self._status.layout = network.driver.layout = network.states.layout = layout
        manifest = None
        if target is not None:
            manifest = network.entering.enter(layout, target=target)
        self._call(network.directory.check_clock(CHECK_CLOCK_S), START_TIMEOUT_S)
        self._call(network.reachability.wait_for_dial_back(), START_TIMEOUT_S)
        self._status.enter()
        self._announce("training")
        return manifest

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead, and return its manifest.

        Calling this is cheap. The result is None if the swarm is not far ahead. It is also None if no peer serves a
        newer state. A later call tries again.
        """
        assert self._status.layout, "call `enter` first"
        return self._network().entering.catch_up(
            self._status.layout, progress=progress, round_progress=inner_steps / self._total_steps, target=target
        )

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on. If the peer is closed, this does nothing."""
        if network := self._status.network:
            network.states.saved = saved

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """After an outer step, sketch the weights in the background if `progress` has reached a shared mark.

        If `at_rest` is true, training is over, and the final weights are sketched.
        """
        self._status.sketcher.sketch(slow_weights, progress=progress, at_rest=at_rest)

    def weights_change(self) -> None:
        """Discard an unfinished sketch of the slow weights. Call this before they change."""
        self._status.sketcher.weights_change()
