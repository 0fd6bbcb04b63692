"""The spread estimated from published sketches, against the exact spread of the replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from noloco_p2p.codec.sketch import AT_REST, MARKS, norm, pack, sketch
from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.spread import KEPT, NEAR, Sketches, Spread
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.ticket import Ticket
from noloco_p2p.trainer.swarm_evaluation import spread

NUM_ELEMENTS = 70_000
MARK = MARKS // 4
BEFORE = MARK - NEAR // 2


def replicas(num_peers: int, *, apart: float, seed: int) -> list[Tensor]:
    """Return replicas whose columns differ widely in size, as in a model, which the sketch must tolerate."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-2, 1, 64).repeat(NUM_ELEMENTS // 64 + 1)[:NUM_ELEMENTS]
    base = size * torch.randn(NUM_ELEMENTS, generator=generator)
    return [base + apart * size * torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(num_peers)]


def record(name: str, weights: Tensor, mark: int = MARK, *, run: str = "r") -> PeerRecord:
    packed = pack(sketch(weights, run=run, mark=mark), mark=mark, norm=norm(weights))
    return PeerRecord(name, "r", run, sketch=packed)


def records(weights: list[Tensor], mark: int = MARK, *, run: str = "r") -> list[PeerRecord]:
    return [record(f"peer-{index}", own, mark, run=run) for index, own in enumerate(weights)]


def measure(*looks: list[PeerRecord]) -> Spread | None:
    """Return the spread after these views of the swarm, one after the other."""
    sketches = Sketches()
    for seen in looks:
        sketches.take(seen)
    return sketches.measure()


def true_spread(weights: list[Tensor]) -> float:
    return spread(weights, torch.stack(weights).mean(0))


def errors(num_peers: int, *marks: int, apart: float, draws: int) -> Tensor:
    found = []
    for seed in range(draws):
        weights = replicas(num_peers, apart=apart, seed=seed)
        measured = measure(*(records(weights, mark, run=f"run {seed}") for mark in marks))
        assert measured is not None
        found.append(measured.of_all / true_spread(weights) - 1)
    return torch.tensor(found)


@pytest.mark.parametrize(("num_peers", "deviation"), [(4, 0.07), (8, 0.045), (16, 0.03)])
@pytest.mark.parametrize("apart", [0.3, 0.004, 3e-4])
def test_one_mark_is_within_15_percent_of_the_truth(num_peers: int, deviation: float, apart: float) -> None:
    """At four peers 15 % are three standard deviations, which one draw in a few hundred exceeds."""
    off = errors(num_peers, MARK, apart=apart, draws=40)
    assert int((off.abs() > 0.15).sum()) <= 1
    assert float(off.std()) < deviation
    assert abs(float(off.mean())) < 0.03, "not off to one side"


