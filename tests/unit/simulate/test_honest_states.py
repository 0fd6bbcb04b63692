"""States of honest replicas pass every check against liars, even when two separated groups have just met again."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from harness.specs import published, tiny_llama
from torch import Tensor

from noloco_p2p.codec import sketch
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.robust_mean import leave_out_far, robust_mean
from noloco_p2p.outer.state_checks import check_position, check_sketches
from noloco_p2p.simulate import peer as simulated_peer
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainSpec
from noloco_p2p.testing.memory import MemoryDirectory

NUM_REPLICAS, NUM_ROUNDS = 8, 12
SPEC = tiny_llama(
    "honest",
    train=TrainSpec(total_steps=3 * NUM_ROUNDS, batch_size=2, warmup_steps=4, learning_rate=4e-3),
    outer=published(inner_steps=3, max_wait_s=100.0, closing_rounds=0),
)
ROUNDS = [1, 3, 6, NUM_ROUNDS]


@functools.cache
def histories(num_apart: int) -> list[list[Tensor]]:
    """Return the slow weights of each replica after each of its rounds; the first `num_apart` never meet the others."""
    made: list[SimulatedReplica] = []

    class Islands(MemoryDirectory):
        def live(self) -> Sequence[Candidate]:
            apart = {each.peer_id for each in made[:num_apart]}
            return [each for each in super().live() if (each.peer_id in apart) == (self._own_id in apart)]

    found: list[list[Tensor]] = [[] for _ in range(NUM_REPLICAS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_peer, "MemoryDirectory", Islands)
        patch.setattr(
            SimulatedReplica,
            "_note_point",
            lambda replica: found[replica.number].append(replica.state.slow_weights.clone()),
        )
        simulate_swarm(Material.of(SPEC, {}), Plan(NUM_REPLICAS, evaluations=1), on_made=made.extend)
    return found


def states_of(num_apart: int, round_index: int) -> dict[str, Tensor]:
    return {str(number): history[round_index - 1] for number, history in enumerate(histories(num_apart))}


def aged_states_of(num_apart: int, round_index: int) -> dict[str, Tensor]:
    """Return a state of each replica: that of replica i is i rounds old."""
    histories_ = histories(num_apart)
    return {str(age): history[max(0, round_index - 1 - age)] for age, history in enumerate(histories_)}


@pytest.mark.parametrize("round_index", ROUNDS)
@pytest.mark.parametrize("num_apart", [0, 1, 3, 4])
def test_no_state_is_left_out_of_a_merge(num_apart: int, round_index: int) -> None:
    assert leave_out_far(states_of(num_apart, round_index))[1] == {}
    assert leave_out_far(aged_states_of(num_apart, round_index))[1] == {}


@pytest.mark.parametrize("round_index", ROUNDS)
def test_states_of_one_moment_are_averaged_as_they_are(round_index: int) -> None:
    states = states_of(0, round_index)
    merged = robust_mean(states)
    assert merged.shortened == {}
    assert torch.allclose(merged.weights, torch.stack([*states.values()]).mean(0), atol=1e-6)


@pytest.mark.parametrize("saved", ROUNDS)
@pytest.mark.parametrize("num_apart", [0, 1, 3, 4])
def test_a_state_fits_what_the_others_publish_of_another_moment(num_apart: int, saved: int) -> None:
    """The sketches are those of the last round; the state may be as old as the whole run."""
    mark = sketch.AT_REST
    published_ = {
        peer: sketch.pack(sketch.sketch(weights, run=SPEC.digest(), mark=mark), mark=mark, norm=sketch.norm(weights))
        for peer, weights in states_of(num_apart, NUM_ROUNDS).items()
    }
    standings = [(NUM_ROUNDS, 1.0)] * NUM_REPLICAS
    for peer, weights in states_of(num_apart, saved).items():
        others = [text for other, text in published_.items() if other != peer]
        check_sketches(weights, others, progress=saved / NUM_ROUNDS, spec=SPEC)
        check_position(saved, saved / NUM_ROUNDS, standings, SPEC)
