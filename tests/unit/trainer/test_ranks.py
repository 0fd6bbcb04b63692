"""One model over several processes, on the CPU, trains as in one process, and is one vector for the outer step."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT
from harness.processes import free_port
from harness.specs import published
from safetensors.torch import load_file, save_file
from torch import Tensor

from noloco_p2p.errors import RankError
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.weights import Weights
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import DataSpec, ModelSpec, TrainerSpec, TrainSpec
from noloco_p2p.testing.peers import MemorySwarm
from noloco_p2p.trainer import chunked_loss
from noloco_p2p.trainer.compute import Compute
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model
from noloco_p2p.trainer.ranks import Ranks, told
from noloco_p2p.trainer.sharded import ShardedParameters, ShardedStep, follow, shard

SPEC = TrainerSpec(
    name="ranks",
    model=ModelSpec(vocab_size=99, hidden_size=20, num_layers=2, num_heads=2, mlp_size=30),  # no size is divisible by 3
    data=DataSpec(sequence_length=16),
    train=TrainSpec(warmup_steps=1, total_steps=50, weight_decay=0.1),
    outer=published(),
)
CPU = torch.device("cpu")
SHARDED_STEP_S = 0.05  # what two ranks take about for a step

pytestmark = pytest.mark.slow


def batch(step: int) -> Tensor:
    """Return five sequences, which no number of ranks divides."""
    return torch.randint(0, 99, (5, 16), generator=torch.Generator().manual_seed(step))


def train(inner: InnerStep, weights: Weights, steps: range) -> list[float]:
    """Take inner steps, with an evaluation and an outer step after the second one."""
    losses = []
    for step in steps:
        losses.append(float(inner(batch(step), progress=step / 50, seed=step)))
        if step == 1:
            losses.append(inner.evaluate([batch(90), batch(91)]))
            weights.outer_step()
    return losses


def plain(steps: range, spec: TrainerSpec) -> tuple[list[float], dict[str, Tensor]]:
    model = build_model(SPEC.model, sequence_length=16)
    inner, weights = InnerStep(model, spec.train), Weights(FlatParameters(model), spec.outer)
    losses = train(inner, weights, steps)
    return losses, {**inner.state(), **weights.parameters.named_values()}


def follow_rank_0(ranks: Ranks) -> None:
    follow(ranks, PeerSettings(micro_batch=1))


def one_rank(
    rank: int, size: int, port: int, act: Callable[[Ranks], None], others: Callable[[Ranks], None] = follow_rank_0
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Ranks(rank, size, CPU) as ranks:
        (others if rank else act)(ranks)


def lead(ranks: Ranks, spec: TrainerSpec = SPEC) -> tuple[ShardedStep, ShardedParameters]:
    ranks.share(spec.model_dump(mode="json"))
    model = build_model(SPEC.model, sequence_length=16)
    compute = Compute(micro_batch=1, num_ranks=ranks.size)
    layout = FlatParameters(model).model_layout
    shard(model, ranks, compute)
    inner = ShardedStep(model, spec.train, compute, ranks)
    return inner, ShardedParameters(inner, layout=layout)


def train_sharded(ranks: Ranks, spec: TrainerSpec, steps: range, resume: Path | None, to: Path) -> None:
    inner, parameters = lead(ranks, spec)
    weights, names = Weights(parameters, spec.outer), set(parameters.named_values())
    if resume:
        kept = load_file(resume)
        parameters.take({name: value for name, value in kept.items() if name in names})
        inner.restore({key: value for key, value in kept.items() if key not in names and key != "losses"})
    losses = torch.tensor(train(inner, weights, steps))
    save_file({"losses": losses, **inner.state(), **parameters.named_values()}, to)


def run_ranks(
    size: int,
    act: Callable[[Ranks], None],
    others: Callable[[Ranks], None] = follow_rank_0,
    *,
    others_exit_with: int = 0,
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["noloco_p2p.trainer.sharded"])
    port = free_port()
    processes = [context.Process(target=one_rank, args=(rank, size, port, act, others)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] + [others_exit_with] * (size - 1)


def sharded(
    size: int, steps: range, to: Path, resume: Path | None = None, spec: TrainerSpec = SPEC
) -> dict[str, Tensor]:
    run_ranks(size, partial(train_sharded, spec=spec, steps=steps, resume=resume, to=to))
    return load_file(to)


@pytest.mark.parametrize(
    ("optimizer", "atol"),
    [("adamw", 2e-5), ("muon", 1e-4)],  # Muon iterates in bf16; separate parts of a matrix are 1e-3 off
)
def test_ranks_train_the_model_that_one_process_trains(tmp_path: Path, optimizer: str, atol: float) -> None:
    """This includes micro-batches, clipping, evaluation, the outer step and the state of the optimizer."""
    spec = SPEC.with_changes({"train.inner_optimizer": optimizer})
    found = sharded(3, range(4), tmp_path / "whole", spec=spec)
    losses, expected = plain(range(4), spec)
    assert found.pop("losses").tolist() == pytest.approx(losses, abs=1e-5)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(found[name], values, atol=atol), name


def in_chunks(act: Callable[[Ranks], None], ranks: Ranks) -> None:
    chunked_loss.LOGITS_BYTES = 4 * 99 * 7  # of seven tokens
    act(ranks)


def test_ranks_compute_the_loss_in_chunks(tmp_path: Path) -> None:
    act = partial(train_sharded, spec=SPEC, steps=range(4), resume=None, to=tmp_path / "chunked")
    run_ranks(2, partial(in_chunks, act), partial(in_chunks, follow_rank_0))
    found, (losses, expected) = load_file(tmp_path / "chunked"), plain(range(4), SPEC)
    assert found.pop("losses").tolist() == pytest.approx(losses, abs=1e-5)
    for name, values in expected.items():
        assert torch.allclose(found[name], values, atol=2e-5), name


def test_what_ranks_have_saved_goes_on_with_the_same_bits_and_with_other_ranks(tmp_path: Path) -> None:
    whole = sharded(2, range(5), tmp_path / "whole")
    sharded(2, range(3), tmp_path / "half")
    again = sharded(2, range(3, 5), tmp_path / "again", resume=tmp_path / "half")
    others = sharded(3, range(3, 5), tmp_path / "others", resume=tmp_path / "half")
    assert torch.equal(again["losses"], whole["losses"][-2:])
    for name in whole.keys() - {"losses"}:
        assert torch.equal(again[name], whole[name]), name
        assert torch.allclose(others[name], whole[name], atol=2e-5), name


def check_vector(ranks: Ranks) -> None:
    inner, flat = lead(ranks)
    size = flat.num_elements
    whole = FlatParameters(build_model(SPEC.model, sequence_length=16))
    assert flat.layout() == whole.layout(), "peers with other numbers of GPUs understand each other"
    vector = whole.read(0, size)
    assert torch.equal(flat.read(0, size), vector)
    for start, stop in ((0, size), (1, 2), (1979, 4007), (size - 5, size)):  # the first parameter has 1980 elements
        other = torch.randn(stop - start, generator=torch.Generator().manual_seed(start))
        assert torch.equal(flat.read(start, stop), vector[start:stop])
        flat.write(start, other)
        flat.flush()
        vector[start:stop] = other
        for part, place in flat.pieces(start, stop, is_written=True):
            part += other[place]
        flat.flush()
        vector[start:stop] += other
        assert torch.equal(flat.read(0, size), vector)
    inner(batch(0), progress=0.5)
    after = torch.cat([values.flatten() for values in flat.named_values().values()])
    assert torch.equal(flat.read(0, size), after), "it is read anew after an inner step"


def test_any_piece_of_the_vector_is_that_of_the_whole_model() -> None:
    run_ranks(3, check_vector)


def swap_with_a_plain_peer(ranks: Ranks, folder: Path) -> None:
    changes = {"outer.alpha": 0.0, "outer.beta": 1.0, "outer.min_inner_steps": 1, "codec.weights": "fp32"}
    spec = SPEC.with_changes(changes | {"train.total_steps": 10**6})
    with MemorySwarm(spec, deadlines=PATIENT) as swarm:
        inner, sharded = lead(ranks, spec)
        plain_inner = InnerStep(build_model(SPEC.model, sequence_length=16), SPEC.train)
        steps = [inner, plain_inner]
        outers = [
            NoLoCo(step.model, step, swarm.peer(name, run_folder=folder / name), save_every_s=0, parameters=parameters)
            for name, step, parameters in (("a", inner, sharded), ("b", plain_inner, None))
        ]
        num_mixings, have_swapped = [0.0, 0.0], threading.Event()

        def life(index: int) -> None:
            step = 0
            while not have_swapped.is_set():
                step += 1
                have_swapped.wait(index * SHARDED_STEP_S)  # else its filter would clip what far fewer steps moved
                steps[index](batch(10 * index + step), progress=0.1)
                num_mixings[index] += sum(swap.share for swap in outers[index].step())
                if min(num_mixings) >= 5:
                    have_swapped.set()

        other = threading.Thread(target=life, args=(1,))
        other.start()
        life(0)  # in this thread, as one thread orders the collectives
        other.join(PATIENCE_S)
        ours = sharded.read(0, sharded.num_elements)
        apart = ours - FlatParameters(plain_inner.model).read(0, sharded.num_elements)
        assert 0 < float(apart.norm()) < 0.1 * float(ours.norm())


def test_it_swaps_with_a_peer_that_has_one_process(tmp_path: Path) -> None:
    run_ranks(2, partial(swap_with_a_plain_peer, folder=tmp_path))


def share_code(ranks: Ranks) -> None:
    ranks.share(Path("a pickle of this calls Path"))


def take_no_code(ranks: Ranks) -> None:
    with pytest.raises(UnpicklingError, match="weights_only"):
        ranks.share()
    assert ranks.share() is None, "rank 0 has ended"


def test_what_rank_0_shares_is_data_and_never_code() -> None:
    run_ranks(2, share_code, take_no_code)


def lose_one(ranks: Ranks) -> None:
    inner, _ = lead(ranks)
    began_s = time.monotonic()
    ranks.tell("no_method")  # makes the other ranks fail
    with pytest.raises(RankError, match=r"resume from the last checkpoint"), told():
        inner(batch(0), progress=0.0)
    assert time.monotonic() - began_s < AT_ONCE_S


def test_a_rank_that_ends_ends_the_work_of_rank_0_with_an_error_in_words() -> None:
    run_ranks(2, lose_one, others_exit_with=1)
