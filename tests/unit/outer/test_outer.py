"""NoLoCo around a training loop: two peers in memory, with the real exchange, swap and codecs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.specs import FP32, published
from safetensors.torch import save_file
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Alone, Half, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.round_state import LAST_LOOK_S
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.noloco import NoLoCo, RoundResult
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.spec import CodecSpec, OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm
from noloco_p2p.transfer.donor import state_file_bytes

COARSE, COARSER = (
    CodecSpec.model_validate({"slow_weights": "int8", "outer_momentum": "int8", "outer_gradient": gradient})
    for gradient in ("int4", "int2")
)


def make_spec(*, codec: CodecSpec = FP32, inner_steps: int = 2, max_wait_s: float = PATIENCE_S) -> TrainerSpec:
    outer = published(inner_steps=inner_steps, max_wait_s=max_wait_s)
    return TrainerSpec(name="test", outer=outer, codec=codec, train=TrainSpec(total_steps=100, warmup_steps=1))


AUTO = OuterSpec(inner_steps="auto", min_inner_steps=2, max_inner_steps=40)


def make_auto_spec(*, max_wait_s: float = PATIENCE_S) -> TrainerSpec:
    outer = AUTO.model_copy(update={"max_wait_s": max_wait_s})
    return TrainerSpec(name="auto", outer=outer, codec=FP32, train=TrainSpec(total_steps=1000, warmup_steps=1))


def make_model(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def make_neighbour() -> nn.Sequential:
    """Return a model as close to `make_model(1)` as replicas of one run are, so that no gate clips the offset."""
    model, other = make_model(1), make_model(2)
    with torch.no_grad():
        for param, towards in zip(model.parameters(), other.parameters(), strict=True):
            param.lerp_(towards, 0.02)
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def nudge(model: nn.Module, amount: float) -> None:
    """Stand in for an inner step with a known outer gradient."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(amount)


