"""Provide the network services that the trainer of a stage uses.

They report which peers hold which stage, and let this peer take part in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.connection import Connector
from noloco_p2p.peer.membership import Membership
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.network_thread import START_TIMEOUT_S
from noloco_p2p.peer.stage_flow import StageFlow, StagePlan


class Stages:
    """The network services that the trainer of a stage uses on the main thread."""

    def __init__(self, network: Network, membership: Membership) -> None:
        self._network = network
        self._membership = membership

    def look_around(self) -> None:
        """Wait until a live peer is known, if one is expected.

        Raises Left, or Unreachable if this peer has a ticket and no peer is live.
        """
        self._membership.look_around()

    def members(self) -> Sequence[Candidate]:
        """Return the other live peers of all stages, from their records."""
        return self._network.live_peers.everyone()

    def answering(self) -> Sequence[Candidate]:
        """Request the current status of some of the peers with the same stage, and return those that answer.

        Unlike the directory, the result contains no dead peers. Raises Left.
        """
        return self._membership.answering()

    def hold(self, stage: int) -> None:
        """Hold a stage, so that this peer swaps only with peers of that stage and fetches its state from them.

        Call this before a NoLoCo is created. The layout of a stage that was held before is dropped, because peers of
        the new stage would refuse it as another model.
        """
        self._network.live_peers.stage = stage
        self._network.states.layout = None

    def wait_for(self, stages: Sequence[int]) -> None:
        """Set the stages that this peer waits for because no peer holds them. `noloco status` shows them."""
        self._network.status.waits_for_stages = tuple(stages)

    def start_flow(self, plan: StagePlan) -> StageFlow:
        """Take part in the pipeline. Other peers find this one in the directory and send it microbatches."""
        return self._network.thread.call(self._start_flow(plan), START_TIMEOUT_S)

    def stop_flow(self) -> None:
        """Stop taking part in the pipeline, before this peer holds another stage."""
        self._network.thread.call(self._stop_flow(), START_TIMEOUT_S)

    async def _start_flow(self, plan: StagePlan) -> StageFlow:
        net, live_peers = self._network, self._network.live_peers
        flow = StageFlow(
            plan,
            net.identity,
            net.hello,
            heads=live_peers.heads,
            live=lambda: live_peers.reached(live_peers.everyone()),
            is_closed=net.reachability.is_closed,
            strike=net.bans.strike,
            connector=Connector(net.session, net.limits, why_banned=net.bans.why, guard=net.directory.node.guard),
            find=live_peers.find,
            why_banned=net.bans.why,
        )
        net.stage_flow, net.server.serve_flow = flow, flow.links.serve
        flow.start()
        return flow

    async def _stop_flow(self) -> None:
        net = self._network
        flow, net.stage_flow, net.server.serve_flow = net.stage_flow, None, None
        if flow:
            await flow.stop()
