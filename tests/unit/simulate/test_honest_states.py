"""A merge takes the states of honest replicas as they are, even when two separated groups have just met again."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from harness.specs import tiny_llama
from torch import Tensor

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.robust_mean import leave_out_far, robust_mean
from noloco_p2p.simulate import replica as simulated_replica
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import OuterSpec, TrainSpec
from noloco_p2p.testing.memory import MemoryDirectory

NUM_REPLICAS, NUM_SAVES, EVERY = 8, 12, 3
SPEC = tiny_llama(
    "honest",
    train=TrainSpec(total_steps=EVERY * NUM_SAVES, batch_size=2, warmup_steps=4, learning_rate=4e-3),
    outer=OuterSpec(closing_mixings=0),
)
SAVES = [1, 3, 6, NUM_SAVES]


@functools.cache
def histories(num_apart: int) -> list[list[Tensor]]:
    """Return what each replica saves every few steps; the first `num_apart` never meet the others."""
    made: list[SimulatedReplica] = []

    class Islands(MemoryDirectory):
        def live(self) -> Sequence[Candidate]:
            apart = {each.peer_id for each in made[:num_apart]}
            return [each for each in super().live() if (each.peer_id in apart) == (self._own_id in apart)]

    found: list[list[Tensor]] = [[] for _ in range(NUM_REPLICAS)]

    def save(replica: SimulatedReplica) -> None:
        if replica.steps % EVERY == 0:
            found[replica.number].append(replica.current_weights())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_replica, "MemoryDirectory", Islands)
        patch.setattr(SimulatedReplica, "_note_point", save)
        simulate_swarm(Material.of(SPEC, {}), Plan(NUM_REPLICAS, evaluations=1), on_made=made.extend)
    return found


def states_of(num_apart: int, save: int) -> dict[str, Tensor]:
    return {str(number): history[save - 1] for number, history in enumerate(histories(num_apart))}


def aged_states_of(num_apart: int, save: int) -> dict[str, Tensor]:
    """Return a state of each replica: that of replica i is i saves old."""
    return {str(age): history[max(0, save - 1 - age)] for age, history in enumerate(histories(num_apart))}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("num_apart", [0, 1, 3, 4])
def test_no_state_is_left_out_of_a_merge(num_apart: int, save: int) -> None:
    assert leave_out_far(states_of(num_apart, save))[1] == {}
    assert leave_out_far(aged_states_of(num_apart, save))[1] == {}


@pytest.mark.parametrize("save", SAVES)
def test_states_of_one_moment_are_averaged_as_they_are(save: int) -> None:
    states = states_of(0, save)
    merged = robust_mean(states)
    assert merged.shortened == {}
    assert torch.allclose(merged.weights, torch.stack([*states.values()]).mean(0), atol=1e-6)