def together(*actions: Callable[[], None]) -> None:
    """Run each action in a thread, as a step blocks; raise the first error."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]


def one_round(outer: NoLoCo, model: nn.Module, amount: float) -> RoundResult:
    while True:
        nudge(model, amount)
        result = outer.step()
        if result:
            return result


def test_alone_is_the_solo_outer_step(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        model = make_model(0)
        start = flat(model)
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        result = one_round(outer, model, 0.1)
        assert isinstance(result.outcome, Alone)
        assert torch.allclose(flat(model), start + 0.7 * 0.2, atol=1e-6)
        one_round(outer, model, 0.1)
        assert torch.allclose(flat(model), start + 0.14 + (0.5 * 0.14 + 0.14), atol=1e-6)
        assert (peer.metrics.rounds_here, peer.metrics.alone, peer.metrics.round) == (2, 2, 2)


@pytest.mark.parametrize("codec", [FP32, CodecSpec(), COARSE, COARSER])
def test_a_swap_moves_the_mean_of_a_pair_by_the_mean_of_exact_gradients(tmp_path: Path, codec: CodecSpec) -> None:
    with MemorySwarm(make_spec(codec=codec)) as swarm:
        models = [make_model(1), make_neighbour()]
        before = (flat(models[0]).double() + flat(models[1]).double()) / 2
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0)
            for name, model in zip("ab", models, strict=True)
        ]
        results: list[RoundResult] = []
        amounts = (0.1, 0.2)
        together(
            *(
                lambda outer=outer, model=model, amount=amount: results.append(one_round(outer, model, amount))
                for outer, model, amount in zip(outers, models, amounts, strict=True)
            )
        )
        assert all(isinstance(result.outcome, Swapped) for result in results)
        after = (flat(models[0]).double() + flat(models[1]).double()) / 2
        assert torch.allclose(after, before + 0.7 * (2 * 0.1 + 2 * 0.2) / 2, atol=2e-6)
        if codec == FP32:  # the distance shrinks by 1 - gamma
            apart = flat(models[0]) - flat(models[1])
            assert torch.allclose(apart, 0.3 * (flat(make_model(1)) - flat(make_neighbour())), atol=1e-5)


@pytest.mark.parametrize("weights", ["fp32", "int8", "modulo"])
def test_without_a_late_part_each_adds_its_own_gradient_to_the_middle(tmp_path: Path, weights: str) -> None:
    """A single thread takes both boundaries in turn, so neither may wait."""
    codec = CodecSpec.model_validate({"slow_weights": weights, "outer_gradient": "none"})
    spec = make_spec(codec=codec).with_changes({"outer.alpha": 0.0, "outer.beta": 1.0, "outer.gamma": 1.0})
    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        models, amounts = [make_model(1), make_neighbour()], (0.1, 0.2)  # offsets of half the own outer gradient
        middle = (flat(models[0]).double() + flat(models[1]).double()) / 2
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0)
            for name, model in zip("ab", models, strict=True)
        ]
        for num_rounds in range(1, 4):
            results: list[RoundResult | None] = []
            for step in range(2):
                if step:
                    wait_until(lambda: all(peer.driver.phase is RoundPhase.DONE for peer in swarm.peers))
                for outer, model, amount in zip(outers, models, amounts, strict=True):
                    nudge(model, amount)
                    results.append(outer.step())
            assert results[:2] == [None, None]
            assert all(result and isinstance(result.outcome, Swapped) for result in results[2:])
            after = (flat(models[0]).double() + flat(models[1]).double()) / 2
            assert torch.allclose(after, middle + num_rounds * 0.3, atol=1e-6), "the mean moves by the mean gradient"
            if weights == "fp32":  # the slow weights meet; the gradients stay apart
                assert torch.allclose(flat(models[1]) - flat(models[0]), torch.tensor(0.2), atol=1e-6)


def test_closing_rounds_bring_two_peers_to_the_middle_and_nowhere_else(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        models = [make_model(1), make_neighbour()]
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0, end_at=2 / 100)
            for name, model in zip("ab", models, strict=True)
        ]
        results: list[RoundResult] = []
        together(*(lambda i=i: results.append(one_round(outers[i], models[i], 0.1)) for i in range(2)))
        middle, progress = (flat(models[0]) + flat(models[1])) / 2, [outer.progress for outer in outers]
        for _ in range(2):
            together(*(lambda outer=outer: results.append(outer.closing_round(wait_s=PATIENCE_S)) for outer in outers))
        assert all(isinstance(result.outcome, Swapped) for result in results)
        assert all(torch.allclose(flat(model), middle, atol=1e-6) for model in models)
        assert [outer.progress for outer in outers] == progress
        assert [outer.round for outer in outers] == [3, 3]


def test_a_closing_round_waits_for_who_trains_on_and_not_for_the_last_partner(tmp_path: Path) -> None:
    """Without this rule the first of two pairs would meet in all closing rounds, and finish before the other comes."""
    models = {name: make_model(1) if name in "ac" else make_neighbour() for name in "abcd"}
    outers: dict[str, NoLoCo] = {}
    met: dict[str, str] = {}

    def train(name: str) -> None:
        one_round(outers[name], models[name], 0.1)

    def close(name: str) -> None:
        outcome = outers[name].closing_round(wait_s=PATIENCE_S).outcome
        met[name] = outcome.received.partner if isinstance(outcome, Swapped) else ""

    with MemorySwarm(make_spec()) as swarm:
        for pair in ("ab", "cd"):
            for name in pair:
                peer = swarm.peer(name, run_folder=tmp_path / name)
                outers[name] = NoLoCo(models[name], None, peer, save_every_rounds=0, end_at=2 / 100)
            together(*(partial(train, name) for name in pair))
        first = threading.Thread(target=together, args=[partial(close, "a"), partial(close, "b")])
        first.start()
        first.join(2 * LAST_LOOK_S)
        together(partial(close, "c"), partial(close, "d"))
        first.join(PATIENCE_S)
    assert {met["a"], met["b"]} == {"c", "d"}
    assert met[met["a"]] == "a"


@pytest.mark.parametrize("codec", [FP32, COARSE])
@pytest.mark.parametrize(("rounds_behind", "weight"), [(4, 1.0), (8, 0.5), (16, 0.25)])
def test_an_older_partner_counts_less_on_both_sides_and_the_mean_holds(
    tmp_path: Path, codec: CodecSpec, rounds_behind: int, weight: float
) -> None:
    with MemorySwarm(make_spec(codec=codec)) as swarm:
        models = [make_model(1), make_neighbour()]
        before = (flat(models[0]).double() + flat(models[1]).double()) / 2
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0)
            for name, model in zip("ab", models, strict=True)
        ]
        outers[0].progress = rounds_behind * 2 / 100
        together(
            *(
                lambda outer=outer, model=model: one_round(outer, model, 0.1) and None
                for outer, model in zip(outers, models, strict=True)
            )
        )
        after = (flat(models[0]).double() + flat(models[1]).double()) / 2
        assert torch.allclose(after, before + 0.7 * 0.2, atol=2e-6)
        if codec == FP32:  # closer by the weight of the older one
            apart = flat(models[0]) - flat(models[1])
            expected = (1 - 0.7 * weight) * (flat(make_model(1)) - flat(make_neighbour()))
            assert torch.allclose(apart, expected, atol=1e-5)
        assert outers[0].progress - outers[1].progress == pytest.approx((rounds_behind - 2) * 2 / 100)


def test_with_tokens_weighed_the_gradients_count_by_their_steps(tmp_path: Path) -> None:
    """In rounds of 3 and 1 steps, both get three quarters of the first gradient and a quarter of the second."""
    outer_spec = AUTO.model_copy(update={"weigh_tokens": True, "min_inner_steps": 1})
    spec = make_auto_spec().model_copy(update={"outer": outer_spec})
    with MemorySwarm(spec) as swarm:
        models = [make_model(1), make_model(1)]
        peers = [swarm.peer(name, run_folder=tmp_path / name) for name in "ab"]
        outers = [NoLoCo(model, None, peer, save_every_rounds=0) for model, peer in zip(models, peers, strict=True)]
        for outer, steps in zip(outers, (3, 1), strict=True):
            outer._rounds.length.resume(steps)
        results: list[RoundResult] = []
        together(
            *(
                lambda outer=outer, model=model, amount=amount: results.append(one_round(outer, model, amount))
                for outer, model, amount in zip(outers, models, (0.1, 0.5), strict=True)
            )
        )
        assert all(isinstance(result.outcome, Swapped) for result in results)
        mean = 0.75 * 0.3 + 0.25 * 0.5
        start = flat(make_model(1))
        for model in models:
            assert torch.allclose(flat(model), start + mean, atol=1e-6)


def test_eager_gets_to_the_same_weights_as_waiting(tmp_path: Path) -> None:
    """With max_wait_s = 0 the partner's gradient arrives as a correction, which adds up to the same weights."""
    ends = [
        run_one_round(tmp_path / name, max_wait_s=wait_s) for name, wait_s in (("waiting", PATIENCE_S), ("eager", 0.0))
    ]
    assert torch.allclose(ends[0], ends[1], atol=1e-5)


