"""The inner optimizer's momentum, averaged with a partner's: what moves, what never does, and what a liar can do."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.patience import PATIENCE_S, PATIENT
from harness.rounds import together, wait_until
from harness.specs import FP32, published
from harness.swapped import received
from torch import Tensor, nn

from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Received, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.optim.muon import Muon
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.optimizer_state import TorchOptimizers
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.outer.update_filter import LossCheck, UpdateFilter
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

INNER = SectionName.INNER_MOMENTUM
EXACT = FP32.model_copy(update={"inner_momentum": "fp32"})
SECRET_PARTNER = 7


class Replica:
    """Muon for one matrix of over a chunk, AdamW for the rest, as `noloco join` has them; `num_steps` on noise."""

    def __init__(self, seed: int, *, num_steps: int = 3) -> None:
        noise = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 3))
        matrix, *rest = self.model.parameters()
        optimizers = [Muon([matrix], lr=1e-3, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=1e-3)]
        for _ in range(num_steps):
            for param in self.model.parameters():
                param.grad = torch.randn(param.shape, generator=noise)
            for optimizer in optimizers:
                optimizer.step()
        self.inner = TorchOptimizers(optimizers, dict(self.model.named_parameters()))
        self.state = OuterState(self.model, published(inner_momentum="swap"), inner=self.inner)
        self.state.begin_round()

    def sections(self) -> dict[SectionName, Tensor]:
        return {INNER: self.state.sections()[INNER].clone()}

    def momentum(self) -> Tensor:
        """Of now, flat; 0 where there is none."""
        self.state.begin_round()
        return self.state.sections()[INNER].clone()


def mixed(
    replica: Replica, partner: dict[SectionName, Tensor], *, codec: CodecSpec = EXACT, weight: float = 1.0
) -> Tensor:
    agreed = Agreement(3.0, weight=weight)
    replica.state.mix_inner_momentum(received(replica.sections(), partner, codec=codec, agreed=agreed))
    return replica.momentum()


def test_it_holds_the_first_moment_of_each_parameter_whatever_optimizer_has_it() -> None:
    replica = Replica(1)
    moments = replica.inner.state()
    expected = [moments["momentum_buffer/0.weight"], *(moments[f"exp_avg/{name}"] for name in ("0.bias", "1.weight"))]
    flat = torch.cat([moment.reshape(-1) for moment in (*expected, moments["exp_avg/1.bias"])])
    assert torch.equal(replica.momentum(), flat)
    assert bool((flat != 0).all())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_mean_of_a_pair_stays_where_it_was_whatever_the_codec(codec: str, weight: float) -> None:
    one, other = Replica(1), Replica(2)
    before = one.momentum().double() + other.momentum().double()
    apart = (one.momentum() - other.momentum()).norm()
    theirs, ours = other.sections(), one.sections()
    coded = CodecSpec.model_validate({**FP32.model_dump(), "inner_momentum": codec})
    after = sum(
        mixed(replica, partner, codec=coded, weight=weight).double()
        for replica, partner in ((one, theirs), (other, ours))
    )
    rounding = 2**-22 * before.abs().max()
    assert float((after - before).abs().max()) <= rounding
    left = (one.momentum() - other.momentum()).norm() / apart
    assert abs(float(left) - (1 - weight)) < 0.15, "they came together, but for the errors of the codec"


def test_what_was_added_since_the_round_began_stays() -> None:
    replica, partner = Replica(1), Replica(2)
    swapped = received(replica.sections(), partner.sections(), codec=EXACT)
    with torch.no_grad():
        for key, moment in replica.inner.state().items():
            if moment.ndim and "sq" not in key:
                moment.add_(10.0)
    changed = replica.momentum()
    replica.state.mix_inner_momentum(swapped)
    twin = Replica(1)
    assert torch.allclose(
        replica.momentum() - changed, mixed(twin, partner.sections()) - Replica(1).momentum(), atol=2e-6
    )


@pytest.mark.parametrize("scale", [-1.0, -1e30, 1e30, 0.0])
def test_a_liar_can_take_the_momentum_away_and_never_turn_it_around(scale: float) -> None:
    replica = Replica(1)
    own = replica.momentum()
    after = mixed(replica, {INNER: own * scale})
    for _, place in replica.state.gating.pieces.in_chunk[-1]:
        start = len(own) - replica.state.gating.pieces.in_chunk[-1][-1][1].stop
        mine, left = own[start:][place], after[start:][place]
        assert float(left.norm()) <= float(mine.norm()) * 1.001
        assert float(left @ mine) >= -1e-6 * float(mine @ mine)


def test_noise_of_any_length_leaves_the_momentum_on_its_own_side() -> None:
    for size in (1e-3, 1.0, 1e20):
        replica = Replica(1)
        own = replica.momentum()
        lie = torch.randn(len(own), generator=torch.Generator().manual_seed(SECRET_PARTNER)) * size
        after = mixed(replica, {INNER: lie})
        assert float(after.norm()) <= float(own.norm()) * 1.001
        assert float(torch.cosine_similarity(after, own, dim=0)) > 0.6


def test_a_newcomer_without_momentum_neither_takes_nor_costs_any() -> None:
    newcomer, partner = Replica(1, num_steps=0), Replica(2)
    before = partner.momentum()
    theirs, ours = partner.sections(), newcomer.sections()
    assert torch.equal(mixed(partner, ours), before)
    assert not mixed(newcomer, theirs).any()
    assert not newcomer.inner.state()


@pytest.mark.parametrize(("rise", "is_kept"), [(1.0, True), (-1.0, False)])
def test_a_swap_that_the_loss_check_undoes_leaves_the_momentum_alone(rise: float, is_kept: bool) -> None:
    replica, partner = Replica(1), Replica(2)
    before = replica.momentum()
    swap: Received = received(replica.sections(), partner.sections())
    gate = UpdateFilter(replica.state, Metrics(), LossCheck(lambda: 1.0, rise))
    outcome, diverged = gate.step(Half(swap, "no gradient"), is_closing=False)
    assert not diverged
    assert isinstance(outcome, Half if is_kept else Alone)
    assert torch.equal(replica.momentum(), before) is not is_kept


# rounds


def test_a_round_averages_the_momentum_as_it_was_when_it_began(tmp_path: Path) -> None:
    """Gradients of 1 here and -1 there, SGD with momentum 0.5: all numbers are exact. Outer gradients do not travel,
    as those of partners so far apart are refused."""
    codec = EXACT.model_copy(update={"outer_gradient": "none"})
    spec = RunSpec(name="inner", codec=codec, outer=OuterSpec(inner_steps=2, inner_momentum="swap"))
    step_together = threading.Barrier(2)

    def train(peer: MemoryPeer, gradient: float) -> list[float]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
        inner = TorchOptimizers([optimizer], dict(model.named_parameters()))  # its steps are not counted
        outer = NoLoCo(model, inner, peer, save_every_rounds=0)
        seen = []
        for step in range(4):
            for param in model.parameters():
                param.grad = torch.full_like(param, gradient)
            optimizer.step()
            if step % 2:
                wait_until(lambda: peer.driver.phase is RoundPhase.DONE)
                step_together.wait(PATIENCE_S)
            if result := outer.step():
                assert isinstance(result.outcome, Swapped), result
                seen.append(float(optimizer.state[model.bias]["momentum_buffer"][0]))
        return seen

    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        peers = [swarm.peer(name, run_folder=tmp_path / name) for name in "ab"]
        here, there = together(*(partial(train, *each) for each in zip(peers, (1.0, -1.0), strict=True)))
    # The first round begins after the first step, with 1 and -1: half of the distance is -1, and the second step has
    # made 1.5 of the 1. The next round begins with 0.5 and -0.5, and two steps make 1.625 of that.
    assert here == [0.5, 1.125]
    assert there == [-0.5, -1.125]


def test_an_optimizer_that_noloco_does_not_know_is_refused_in_words() -> None:
    spec = RunSpec(name="inner", codec=EXACT, outer=published(inner_momentum="swap"))
    with MemorySwarm(spec) as swarm, pytest.raises(SettingsError, match="give NoLoCo that optimizer"):
        NoLoCo(nn.Linear(2, 2), None, swarm.peer("a"))
