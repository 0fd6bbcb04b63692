"""NoLoCo around a training loop: peers in memory, with the real exchange, swaps and codecs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from harness.patience import PATIENCE_S
from harness.processes import until
from harness.specs import published
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.mixing import closing_mixings
from noloco_p2p.outer.noloco import NoLoCo, Swapped
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm
from noloco_p2p.transfer.donor import state_file_bytes

STEP_S = 0.005


def make_spec(*, codec: str = "fp32", outer: OuterSpec | None = None) -> RunSpec:
    outer = outer or OuterSpec(min_inner_steps=1)
    return RunSpec(name="test", outer=outer, codec=CodecSpec.model_validate({"weights": codec}), total_steps=1000)


def make_model(seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 50, device="cpu"), nn.Tanh(), nn.Linear(50, 2, device="cpu")).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().reshape(-1) for param in model.parameters()])


def nudge(model: nn.Module, amount: float) -> None:
    """Stand in for an inner step."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(amount)


def together(*actions: Callable[[], object]) -> None:
    """Run each action in a thread, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], object]) -> None:
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


def open_filter(outer: NoLoCo) -> None:
    """Clip nothing: replicas that train in opposite directions for no reason are not honest replicas of one run."""
    patch = pytest.MonkeyPatch()  # refuses names that do not exist; no filter outlives its test
    patch.setattr(outer.weights.filter, "_scale", math.inf)
    for name in ("_cosine", "_pull"):
        patch.setattr(outer.weights.filter, name, lambda *sketches: 0.0)


class Replica:
    """A model and its NoLoCo. A step of its optimizer adds a known amount, so the mean of a swarm is known."""

    def __init__(self, swarm: MemorySwarm, name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.swaps: list[Swapped] = []
        self.model = make_model(1, dtype=dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.peer = swarm.peer(name, run_folder=folder / name)
        self.outer = NoLoCo(self.model, self.optimizer, self.peer, save_every_s=0, on_swap=self.swaps.append)
        open_filter(self.outer)

    def train(self, num_steps: int, amount: float) -> None:
        wait = threading.Event()
        for _ in range(num_steps):
            for param in self.model.parameters():
                param.grad = torch.full_like(param, -amount)
            self.optimizer.step()
            wait.wait(STEP_S)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "modulo"])
def test_replicas_stay_together_and_their_mean_is_that_of_their_steps(tmp_path: Path, codec: str) -> None:
    with MemorySwarm(make_spec(codec=codec)) as swarm:
        replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b", "c")]
        amounts, start = (1e-3, -2e-3, 4e-3), flat(make_model(1))
        together(*(lambda r=r, a=a: r.train(300, a) for r, a in zip(replicas, amounts, strict=True)))
        together(*(replica.outer.close for replica in replicas))
        ends = torch.stack([flat(replica.model) for replica in replicas])
    assert all(len(replica.swaps) > 5 for replica in replicas)
    assert str(Swapped("12D3KooWabcdef", 0.125, 2, 0.31, 1.0)) == (
        "swapped 12 % of the weights with ..abcdef in 0.31 s, 2 steps old"
    )
    torch.testing.assert_close(ends.mean(0) - start, torch.full_like(start, 0.3), rtol=0.0, atol=2e-5)
    assert float((ends - ends.mean(0)).abs().max()) < 0.2  # without swaps, they would be up to 1.8 apart


def test_steps_of_bf16_weights_are_mixed_without_a_bias(tmp_path: Path) -> None:
    """Each step is a fifth of the distance between two bf16 numbers, so only half-differences move the second peer."""
    with MemorySwarm(make_spec(codec="bf16")) as swarm:
        replicas = [Replica(swarm, name, tmp_path, dtype=torch.bfloat16) for name in ("a", "b")]
        with torch.no_grad():
            for param in replicas[0].model.parameters():
                param.add_(0.02)
        before = torch.stack([flat(replica.model) for replica in replicas]).mean()
        together(*(lambda r=r: r.train(60, 0.0) for r in replicas))
        after = torch.stack([flat(replica.model) for replica in replicas])
    assert float(after.mean()) == pytest.approx(float(before), abs=1e-4)


def test_a_swap_is_told_and_measured(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b")]
        together(*(lambda r=r, a=a: r.train(200, a) for r, a in zip(replicas, (1e-3, -1e-3), strict=True)))
        swap, metrics = replicas[0].swaps[-1], replicas[0].peer.metrics
        assert (swap.partner, metrics.last_partner, metrics.step) == ("b", "b", 200)
        assert 0 < swap.share <= 1
        assert 0 <= swap.age_steps <= 100
        assert metrics.apart is not None
        assert 0 < metrics.apart < 0.1
        assert metrics.blocked_s > 0
        assert replicas[0].peer.service.counts.swaps >= len(replicas[0].swaps)


def test_a_compiled_model_is_not_compiled_again_at_swaps(tmp_path: Path) -> None:
    """Guards, not the backend, decide whether a model is compiled again."""
    backend, inputs = CompileCounter(), torch.ones(4, 6)

    def train(replica: Replica, forward: Callable[[Tensor], Tensor], num_steps: int) -> None:
        wait = threading.Event()
        for _ in range(num_steps):
            replica.optimizer.zero_grad()
            forward(inputs).sum().mul(1e-4).backward()
            replica.optimizer.step()
            wait.wait(STEP_S)

    with MemorySwarm(make_spec()) as swarm:
        one, other = (Replica(swarm, name, tmp_path) for name in ("a", "b"))
        compiled = torch.compile(one.model, backend=backend)
        train(one, compiled, 1)
        assert backend.frame_count == 1
        together(lambda: train(one, compiled, 200), lambda: train(other, other.model, 200))
        assert len(one.swaps) > 5
        assert backend.frame_count == 1


def test_closing_swaps_bring_peers_to_their_mean(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b", "c", "d")]
        together(*(lambda r=r, a=a: r.train(30, a) for r, a in zip(replicas, (1e-3, 2e-3, 3e-3, 4e-3), strict=True)))
        before = torch.stack([flat(replica.model) for replica in replicas])
        progress = [replica.outer.progress for replica in replicas]
        together(*(replica.outer.close for replica in replicas))
        after = torch.stack([flat(replica.model) for replica in replicas])
        assert [replica.outer.progress for replica in replicas] == progress
    assert float((after - after.mean(0)).norm()) < 0.5 * float((before - before.mean(0)).norm()) + 1e-6
    torch.testing.assert_close(after.mean(0), flat(make_model(1)) + 30 * 2.5e-3, rtol=0.0, atol=1e-5)


def test_those_who_need_no_more_closing_swaps_answer_the_last_one(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        *first, last = replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b", "c")]
        nudge(last.model, 1.0)

        def close_late() -> None:
            until(lambda: all(replica.outer._exchange.only_answers for replica in first), what="peers that are close")
            last.outer.close()

        together(close_late, *(replica.outer.close for replica in first))
        ends = torch.stack([flat(replica.model) for replica in replicas])
    assert float((ends - ends.mean(0)).abs().max()) < 0.1


def test_a_peer_that_never_has_enough_closing_swaps_does_not_hold_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemorySwarm(make_spec()) as swarm:
        liar, honest = (Replica(swarm, name, tmp_path) for name in ("a", "b"))
        monkeypatch.setattr(liar.outer._mixing, "missing_mixings", lambda: 1)
        monkeypatch.setattr("noloco_p2p.outer.noloco.CLOSING_WAIT_S", 1.0)
        is_over = threading.Event()

        def close() -> None:
            honest.outer.close()
            is_over.set()
            liar.peer.leave_requested.set()

        together(liar.outer.close, close)
    assert is_over.is_set()


def test_a_peer_alone_ends_its_closing_swaps_at_once(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        replica = Replica(swarm, "a", tmp_path)
        replica.train(3, 1e-3)
        replica.outer.close()
        assert not replica.swaps


@pytest.mark.parametrize(("num_peers", "expected"), [(1, 0), (2, 4), (3, 5), (8, 6), (9, 7)])
def test_mixings_grow_with_the_logarithm_of_the_peers(num_peers: int, expected: int) -> None:
    assert closing_mixings(OuterSpec(), num_peers) == expected


def test_a_pause_ends_the_swaps_and_loses_none(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b")]
        together(*(lambda r=r, a=a: r.train(30, a) for r, a in zip(replicas, (1e-3, 3e-3), strict=True)))
        together(*(r.outer.pause for r in replicas))
        counts = [replica.peer.service.counts.swaps for replica in replicas]
        assert [len(replica.swaps) for replica in replicas] == counts
        mean = torch.stack([flat(replica.model) for replica in replicas]).mean(0)
        torch.testing.assert_close(mean, flat(make_model(1)) + 0.06, rtol=0.0, atol=1e-5)
        replicas[0].train(20, 0.0)
        assert replicas[0].peer.service.counts.swaps == counts[0]
        for replica in replicas:
            replica.peer.service.state = "training"
        together(*(lambda r=r: r.train(300, 1e-3) for r in replicas))
        assert replicas[0].peer.service.counts.swaps > counts[0]


# the outer step


def test_alone_is_the_solo_outer_step(tmp_path: Path) -> None:
    spec = make_spec(outer=published(inner_steps=2))
    with MemorySwarm(spec) as swarm:
        model = make_model(0)
        start = flat(model)
        outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        moves = []
        for _ in range(4):
            nudge(model, 0.1)
            outer.step()
            moves.append(float((flat(model) - start).mean()))
    assert moves == pytest.approx([0.1, 0.14, 0.24, 0.14 + 0.07 + 0.14], abs=1e-6)


@pytest.mark.parametrize("gamma", [None, 0.9])
@pytest.mark.parametrize("swap_momentum", [False, True])
def test_with_wait_two_peers_take_the_step_of_the_paper(
    tmp_path: Path, gamma: float | None, swap_momentum: bool
) -> None:
    """The first outer step begins at equal weights, and the second one at different momenta and weights."""
    outer = published(inner_steps=2, wait=True, max_wait_s=PATIENCE_S, gamma=gamma, swap_momentum=swap_momentum)
    with MemorySwarm(make_spec(outer=outer)) as swarm:
        models = [make_model(1), make_model(1)]
        nudge(models[1], 0.02)
        starts = [flat(model) for model in models]
        outers = [
            NoLoCo(model, None, swarm.peer(name, run_folder=tmp_path / name), save_every_s=0)
            for name, model in zip("ab", models, strict=True)
        ]

        def train(index: int) -> None:
            for _ in range(4):
                nudge(models[index], (0.05, 0.03)[index])
                outers[index].step()

        for each in outers:
            open_filter(each)
        together(lambda: train(0), lambda: train(1))
        phis, momenta, pull = [*starts], [torch.zeros_like(starts[0])] * 2, 0.7 if gamma is None else gamma
        for _ in range(2):
            deltas = [torch.full_like(phis[0], 0.1), torch.full_like(phis[0], 0.06)]
            mean_phi, mean_delta, mean_momentum = sum(phis) / 2, sum(deltas) / 2, sum(momenta) / 2
            kept = [mean_momentum] * 2 if swap_momentum else momenta
            momenta = [
                0.5 * old + 0.7 * mean_delta + pull * (mean_phi - phi) for old, phi in zip(kept, phis, strict=True)
            ]
            phis = [phi + momentum for phi, momentum in zip(phis, momenta, strict=True)]
        for model, expected in zip(models, phis, strict=True):
            torch.testing.assert_close(flat(model), expected, rtol=0.0, atol=1e-6)


def test_without_a_partner_a_waiting_peer_goes_on_after_its_time(tmp_path: Path) -> None:
    outer = published(inner_steps=2, wait=True, max_wait_s=0.05)
    with MemorySwarm(make_spec(outer=outer)) as swarm:
        swarm.peer("b")  # has no model
        model = make_model(0)
        mine = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        start = flat(model)
        for _ in range(2):
            nudge(model, 0.1)
            mine.step()
        assert float((flat(model) - start).mean()) == pytest.approx(0.14, abs=1e-6)


def test_a_request_to_leave_ends_the_wait(tmp_path: Path) -> None:
    outer = published(inner_steps=1, wait=True, max_wait_s=PATIENCE_S)
    with MemorySwarm(make_spec(outer=outer)) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        mine = NoLoCo(make_model(0), None, peer, save_every_s=0)
        threading.Timer(0.1, peer.service.hurry).start()
        mine.step()
        assert peer.metrics.blocked_s < PATIENCE_S / 2


# states


@pytest.mark.parametrize("num_hidden", [1, 7, 3000])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_size_of_a_state_file_is_known_before_it_comes(tmp_path: Path, num_hidden: int, alpha: float) -> None:
    with MemorySwarm(make_spec(outer=OuterSpec(alpha=alpha))) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(nn.Linear(3, num_hidden), None, peer, save_every_s=0)
        outer.save()
        saved = peer.states.saved
        assert saved is not None
        num_bytes = state_file_bytes(4 * num_hidden, outer.spec.outer)
        assert saved.path.stat().st_size == num_bytes == saved.manifest.num_bytes


class LeftBehind(MemoryPeer):
    """A peer that once finds most of the swarm far ahead, and can load its state."""

    first_offers_at: tuple[float, ...] = ()

    def begin_swaps(self, num_elements: int, *, progress: float) -> Exchange:
        exchange = super().begin_swaps(num_elements, progress=progress)
        self.first_offers_at = *self.first_offers_at, exchange.progress
        return exchange

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        if progress > 0.5:
            return None
        num_elements = flat(make_model(0)).numel()
        save_file({"weights": torch.ones(num_elements)}, target)
        return StateManifest("", num_elements, 0.7, 0, ())


def test_who_is_left_behind_takes_the_state_of_the_swarm_and_goes_on_from_there(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        model, peer = make_model(5), swarm.peer("a", run_folder=tmp_path)
        peer.__class__ = LeftBehind
        outer = NoLoCo(model, None, peer, save_every_s=0)
        outer.step()
        assert outer.progress == pytest.approx(0.7)
        assert torch.equal(flat(model), torch.ones_like(flat(model)))
        assert peer.metrics.catch_ups == 1
        assert isinstance(peer, LeftBehind)
        assert peer.first_offers_at == (0.0, 0.7)
        outer.step()
        assert outer.progress == pytest.approx(0.701)
        assert not list(tmp_path.glob("*.safetensors"))


class Newcomer(MemoryPeer):
    """Fetches ones, and asks for their loss on its own data."""

    loss = 0.0

    def enter(
        self, *, layout: ModelLayout, target: Path | None, loss_of: Callable[[Path], float] | None = None
    ) -> StateManifest | None:
        assert target is not None
        assert loss_of is not None
        save_file({"weights": torch.ones(layout.num_elements)}, target)
        self.loss = loss_of(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fetched_state_is_judged_while_the_model_keeps_its_own_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    with MemorySwarm(make_spec()) as swarm:
        model, peer = make_model(5).to(dtype), swarm.peer("a", run_folder=tmp_path)
        peer.__class__ = Newcomer
        before, places = flat(model), [param.data_ptr() for param in model.parameters()]
        NoLoCo(model, None, peer, save_every_s=0, loss=lambda: float(flat(model).mean()))
        assert cast(Newcomer, peer).loss == 1.0
        assert torch.equal(flat(model), before)
        assert [param.data_ptr() for param in model.parameters()] == places


class Liar(MemoryPeer):
    """Serves a newcomer a file of the right size that is no state, or one whose numbers are not finite."""

    def enter(
        self, *, layout: ModelLayout, target: Path | None, loss_of: Callable[[Path], float] | None = None
    ) -> StateManifest | None:
        assert target is not None
        num_bytes = state_file_bytes(layout.num_elements, self.spec.outer)
        if self.peer_id == "garbage":
            target.write_bytes(b"\xff" * num_bytes)
        else:
            save_file({"weights": torch.full((layout.num_elements,), torch.nan)}, target)
        return StateManifest(layout.digest(), layout.num_elements, 0.5, num_bytes, ())


@pytest.mark.parametrize("name", ["garbage", "nan"])
def test_a_newcomer_with_a_useless_state_does_not_train(tmp_path: Path, name: str) -> None:
    with MemorySwarm(make_spec()) as swarm:
        peer = swarm.peer(name, run_folder=tmp_path)
        peer.__class__ = Liar
        model = make_model(5)
        with pytest.raises(CheckpointError, match="cannot use the fetched state"):
            NoLoCo(model, None, peer, save_every_s=0)
        assert torch.equal(flat(model), flat(make_model(5)))
        assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_state_of_other_numbers_than_fp32_is_refused(dtype: torch.dtype) -> None:
    with MemorySwarm(make_spec()) as swarm:
        outer = NoLoCo(make_model(1), None, swarm.peer("a"), save_every_s=0)
        given = {name: vector.to(dtype) for name, vector in outer.weights.tensors().items()}
        with pytest.raises(CheckpointError, match="instead of float32"):
            outer.weights.take(given)


def test_a_model_of_doubles_comes_back_bit_for_bit(tmp_path: Path) -> None:
    with MemorySwarm(make_spec()) as swarm:
        model, again = make_model(1, dtype=torch.float64), make_model(2, dtype=torch.float64)
        nudge(model, 1e-12)
        NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0).save()
        NoLoCo(again, None, swarm.peer("b", run_folder=tmp_path), save_every_s=0)
        assert torch.equal(flat(again), flat(model))


@pytest.fixture
def other_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("other_default_dtype", [torch.float64, torch.bfloat16], indirect=True)
@pytest.mark.parametrize("codec", ["int8", "modulo"])
@pytest.mark.usefixtures("other_default_dtype")
def test_the_defaults_of_a_script_for_new_tensors_change_nothing(tmp_path: Path, codec: str) -> None:
    """A script may call `torch.set_default_dtype` and `torch.set_default_device`."""

    def run(replica: Replica, amount: float) -> None:
        with torch.device("meta"):  # the default device of this thread; whatever is made there has no values
            replica.train(100, amount)
            replica.outer.close()
            replica.outer.save()

    spec = make_spec(codec=codec, outer=published(inner_steps=5, wait=True, max_wait_s=PATIENCE_S))
    with MemorySwarm(spec) as swarm:
        with torch.device("meta"):
            replicas = [Replica(swarm, name, tmp_path) for name in ("a", "b")]
        together(*(lambda r=r, a=a: run(r, a) for r, a in zip(replicas, (1e-3, -1e-3), strict=True)))
        assert all(len(replica.swaps) > 2 for replica in replicas)
        a, b = (flat(replica.model) for replica in replicas)
        assert float((a - b).abs().max()) < 0.05
    with MemorySwarm(spec) as swarm, torch.device("meta"):
        again = Replica(swarm, "a", tmp_path)
        assert torch.equal(flat(again.model), a)