def run_one_round(folder: Path, *, max_wait_s: float) -> torch.Tensor:
    """Return the weights of peer a after a round of 400 steps. An eager peer reaches its boundary first."""
    with MemorySwarm(make_spec(max_wait_s=max_wait_s, inner_steps=400)) as swarm:
        models = [make_model(1), make_model(2)]
        peers = [swarm.peer(name, run_folder=folder / name) for name in "ab"]
        outers = [NoLoCo(model, None, peer, save_every_rounds=0) for model, peer in zip(models, peers, strict=True)]
        results: dict[int, RoundResult] = {}
        both_have_seen_it = threading.Barrier(2)
        is_eager = max_wait_s == 0

        def run(index: int) -> None:
            result = None
            for step in range(400):
                if step == 399:
                    wait_for_early(outers)
                    both_have_seen_it.wait(PATIENCE_S)
                    wait_until(lambda: not is_eager or index == 0 or 0 in results)
                nudge(models[index], 0.001 * (index + 1))
                result = outers[index].step()
            assert result is not None
            results[index] = result

        together(lambda: run(0), lambda: run(1))
        if is_eager:
            assert isinstance(results[0].outcome, Half)
            correct(outers[0], peers[0])
        else:
            assert isinstance(results[0].outcome, Swapped)
        assert peers[0].metrics.late == (1 if is_eager else 0)
        return flat(models[0])


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    done = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition did not come true")


def correct(outer: NoLoCo, peer: MemoryPeer) -> None:
    """Take inner steps until the late correction is applied, which must not happen while an early part travels.

    A correction that arrived before the next round opened is already applied.
    """

    def can_be_corrected() -> bool:
        return bool(peer.driver.corrections) and peer.driver.phase not in (RoundPhase.OFFERING, RoundPhase.SWAPPING)

    for _ in range(outer.inner_steps - 1):
        if peer.metrics.late:
            return
        wait_until(can_be_corrected)
        outer.step()


