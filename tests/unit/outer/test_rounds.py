"""Polled rounds: one thread drives two peers, and the weights equal those of two threads that block."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.rounds import Vectors, end_round, open_round, together, wait_until
from harness.specs import FP32, published
from torch import Tensor, nn

from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.outer.noloco import NoLoCo, RoundResult
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.testing.peers import MemorySwarm

INNER_STEPS, NUM_ROUNDS = 3, 3
SPEC = TrainerSpec(
    name="polled",
    codec=FP32,
    outer=published(inner_steps=INNER_STEPS, max_wait_s=30.0),
    train=TrainSpec(total_steps=100, warmup_steps=1),
)


def make_model() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(6, 4)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def inner_step(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(amount)


def make(swarm: MemorySwarm, folder: Path, *, follows_caller: bool = False) -> list[tuple[NoLoCo, nn.Module]]:
    made = []
    for name in "ab":
        model = make_model()
        peer = swarm.peer(name, run_folder=folder / name)
        made.append((NoLoCo(model, None, peer, save_every_rounds=0, follows_caller=follows_caller), model))
    return made


def both_early(swarm: MemorySwarm) -> None:
    """Wait until each peer has its partner's early part, so that no round is solo."""
    wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in swarm.peers))


def polled(outers: list[NoLoCo], *, meanwhile: Callable[[], object] = lambda: None) -> list[RoundResult]:
    """Poll in turn until all rounds have ended."""
    results: dict[int, RoundResult] = {}

    def all_ended() -> bool:
        for index, outer in enumerate(outers):
            if index not in results and (result := outer.poll()):
                results[index] = result
        meanwhile()
        return len(results) == len(outers)

    wait_until(all_ended)
    return [results[index] for index in range(len(outers))]


def blocking(swarm: MemorySwarm, pairs: list[tuple[NoLoCo, nn.Module]]) -> None:
    def train(outer: NoLoCo, model: nn.Module, amount: float) -> None:
        for _ in range(INNER_STEPS - 1):
            inner_step(model, amount)
            assert outer.step() is None

    def last(outer: NoLoCo, model: nn.Module, amount: float) -> None:
        inner_step(model, amount)
        result = outer.step()
        assert result is not None
        assert isinstance(result.outcome, Swapped)

    for _ in range(NUM_ROUNDS):
        for part in (train, last):
            together(*(partial(part, *pair, 0.1 * (index + 1)) for index, pair in enumerate(pairs)))
            if part is train:
                both_early(swarm)


def nonblocking(swarm: MemorySwarm, pairs: list[tuple[NoLoCo, nn.Module]]) -> None:
    outers = [outer for outer, _ in pairs]
    for _ in range(NUM_ROUNDS):
        for step in range(INNER_STEPS):
            if step == INNER_STEPS - 1:
                both_early(swarm)
            for index, (outer, model) in enumerate(pairs):
                inner_step(model, 0.1 * (index + 1))
                assert outer.advance() == (step == INNER_STEPS - 1)
        began = [weights(model) for _, model in pairs]
        first, began_s = outers[0].poll(), time.monotonic()
        if first is None:
            assert torch.equal(weights(pairs[0][1]), began[0]), "weights do not change while the boundary lasts"
        assert time.monotonic() - began_s < 5.0
        results = [first, *polled(outers[1:])] if first else polled(outers)
        assert all(isinstance(result.outcome, Swapped) for result in results)
        assert all(outer.poll() is None for outer in outers), "the next round is open"


