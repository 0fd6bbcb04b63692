"""Define the parts of a peer that live on its network thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from noloco_p2p.control import ControlServer
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.peer.entering import Entering
from noloco_p2p.peer.live_peers import LivePeers
from noloco_p2p.peer.reachability import Reachability
from noloco_p2p.peer.stage_flow import StageFlow
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.transfer.donor import StateServer


@dataclass(slots=True)
class Network:
    """The parts of a peer that live on its network thread, after all of them have started.

    `watching` holds the tasks that watch the machine. `stage_flow` is set while this peer holds a stage.
    """

    directory: SwarmDirectory
    transport: GrpcTransport
    states: StateServer
    service: PeerService
    server: GrpcServer
    control: ControlServer
    reachability: Reachability
    live_peers: LivePeers
    entering: Entering
    watching: list[asyncio.Task[None]]
    stage_flow: StageFlow | None = None