def wait_for_early(outers: list[NoLoCo]) -> None:
    def committed() -> bool:
        peers = [outer._peer for outer in outers]
        return all(
            isinstance(peer, MemoryPeer) and peer.driver.phase in (RoundPhase.EARLY, RoundPhase.DONE) for peer in peers
        )

    wait_until(committed)


def test_a_peer_that_pauses_keeps_its_half_of_the_swap_and_its_partner_does_not_wait(tmp_path: Path) -> None:
    """The first peer ends its round after one of four steps; the mean of the pair is as expected."""
    with MemorySwarm(make_spec(inner_steps=4), deadlines=PATIENT) as swarm:
        models = [make_model(1), make_neighbour()]
        before = (flat(models[0]).double() + flat(models[1]).double()) / 2
        peers = [swarm.peer(name, run_folder=tmp_path / name) for name in "ab"]
        outers = [NoLoCo(model, None, peer, save_every_rounds=0) for model, peer in zip(models, peers, strict=True)]
        for outer, model in zip(outers, models, strict=True):
            nudge(model, 0.1)
            outer.step()
        wait_for_early(outers)
        peers[0].driver.peer_state = "paused"
        paused, other = outers[0].withdraw(), one_round(outers[1], models[1], 0.1)
        assert paused is not None
        assert isinstance(paused.outcome, Half)
        assert isinstance(other.outcome, Half)
        assert other.blocked_s < AT_ONCE_S
        after = (flat(models[0]).double() + flat(models[1]).double()) / 2
        assert torch.allclose(after, before + 0.7 * (1 * 0.1 + 4 * 0.1) / 2, atol=2e-6)
        assert outers[0].is_between_rounds


def test_a_peer_that_pauses_alone_goes_on_in_its_round(tmp_path: Path) -> None:
    ends = []
    for pause in (False, True):
        with MemorySwarm(make_spec(inner_steps=4)) as swarm:
            model = make_model(3)
            outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_rounds=0)
            for _ in range(2):
                nudge(model, 0.1)
                outer.step()
            if pause:
                assert outer.withdraw() is None
                assert outer.withdraw() is None, "nothing is open any more"
            nudge(model, 0.1)
            assert outer.step() is None
            nudge(model, 0.1)
            result = outer.step()
            assert result is not None
            assert result.round == 0
            ends.append(flat(model))
    assert torch.equal(*ends)


def test_a_checkpoint_within_a_round_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for stop in (False, True):
        with MemorySwarm(make_spec(inner_steps=4)) as swarm:
            model = make_model(3)
            peer = swarm.peer("a", run_folder=tmp_path / str(stop))
            checkpoints = Checkpoints(tmp_path / "checkpoints" / str(stop))
            outer = NoLoCo(model, None, peer, save_every_rounds=0, checkpoints=checkpoints)
            for step in range(11):
                nudge(model, 0.01 * step)
                outer.step()
                if stop and step == 5:
                    outer.save()
                    swarm.kill(peer)
                    model = make_model(99)
                    peer = swarm.peer("a2", run_folder=tmp_path / "again")
                    outer = NoLoCo(model, None, peer, save_every_rounds=0, checkpoints=checkpoints)
                    assert (outer.round, outer.is_between_rounds, outer.num_steps) == (1, False, 6)
            ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])


def test_each_checkpoint_holds_the_values_of_the_caller(tmp_path: Path) -> None:
    with MemorySwarm(make_spec(inner_steps=2)) as swarm:
        model, seen = make_model(3), []
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(model, None, peer, save_every_rounds=1, meta=lambda: {"seen": len(seen)})
        for step in range(2):
            seen.append(step)
            outer.step()
        outer.save()  # waits for the checkpoint that the round began in the background
        found = [Checkpoint(path).meta["seen"] for path in (tmp_path / "checkpoints").glob("*-round-*")]
        assert len(found) == 2  # one of them began in the background, after a step
        assert set(found) <= {1, 2}
        swarm.kill(peer)
        resumed = NoLoCo(make_model(4), None, swarm.peer("a2", run_folder=tmp_path)).resumed
        assert resumed
        assert resumed.meta["seen"] == 2


# rounds with lengths of their own


def with_length(outer: NoLoCo, inner_steps: int) -> dict[str, Any]:
    """Return the state of a peer whose rounds had this length."""
    state = outer.state_dict()
    state["place"]["inner_steps"] = inner_steps
    return state