def test_polled_rounds_end_with_the_bits_of_rounds_that_block(tmp_path: Path) -> None:
    ends = []
    for drive in (blocking, nonblocking):
        with MemorySwarm(SPEC) as swarm:
            pairs = make(swarm, tmp_path / drive.__name__)
            drive(swarm, pairs)
            ends.append([weights(model) for _, model in pairs])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_gradients_may_be_computed_while_a_boundary_lasts_and_no_step_may_be_closed(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        (a, model), (b, other) = make(swarm, tmp_path)
        for outer, net, steps in ((a, model, INNER_STEPS), (b, other, INNER_STEPS - 1)):
            for step in range(steps):
                if outer is a and step == INNER_STEPS - 1:
                    b._open()
                    both_early(swarm)
                inner_step(net, 0.1)
                outer.advance()
        assert a.poll() is None, "the partner is not at its boundary"
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(SettingsError, match="at its boundary"):
            a.step()
        inner_step(other, 0.1)
        assert b.advance()
        results = polled([a, b])
        assert all(isinstance(result.outcome, Swapped) for result in results)
        assert results[0].blocked_s >= 0.0
        assert model.weight.grad is not None, "gradients are the caller's"


def test_a_polled_boundary_ends_by_itself_when_time_is_over(tmp_path: Path) -> None:
    spec = SPEC.with_changes({"outer.max_wait_s": 0.3})
    with MemorySwarm(spec) as swarm:
        (a, model), (b, _) = make(swarm, tmp_path)
        b._open()
        for step in range(INNER_STEPS):
            inner_step(model, 0.1)
            a.advance()
            if step == 0:
                both_early(swarm)
        (result,) = polled([a])
        assert isinstance(result.outcome, Half)
        assert 0.2 < result.blocked_s < 5.0


def test_a_step_asks_for_no_more_patience_than_the_run_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    with MemorySwarm(SPEC) as swarm:
        peer, model = swarm.peer("a", run_folder=tmp_path), make_model()
        collect = peer.exchange.collect
        monkeypatch.setattr(peer.exchange, "collect", lambda wait_s: waits_s.append(wait_s) or collect(wait_s))
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        for _ in range(2 * INNER_STEPS):
            outer.step()
    assert len(waits_s) == 2
    assert all(0 < wait_s <= SPEC.outer.max_wait_s for wait_s in waits_s)


def test_who_withdraws_at_a_boundary_ends_the_round_at_once(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        (a, model), (b, _) = make(swarm, tmp_path)
        b._open()
        for step in range(INNER_STEPS):
            inner_step(model, 0.1)
            a.advance()
            if step == 0:
                both_early(swarm)
        result = a.withdraw()
        assert result is not None
        assert isinstance(result.outcome, Half)
        assert a.is_between_rounds
        assert a.poll() is None
        assert a.advance() is False, "and opens the next one with its next step"


def test_a_solo_round_needs_no_waiting(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(make_model(), None, swarm.peer("a", run_folder=tmp_path), save_every_rounds=0)
        assert [outer.advance() for _ in range(INNER_STEPS)] == [False, False, True]
        result = outer.poll()
        assert result is not None
        assert isinstance(result.outcome, Alone)


def test_progress_that_follows_the_caller_moves_by_nothing_else(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        pairs = make(swarm, tmp_path, follows_caller=True)
        pairs[1][0].progress = 0.03
        for step in range(INNER_STEPS):
            if step == INNER_STEPS - 1:
                both_early(swarm)
            for outer, model in pairs:
                inner_step(model, 0.1)
                outer.advance()
        results = polled([outer for outer, _ in pairs])
        assert all(isinstance(result.outcome, Swapped) for result in results)
        assert [outer.progress for outer, _ in pairs] == [0.0, 0.03]
        assert [result.progress for result in results] == [0.0, 0.03]
        pairs[0][0].progress = 0.5
        assert pairs[0][0].progress == 0.5


def test_an_exchange_is_polled_until_nothing_more_can_come() -> None:
    with MemorySwarm(SPEC) as swarm:
        peers, own = [swarm.peer("a"), swarm.peer("b")], [Vectors.random(1), Vectors.random(2)]
        for peer, vectors in zip(peers, own, strict=True):
            open_round(peer, vectors)
        both_early(swarm)
        peers[0].exchange.stage(own[0].gradient_chunks)
        assert peers[0].exchange.poll(wait_s=30.0) is None
        assert isinstance(end_round(peers[1], own[1], wait_s=30.0), Swapped)
        outcomes: list[Outcome] = []

        def is_over() -> bool:
            outcome = peers[0].exchange.poll(wait_s=30.0)
            outcomes.extend([outcome] if outcome else [])
            return bool(outcomes)

        wait_until(is_over)
        assert isinstance(outcomes[0], Swapped)


def test_an_exchange_that_is_polled_without_patience_ends_the_round() -> None:
    with MemorySwarm(SPEC) as swarm:
        peers, own = [swarm.peer("a"), swarm.peer("b")], [Vectors.random(1), Vectors.random(2)]
        for peer, vectors in zip(peers, own, strict=True):
            open_round(peer, vectors)
        both_early(swarm)
        peers[0].exchange.stage(own[0].gradient_chunks)
        assert isinstance(peers[0].exchange.poll(wait_s=0.0), Half)
        assert isinstance(end_round(peers[1], own[1], wait_s=30.0), Swapped)
        wait_until(lambda: bool(peers[0].driver.corrections))
        assert peers[0].exchange.late(1) is not None
