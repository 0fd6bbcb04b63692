"""Every flag of the hostile peer against the invariants, over real gRPC.

I1  data that is not applied leaves weights, momentum and random state bit-identical to a peer that never received it
I2  training does not wait longer than the limit
I3  the victim survives: its next round, with an honest partner, is an ordinary swap
I4  one log line names the peer, what happened, and what was kept
"""

from __future__ import annotations

import logging
import time

import pytest
import torch
from harness.loopback import LoopbackSwarm
from harness.patience import AT_ONCE_S, PATIENCE_S
from harness.rounds import Vectors, end_round, open_round, together
from harness.specs import FP32, published
from harness.swapped import received
from torch import nn

from adversarial.flags import FLAGS, Flag
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.console import named
from noloco_p2p.testing.peers import MemoryPeer

ADVERSARY = "the-adversary"
SPEC = RunSpec(name="adversarial", codec=FP32, outer=published(inner_steps=1, max_wait_s=PATIENCE_S))
DEADLINES = Deadlines(status_s=2.0, progress_s=2.0, farewell_s=0.5)
KINDS = {"nothing": Alone, "early": Half, "clipped": Swapped}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 5))


def train(model: nn.Module) -> None:
    """Stand in for an inner step, the same one for the victim and its twin."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.01)


def all_numbers(state: OuterState) -> torch.Tensor:
    """Return the slow weights, the momentum and the weights of the model, which I1 covers, as one vector."""
    return torch.cat([*state.tensors().values(), state.parameters.read(0, state.num_elements)])


def twin_with(outcome: Outcome, theirs: Vectors) -> OuterState:
    """Return a peer that received exactly what the victim may have kept: nothing, or the early part."""
    model = make_model()
    twin = OuterState(model, SPEC.outer)
    kept = {SectionName.SLOW_WEIGHTS: theirs.slow_weights, SectionName.OUTER_MOMENTUM: theirs.outer_momentum}
    early = received(twin.sections(), kept) if isinstance(outcome, Half) else None
    train(model)
    twin.step(early)
    return twin


def partner_vectors() -> Vectors:
    """Return the vectors of an honest partner: the same start, and an outer gradient of the usual norm."""
    state = OuterState(make_model(), SPEC.outer)
    gradient = torch.randn(state.num_elements, generator=torch.Generator().manual_seed(99)) * 0.01
    return Vectors(state.slow_weights, torch.zeros(state.num_elements), gradient)


def one_round(victim: NoLoCo, model: nn.Module, peer: MemoryPeer, theirs: Vectors, *, round_index: int) -> Outcome:
    def own() -> Outcome:
        train(model)
        result = victim.step()
        assert result is not None
        return result.outcome

    def other() -> Outcome:
        open_round(peer, theirs, round_index=round_index)
        return end_round(peer, theirs, wait_s=PATIENCE_S)

    return together(own, other)[0]


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_row(flag: Flag, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    honest = partner_vectors()
    theirs = flag.lie(honest)
    model, random_state = make_model(), torch.get_rng_state()
    with LoopbackSwarm(SPEC, deadlines=DEADLINES) as swarm:
        peer = swarm.peer("victim")
        struck: list[str] = []
        peer.driver.on_corrupt = lambda peer_id, reason: struck.append(peer_id)
        faults = flag.plan.wrapper()
        adversary = swarm.peer(ADVERSARY, wrap=faults, wrap_accepted=faults)
        victim = NoLoCo(model, None, peer, save_every_rounds=0)
        began_s = time.monotonic()
        outcome = one_round(victim, model, adversary, theirs, round_index=flag.round)
        assert time.monotonic() - began_s < AT_ONCE_S  # I2
        assert faults.fired or not flag.plan.sending
        assert struck == ([ADVERSARY] if flag.is_strike else [])
        assert type(outcome) is KINDS[flag.left], outcome
        state = victim._state  # private, as no public method returns all vectors
        after, twin = all_numbers(state), twin_with(outcome, theirs)
        if flag.left == "clipped":
            assert bool(torch.isfinite(after).all())
            moved = float((state.slow_weights - twin.slow_weights).norm())
            assert moved <= 5 * float(honest.outer_gradient.norm()), (
                "half a gradient, momentum and offset at their radii"
            )
        else:
            assert torch.equal(after, all_numbers(twin))  # I1
            said = [text for text in caplog.messages if named(ADVERSARY) in text and flag.says in text]
            assert said, caplog.text  # I4
            assert "applied" in said[0] or "kept" in said[0]
        assert torch.equal(torch.get_rng_state(), random_state)
        swarm.addresses.pop(ADVERSARY)
        friend = swarm.peer("a-friend")
        round_index = victim.round
        assert isinstance(one_round(victim, model, friend, honest, round_index=round_index), Swapped)  # I3
