"""The spread of the replicas from what they publish, against the spread of the replicas themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from noloco_p2p.codec.sketch import norm, pack, sketch
from noloco_p2p.monitor.spread import measure
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.train.judge import spread

NUM_ELEMENTS = 70_000


def replicas(num_peers: int, *, apart: float, seed: int) -> list[Tensor]:
    """Columns of very different size, as in a model: the sketch must not care where the energy is."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-2, 1, 64).repeat(NUM_ELEMENTS // 64 + 1)[:NUM_ELEMENTS]
    base = size * torch.randn(NUM_ELEMENTS, generator=generator)
    return [base + apart * size * torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(num_peers)]


def records(weights: list[Tensor], *, run: str) -> list[PeerRecord]:
    return [
        PeerRecord(f"peer-{index}", "r", run, sketch=pack(sketch(own, run=run)), norm=norm(own))
        for index, own in enumerate(weights)
    ]


def errors(num_peers: int, *, apart: float, draws: int) -> Tensor:
    found = []
    for seed in range(draws):
        weights = replicas(num_peers, apart=apart, seed=seed)
        measured = measure(records(weights, run=f"run {seed}"))
        assert measured is not None
        found.append(measured.of_all / spread(weights, torch.stack(weights).mean(0)) - 1)
    return torch.tensor(found)


@pytest.mark.parametrize(("num_peers", "deviation"), [(4, 0.07), (8, 0.045), (16, 0.03)])
@pytest.mark.parametrize("apart", [0.3, 0.004, 3e-4])
def test_it_is_within_15_percent_of_the_truth(num_peers: int, deviation: float, apart: float) -> None:
    """At four peers 15 % are three standard deviations: one draw in a few hundred is farther off."""
    off = errors(num_peers, apart=apart, draws=40)
    assert float((off.abs() > 0.15).float().mean()) <= 0.025
    assert float(off.std()) < deviation
    assert abs(float(off.mean())) < 0.03, "not off to one side"


def test_the_one_who_went_astray_is_told_apart() -> None:
    weights = replicas(5, apart=0.004, seed=1)
    weights[3] = weights[3] + 0.05 * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(9))
    measured = measure(records(weights, run="r"))
    assert measured is not None
    assert max(measured.of_each, key=lambda peer: measured.of_each[peer]) == "peer-3"
    assert measured.num_peers == 5


def test_peers_that_are_equal_have_no_spread() -> None:
    measured = measure(records([replicas(1, apart=0.0, seed=1)[0]] * 3, run="r"))
    assert measured is not None
    assert measured.of_all < 1e-4


def test_who_publishes_none_or_nonsense_is_left_out() -> None:
    own = records(replicas(4, apart=0.004, seed=2), run="r")
    expected = measure(own)
    bad = [
        replace(own[0], peer_id="x", sketch="junk"),
        replace(own[1], peer_id="y", norm=None),
        replace(own[2], norm=-1.0),
    ]
    assert measure([*own, *bad]) == expected
    assert measure(own[:1]) is None
    assert measure([]) is None
