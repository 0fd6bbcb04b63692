"""Measure how far apart honest states are, for the limits in `outer/state_checks.py` and `outer/robust_mean.py`.

    python benchmarks/honest_states.py [--steps 120] [--saves 40] [--seed 0]

Eight simulated replicas train the toy model (toy.toml). "N of 8 apart" means that N replicas never meet the others,
so each row shows a swarm at the moment when a network partition ends. Distances are relative to a norm. Each peer saves
its state every few inner steps. Peers save at different times, so a merge receives states of different ages. In the
columns "0 to 7 saves ago", replica i contributes the state that it saved i saves ago.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from claims import machine
from torch import Tensor

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.robust_mean import robust_mean
from noloco_p2p.simulate import replica as simulated_replica
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.memory import MemoryDirectory

TOY = Path(__file__).parent / "toy.toml"
NUM_REPLICAS = 8


def histories(material: Material, *, every: int, seed: int, cut: int) -> list[list[Tensor]]:
    """Return the weights of each replica after every `every` steps. The first `cut` replicas never meet the others."""
    found: list[list[Tensor]] = []
    names: list[str] = []

    class Islands(MemoryDirectory):
        def live(self) -> Sequence[Candidate]:
            own = names.index(self._own_id) < cut
            return [each for each in super().live() if (names.index(each.peer_id) < cut) == own]

    def watch(made: list[SimulatedReplica]) -> None:
        for each in made:
            names.append(each.peer_id)
            found.append([each.current_weights()])
            setattr(each, "_note_point", partial(note, each, found[-1]))  # noqa: B010 (it is called after each step)

    def note(each: SimulatedReplica, history: list[Tensor]) -> None:
        if each.steps % every == 0:
            history.append(each.current_weights())

    simulated_replica.MemoryDirectory = Islands
    simulate_swarm(material, Plan(NUM_REPLICAS, seed=seed, evaluations=1), on_made=watch)
    return found


def distances(states: Sequence[Tensor]) -> list[float]:
    """Return the distance of each state from the coordinate-wise median of all, relative to the median's norm."""
    centre = torch.stack(list(states)).quantile(0.5, dim=0)
    return [float((state - centre).norm() / centre.norm()) for state in states]


def far_on(found: Sequence[Sequence[Tensor]], now: int, saves: int) -> float:
    """Return the largest distance between a state and the state of the next replica `saves` saves later."""
    then = min(min(map(len, found)) - 1, now + saves)
    return max(float((one[now] - two[then]).norm() / two[then].norm()) for one, two in pairwise(found))


def report(spec: TrainerSpec, *, every: int, seed: int, cut: int) -> None:
    material = Material.of(spec, {})
    found = histories(material, every=every, seed=seed, cut=cut)
    num_saves = min(map(len, found)) - 1
    print(f"\n{cut} of {NUM_REPLICAS} apart, seed {seed}, {num_saves} saves, {found[0][0].numel()} parameters")
    print("        to the median of all                0 to 7 saves ago       another one, later")
    print("save      middle   furthest              middle   furthest        10 saves   32 saves    norm")
    for now in (1, 2, 3, 5, 10, 15, 20, 30, num_saves):
        same = distances([history[now] for history in found])
        aged = distances([history[max(1, now - age)] for age, history in enumerate(found)])
        later = [far_on(found, now, saves) for saves in (10, 32)]
        print(
            f"{now:>5} {median(same):>10.4f} {max(same):>10.4f} {median(aged):>19.4f} {max(aged):>10.4f} "
            f"{later[0]:>15.3f} {later[1]:>10.3f} {float(found[0][now].norm()):>7.2f}"
        )
    states = {str(number): history[num_saves] for number, history in enumerate(found)}
    merged, model = robust_mean(states), material.model()
    losses = [material.loss_of(weights, model) for weights in (torch.stack([*states.values()]).mean(0), merged.weights)]
    print(f"validation loss of the mean {losses[0]:.4f}, of the robust mean {losses[1]:.4f}: ", end="")
    print(f"{len(merged.left_out)} left out, {len(merged.shortened)} shortened")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--saves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    changes = {"train.total_steps": arguments.steps, "train.warmup_steps": arguments.steps // 10}
    spec = TrainerSpec.load(TOY).with_changes(changes, origin="honest_states.py")
    for cut in (0, 1, 3):
        report(spec, every=max(1, arguments.steps // arguments.saves), seed=arguments.seed, cut=cut)


if __name__ == "__main__":
    main()