@pytest.mark.parametrize("max_wait_s", [20.0, 0.0], ids=["waiting", "eager"])
def test_partners_with_rounds_of_other_lengths_keep_their_mean(tmp_path: Path, max_wait_s: float) -> None:
    """Rounds of 3 and 27 inner steps both count as 9, for which alpha is 0 before the first momentum and beta is 1."""
    with MemorySwarm(make_auto_spec(max_wait_s=max_wait_s)) as swarm:
        models, outers, peers = [], [], []
        for name, make, length in (("a", lambda: make_model(1), 3), ("b", make_neighbour, 27)):
            first = NoLoCo(make(), None, swarm.peer(f"{name}0", run_folder=tmp_path / name), save_every_rounds=0)
            state = with_length(first, length)
            swarm.kill(swarm.peers[-1])
            models.append(make())
            peers.append(swarm.peer(name, run_folder=tmp_path / name))
            outers.append(NoLoCo(models[-1], None, peers[-1], save_every_rounds=0, resume=state))
        assert [outer.inner_steps for outer in outers] == [3, 27]
        before = (flat(models[0]).double() + flat(models[1]).double()) / 2
        ended = threading.Event()
        results: dict[int, RoundResult] = {}

        def run(index: int) -> None:
            for step in range(outers[index].inner_steps):
                if step == outers[index].inner_steps - 1:
                    wait_for_early(outers)
                    early_seen.wait(PATIENCE_S)
                    if index and not max_wait_s:
                        assert ended.wait(PATIENCE_S)  # the late part of b comes after the boundary of a
                nudge(models[index], 0.01 * (index + 1))
                result = outers[index].step()
                if result:
                    results[index] = result
            ended.set()

        early_seen = threading.Barrier(2)
        together(lambda: run(0), lambda: run(1))
        for index, result in results.items():
            assert isinstance(result.outcome, Swapped | Half)
            assert result.outcome.received.agreed.inner_steps == 3
            if isinstance(result.outcome, Half):
                correct(outers[index], peers[index])
        assert peers[0].metrics.late == (0 if max_wait_s else 1)
        after = (flat(models[0]).double() + flat(models[1]).double()) / 2
        assert torch.allclose(after, before + (3 * 0.01 + 27 * 0.02) / 2, atol=5e-6)


def test_a_checkpoint_within_a_round_knows_how_long_it_is(tmp_path: Path) -> None:
    with MemorySwarm(make_auto_spec()) as swarm:
        model = make_model(3)
        first = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_rounds=0)
        state = with_length(first, 13)
        swarm.kill(swarm.peers[-1])
        for _ in range(2):  # resumed when the round opens, and then after 5 steps
            peer = swarm.peer("b", run_folder=tmp_path)
            outer = NoLoCo(model, None, peer, save_every_rounds=0, resume=state)
            assert [outer.step() for _ in range(5)] == [None] * 5
            state = outer.state_dict()
            assert (outer.inner_steps, peer.metrics.inner_steps, peer.exchange.step_rate.inner_steps) == (13, 13, 13)
            swarm.kill(peer)
        outer = NoLoCo(model, None, swarm.peer("c", run_folder=tmp_path), save_every_rounds=0, resume=state)
        assert [outer.step() is not None for _ in range(3)] == [False, False, True]


def test_over_a_fast_link_rounds_become_as_short_as_the_spec_allows(tmp_path: Path) -> None:
    spec = make_auto_spec(max_wait_s=0.0)
    with MemorySwarm(spec) as swarm:
        models = [make_model(1), make_model(2)]
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0)
            for name, model in zip("ab", models, strict=True)
        ]
        is_short = threading.Event()

        def run(index: int) -> None:
            until_s = time.monotonic() + PATIENCE_S
            while not is_short.is_set():
                assert time.monotonic() < until_s, [outer.inner_steps for outer in outers]
                time.sleep(0.05)  # stands in for an inner step
                outers[index].step()
                if all(outer.inner_steps <= 3 for outer in outers):
                    is_short.set()

        together(lambda: run(0), lambda: run(1))


