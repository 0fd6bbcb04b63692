"""What the outer step of a running peer asks of the network beside swaps: entering, catching up, serving, sketches."""

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

START_TIMEOUT_S = 120.0  # importing hivemind on a slow disk included
CHECK_CLOCK_S = 6.0  # for those that this peer enters through to be tried once


class Membership:
    """`NoLoCo` uses it on the main thread; see the protocol of the same name in `outer/noloco.py`.

    network: the running network; raises SettingsError once the peer is closed. call: runs a coroutine on its thread.
    announce: changes the state that others see.
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
        """Tell the network which model trains here; with `target`, fetch the state of a live peer into that file.

        Raises Left when this peer is asked to leave meanwhile, and ModelError, with the first tensor that differs, when
        live peers train another model.
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
        """Fetch the state of a live peer into `target` when most of the swarm is far ahead; None when it is not.

        Costs nothing to ask. None, too, when nobody gives a newer state: it is then tried again after a while.
        """
        assert self._status.layout, "`enter` comes first"
        return self._network().entering.catch_up(
            self._status.layout, progress=progress, round_progress=inner_steps / self._total_steps, target=target
        )

    def serve_state(self, saved: SavedState) -> None:
        """From now on newcomers get this state. Of a peer that is closed nobody gets it."""
        if network := self._status.network:
            network.states.saved = saved

    def sketch(self, slow_weights: Tensor, *, progress: float, at_rest: bool) -> None:
        """After an outer step: sketch these weights in the background, for the record of this peer, where `progress`
        reached a mark that all peers share; `at_rest`: training is over, and the newest weights count."""
        self._status.sketcher.sketch(slow_weights, progress=progress, at_rest=at_rest)

    def weights_change(self) -> None:
        """Call before the slow weights change; a sketch of them that is not done is thrown away."""
        self._status.sketcher.weights_change()