@pytest.mark.parametrize("apart", [0.3, 0.004, 3e-4])
def test_the_last_marks_together_are_within_a_fifth_of_the_truth_for_two_peers(apart: float) -> None:
    """One mark has a standard deviation of 9 %, so that 2 % of its readings are off by a fifth; four have 4.5 %."""
    marks = [MARK - NEAR // 4 * back for back in (3, 2, 1, 0)]
    off = errors(2, *marks, apart=apart, draws=40)
    assert float(off.abs().max()) < 0.2
    assert float(off.std()) < 0.065
    assert abs(float(off.mean())) < 0.03, "not off to one side"


def test_sketches_of_different_marks_are_not_compared() -> None:
    one, other = replicas(2, apart=0.004, seed=1)
    assert measure([record("a", one), record("b", other, MARK + 1)]) is None


def test_peers_that_came_to_a_mark_at_different_times_are_compared_there() -> None:
    """A record may lag by an announcement, or come from a slower peer; progress in between is not spread."""
    then, now = replicas(2, apart=0.004, seed=1), replicas(2, apart=0.3, seed=2)
    measured = measure(
        [record("a", then[0]), record("b", now[1], BEFORE)],
        [record("a", now[0], MARK + NEAR), record("b", now[1], BEFORE)],
        [record("a", now[0], MARK + NEAR), record("b", then[1])],
    )
    assert measured is not None
    assert measured.progress == MARK / MARKS
    assert measured.of_all == pytest.approx(true_spread(then), rel=0.3), "one mark, two peers: 9 %"


def test_the_mark_that_most_peers_have_counts_and_of_several_the_newest() -> None:
    weights = replicas(5, apart=0.004, seed=3)
    stopped = [record(f"stopped-{index}", weights[index], BEFORE) for index in range(2)]
    training = [record(f"training-{index}", weights[2 + index]) for index in range(3)]
    done = [record(f"done-{index}", weights[2 + index], AT_REST) for index in range(2)]
    for more, names in ((training, "training-0 training-1 training-2"), (training[:2], "training-0 training-1")):
        measured = measure([*stopped, *more])
        assert measured is not None
        assert sorted(measured.of_each) == names.split()
    measured = measure([*stopped, *done])
    assert measured is not None
    assert measured.progress == 1.0


def test_one_straggler_of_many_does_not_hold_the_others_at_an_older_mark() -> None:
    weights = replicas(10, apart=0.004, seed=3)
    measured = measure(records(weights, BEFORE), records(weights[:9]))
    assert measured is not None
    assert (measured.progress, measured.num_peers) == (MARK / MARKS, 9)


def test_two_that_are_ahead_of_the_others_are_not_the_swarm() -> None:
    weights = replicas(5, apart=0.004, seed=3)
    before = records(weights, BEFORE)
    measured = measure(before, [*records(weights[:2]), *before[2:]])
    assert measured is not None
    assert (measured.progress, measured.num_peers) == (BEFORE / MARKS, 5)


def test_a_mark_that_is_far_back_is_not_averaged_in() -> None:
    then, now = replicas(4, apart=0.3, seed=1), replicas(4, apart=0.004, seed=2)
    assert measure(records(then, MARK - NEAR - 1), records(now)) == measure(records(now))


def test_the_newest_weights_at_rest_count() -> None:
    """Every closing round brings another sketch of the same mark."""
    before, after = replicas(3, apart=0.004, seed=1), replicas(3, apart=3e-4, seed=2)
    assert measure(records(before, AT_REST), records(after, AT_REST)) == measure(records(after, AT_REST))


def test_of_a_peer_the_last_few_marks_are_kept_and_of_one_that_is_gone_none() -> None:
    weights = replicas(2, apart=0.004, seed=1)
    later = [[record("a", weights[0], MARK + 1 + index), record("b", weights[1])] for index in range(KEPT)]
    assert measure(records(weights)[:0], [record("a", weights[0]), record("b", weights[1])], *later[:-1]) is not None
    assert measure([record("a", weights[0]), record("b", weights[1])], *later) is None
    assert measure(records(weights), records(weights)[:1]) is None


def test_the_one_who_went_astray_is_told_apart() -> None:
    weights = replicas(5, apart=0.004, seed=1)
    weights[3] = weights[3] + 0.05 * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(9))
    measured = measure(records(weights))
    assert measured is not None
    assert max(measured.of_each, key=lambda peer: measured.of_each[peer]) == "peer-3"
    assert measured.num_peers == 5


def test_peers_that_are_equal_have_no_spread() -> None:
    measured = measure(records([replicas(1, apart=0.0, seed=1)[0]] * 3))
    assert measured is not None
    assert measured.of_all < 1e-4


def test_who_publishes_none_or_nonsense_is_left_out() -> None:
    own = records(replicas(4, apart=0.004, seed=2))
    bad = [replace(own[0], peer_id="x", sketch="junk"), replace(own[1], peer_id="y", sketch="")]
    assert measure([*own, *bad]) == measure(own)
    assert measure(own[:1]) is None
    assert measure([]) is None


def test_only_peers_of_one_stage_are_compared() -> None:
    """Stages hold different parameters, although their sketches have the same length."""
    close, far = replicas(2, apart=0.004, seed=1), replicas(3, apart=0.3, seed=2)
    seen = [replace(own, sequence=1, stages=3) for own in records(close)]
    seen += [
        replace(own, peer_id=f"inner-{index}", sequence=1, stages=3, stage=1) for index, own in enumerate(records(far))
    ]
    seen.append(replace(seen[0], peer_id="only one", stage=2))
    watcher = Watcher(Ticket("r", "0" * 64, ()))
    watcher.take([(own, 1.0) for own in seen], directory_age_s=0.5, now_s=1_800_000_000.0)
    assert {stage: spread.num_peers for stage, spread in watcher.spreads.items()} == {0: 2, 1: 3}
    assert watcher.has_common_marks()
    assert watcher.spreads[0].of_all == pytest.approx(true_spread(close), rel=0.4)
    summary = watcher.summary()
    assert summary["totals"]["spread"] == watcher.spreads[1].of_all, "that of the stage whose peers are furthest apart"
    assert {row["stage"]: row["spread"] is None for row in summary["stages"]} == {0: False, 1: False, 2: True}
    distances = {peer["peer_id"]: peer["distance"] for peer in summary["peers"]}
    assert distances["only one"] is None
    assert distances["peer-0"] == watcher.spreads[0].of_each["peer-0"]
    later = replace(seen[0], sequence=2, sketch=record("peer-0", close[0], MARK + NEAR).sketch)
    alone = Watcher(Ticket("r", "0" * 64, ()))
    alone.take([(later, 1.0), (seen[1], 1.0)], directory_age_s=0.5, now_s=1_800_000_000.0)
    assert not alone.has_common_marks()