@pytest.mark.parametrize(
    ("ahead", "ends"), [(0.03, (0.02 + 0.015, 0.05 - 0.015)), (0.3, (0.02 + 0.02, 0.32 - 0.02))], ids=["near", "far"]
)
def test_partners_meet_on_the_schedule_by_at_most_a_round(
    tmp_path: Path, ahead: float, ends: tuple[float, float]
) -> None:
    with MemorySwarm(make_spec()) as swarm:
        models = [make_model(1), make_model(1)]
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_rounds=0)
            for name, model in zip("ab", models, strict=True)
        ]
        outers[1].progress = ahead  # a round is 0.02 of the schedule
        together(*(lambda o=o, m=m: one_round(o, m, 0.0) and None for o, m in zip(outers, models, strict=True)))
        assert [outer.progress for outer in outers] == pytest.approx(ends)


@pytest.mark.parametrize("num_hidden", [1, 7, 3000])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_size_of_a_state_file_is_known_before_it_comes(tmp_path: Path, num_hidden: int, alpha: float) -> None:
    with MemorySwarm(make_spec().with_changes({"outer.alpha": alpha})) as swarm:
        model = nn.Linear(3, num_hidden)
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        outer.save()
        saved = peer.states.saved
        assert saved is not None
        num_bytes = state_file_bytes(4 * num_hidden, outer.spec.outer)
        assert saved.path.stat().st_size == num_bytes == saved.manifest.num_bytes


class LeftBehind(MemoryPeer):
    """A peer that once finds most of the swarm far ahead, and can load its state."""

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        if progress > 0.5:
            return None
        num_elements = sum(param.numel() for param in make_model(0).parameters())
        save_file({"slow_weights": torch.ones(num_elements), "outer_momentum": torch.zeros(num_elements)}, target)
        return StateManifest("", num_elements, 70, 0.7, 0, ())


def test_who_is_left_behind_takes_the_state_of_the_swarm_and_goes_on_from_there(tmp_path: Path) -> None:
    """The peer has paused for long within a round, and also drops the steps of that round."""
    with MemorySwarm(make_spec(inner_steps=4)) as swarm:
        model, peer = make_model(5), swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        nudge(model, 0.1)
        outer.step()
        outer.withdraw()
        peer.__class__ = LeftBehind
        nudge(model, 0.1)
        assert outer.step() is None
        assert (outer.round, outer.progress) == (70, pytest.approx(0.71))
        assert torch.equal(flat(model), torch.ones_like(flat(model)))
        assert peer.metrics.catch_ups == 1
        assert one_round(outer, model, 0.1).round == 70
        assert not list(tmp_path.glob("*.safetensors"))


class Liar(MemoryPeer):
    """Serves a newcomer a file of the right size that is no state, or one whose numbers are not finite."""

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        assert target is not None
        num_bytes = state_file_bytes(layout.num_elements, self.spec.outer)
        if self.peer_id == "garbage":
            target.write_bytes(b"\xff" * num_bytes)
        else:
            save_file(
                {"slow_weights": torch.full((layout.num_elements,), torch.nan), "outer_momentum": torch.zeros(1)},
                target,
            )
        return StateManifest(layout.digest(), layout.num_elements, 7, 0.5, num_bytes, ())


@pytest.mark.parametrize("name", ["garbage", "nan"])
def test_a_useless_state_of_a_donor_leaves_the_own_weights(tmp_path: Path, name: str) -> None:
    with MemorySwarm(make_spec()) as swarm:
        peer = swarm.peer(name, run_folder=tmp_path)
        peer.__class__ = Liar
        model = make_model(5)
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        assert torch.equal(flat(model), flat(make_model(5)))
        assert (outer.round, outer.progress, outer.entered) == (0, 0.0, False)
        assert not list(tmp_path.glob("*.safetensors"))


def test_weights_that_are_not_finite_go_back_to_the_start_of_their_round(caplog: pytest.LogCaptureFixture) -> None:
    spec = TrainerSpec(name="nan", outer=OuterSpec(inner_steps=2, max_wait_s=0.1))
    with MemorySwarm(spec) as swarm:
        peer, model = swarm.peer("a"), make_model(1)
        outer = NoLoCo(model, None, peer, save_every_rounds=0)
        nudge(model, 0.5)
        outer.step()
        assert (result := outer.step())
        assert not result.diverged
        before = flat(model)
        nudge(model, float("nan"))
        outer.step()
        assert (result := outer.step())
        assert result.diverged
        assert torch.equal(flat(model), before)
        assert peer.metrics.diverged == 1
        nudge(model, 0.5)
        outer.step()
        assert (result := outer.step())
        assert not result.diverged
        assert torch.allclose(flat(model), before + 0.5)
    assert "this peer's weights were non-finite" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_state_of_other_numbers_than_fp32_is_refused(dtype: torch.dtype) -> None:
    with MemorySwarm(make_spec()) as swarm:
        outer = NoLoCo(make_model(1), None, swarm.peer("a"), save_every_rounds=0)
        given = {name: vector.to(dtype) for name, vector in outer._state.tensors().items()}
        with pytest.raises(CheckpointError, match="instead of float32"):
            outer._state.take(given)


class Sketched:
    """Records the calls that a NoLoCo makes about its slow weights; they may change only after such a call."""

    def __init__(self, peer: MemoryPeer) -> None:
        self.steps: list[tuple[float, bool]] = []  # (progress, at_rest)
        self.changes = 0
        self._weights: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        peer.sketch = self.sketch
        peer.weights_change = self.weights_change

    def sketch(self, slow_weights: torch.Tensor, *, progress: float, at_rest: bool) -> None:
        self.steps.append((progress, at_rest))
        self._weights, self._before = slow_weights, slow_weights.clone()

    def weights_change(self) -> None:
        self.changes += 1
        self.check()

    def check(self) -> None:
        if self._weights is not None and self._before is not None:
            assert torch.equal(self._weights, self._before), "they changed without a word"
        self._weights = None


def test_every_outer_step_is_told_with_the_same_progress_to_both_and_before_the_weights_change(tmp_path: Path) -> None:
    """The partners start one and a half rounds apart and take three more rounds, two of which are closing rounds."""
    with MemorySwarm(make_spec()) as swarm:
        models, peers = [make_model(1), make_neighbour()], [swarm.peer(name, run_folder=tmp_path) for name in "ab"]
        told = [Sketched(peer) for peer in peers]
        outers = [
            NoLoCo(model, None, peer, save_every_rounds=0, end_at=0.051)
            for model, peer in zip(models, peers, strict=True)
        ]
        outers[1].progress = 0.03  # a round is 0.02 of the schedule
        together(*(lambda o=o, m=m: one_round(o, m, 0.1) and None for o, m in zip(outers, models, strict=True)))
        for own in told:
            assert own.steps == [(pytest.approx(0.015 + 0.02), False)]
        for _ in range(2):
            together(*(lambda outer=outer: outer.closing_round(wait_s=20.0) and None for outer in outers))
        for own in told:
            own.check()
            assert [at_rest for _, at_rest in own.steps] == [False, True, True]
            assert own.changes == 3


def test_the_last_round_of_a_peer_that_closes_with_nobody_is_at_rest(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        model, told = make_model(1), Sketched(peer)
        outer = NoLoCo(model, None, peer, save_every_rounds=0, end_at=0.04)
        for _ in range(2):
            one_round(outer, model, 0.1)
        assert [at_rest for _, at_rest in told.steps] == [False, True]


def test_a_late_correction_is_announced_before_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    correction = SimpleNamespace(gradient=None, agreed=Agreement(1), partner="b", round=0)
    monkeypatch.setattr(OuterState, "correct", lambda *_, **__: story.append("correct"))
    with MemorySwarm(make_spec()) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        monkeypatch.setattr(peer, "weights_change", lambda: story.append("change"))
        outer = NoLoCo(make_model(1), None, peer, save_every_rounds=0)
        came = [correction]
        monkeypatch.setattr(peer.exchange, "late", lambda round_index: came.pop() if came else None)
        outer.step()
    assert story == ["change", "correct"]


@pytest.mark.parametrize("place", ["collect", "stage"])
def test_a_step_that_is_interrupted_at_its_boundary_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with MemorySwarm(make_spec(max_wait_s=0.2)) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(make_model(1), None, peer, save_every_rounds=0)
        assert outer.step() is None
        monkeypatch.setattr(peer.exchange, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            outer.step()
        results = [outer.step() for _ in range(3)]
    assert [result.round if result else None for result in results] == [0, None, 1]


def test_a_late_part_that_waits_is_applied_before_the_next_round_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    with MemorySwarm(make_spec(max_wait_s=0.2)) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(make_model(1), None, peer, save_every_rounds=0)
        real_open = peer.exchange.open
        monkeypatch.setattr(peer.exchange, "late", lambda round_index: story.append("late"))
        monkeypatch.setattr(
            peer.exchange, "open", lambda *args, **named: (story.append("open"), real_open(*args, **named))
        )
        outer.closing_round(wait_s=0.1)
    assert story[:2] == ["late", "open"]
