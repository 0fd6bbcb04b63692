"""One liar among the donors of a merge or a fork, and among those of a newcomer or of a peer that catches up.

The donors answer from memory, and the program itself asks them: the commands, and the first fetch of a newcomer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from donors import Crowd, Donor, use
from harness.identities import identity_of
from harness.specs import tiny_llama
from safetensors.torch import load_file, save_file
from torch import Tensor

from noloco_p2p.cli.app import run
from noloco_p2p.gossip.frames import FetchItem, FetchWant, StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.saved_state import read_state
from noloco_p2p.outer.weights import vectors_of
from noloco_p2p.peer_name import named
from noloco_p2p.spec import OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.model import build_model
from noloco_p2p.trainer.start import load_start
from noloco_p2p.transfer.donor import describe_state, state_file_bytes
from noloco_p2p.transfer.fetch import Admission, fetch_state

SPEC = tiny_llama("lies", train=TrainSpec(total_steps=40_000), outer=OuterSpec(alpha=0.5, beta=0.7))
PROGRESS = 0.5
FAR_AWAY = "too far from the median of the peers"
NUM_HONEST = 7
SPREAD = 0.03  # as a share of the norm, for replicas at one point early in a short schedule
FAR = 0.01  # the most that one liar may move a merge, as a share of its norm
LIAR = identity_of("liar").peer_id


@dataclass(frozen=True)
class Lie:
    """The vectors that a liar serves, computed from the honest weights, and the reason that the refusal states."""

    vectors: Callable[[Tensor], dict[str, Tensor]] = lambda weights: state_of(weights)
    data: Callable[[int], bytes] | None = None  # called with a size in bytes, for data that is not a state file
    progress: float = PROGRESS
    why: str = FAR_AWAY


def state_of(weights: Tensor) -> dict[str, Tensor]:
    return {"weights": weights, "outer_momentum": torch.zeros_like(weights)}


def renamed(num_bytes: int) -> bytes:
    """Return a file as large as a state whose header names another shape."""
    count = (num_bytes - 192) // 8
    header = {"weights": {"dtype": "F32", "shape": [count, 2], "data_offsets": [0, 8 * count]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (num_bytes - 8 - 8 * count - len(text))
    return struct.pack("<Q", len(text)) + text + bytes(8 * count)


LIES = {
    "six-six-six": Lie(lambda weights: state_of(torch.full_like(weights, 666.0))),
    "scaled": Lie(lambda weights: state_of(1000 * weights)),
    "doubled": Lie(lambda weights: state_of(2 * weights)),
    "sign-flipped": Lie(lambda weights: state_of(-weights)),
    "zeros": Lie(lambda weights: state_of(torch.zeros_like(weights))),
    "huge": Lie(lambda weights: state_of(torch.full_like(weights, 3e38))),
    "noise": Lie(lambda weights: state_of(noise(666, weights) * float(weights.norm()))),
    "nan": Lie(lambda weights: state_of(torch.full_like(weights, torch.nan)), why="non-finite"),
    "one-nan": Lie(
        lambda weights: state_of(weights.where(torch.arange(len(weights)) != 7, torch.nan)), why="non-finite"
    ),
    "infinite-momentum": Lie(
        lambda weights: {"weights": weights, "outer_momentum": torch.full_like(weights, torch.inf)},
        why="non-finite",
    ),
    "garbage": Lie(data=lambda num_bytes: b"\xff" * num_bytes, why="not a safetensors file"),
    "other-shape": Lie(data=renamed, why="belongs to another model"),
    "other-size": Lie(lambda weights: state_of(weights[:-1].clone()), why="another model or has the wrong size"),
    "far-ahead": Lie(progress=0.99, why="99.0 % of the schedule"),
    "nowhere": Lie(progress=float("nan"), why="nan % of the schedule"),
}
ALONE = [name for name, lie in LIES.items() if lie.why != FAR_AWAY]  # these are lies even without a comparison
WITHIN = {  # lies that look like an honest state move the merge by no more than the limit for any state
    "half-scaled": Lie(lambda weights: state_of(1.5 * weights)),
    "near-noise": Lie(lambda weights: state_of(weights + 0.5 * noise(666, weights) * float(weights.norm()))),
    "as-near-as-honest": Lie(lambda weights: state_of(weights + 0.064 * noise(666, weights) * float(weights.norm()))),
}


@functools.cache
def start() -> tuple[Tensor, ModelLayout]:
    flat = FlatParameters(build_model(SPEC.model, sequence_length=SPEC.data.sequence_length))
    return flat.read(0, flat.num_elements), flat.model_layout


def noise(seed: int, weights: Tensor) -> Tensor:
    """Return a random vector of norm 1."""
    values = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))
    return values / values.norm()


def honest(seed: int) -> Tensor:
    weights, _ = start()
    return weights + SPREAD * weights.norm() * noise(seed, weights)


def add(crowd: Crowd, folder: Path, peer_id: str, lie: Lie, weights: Tensor) -> None:
    path = folder / f"{peer_id}.safetensors"
    vectors = lie.vectors(weights)
    save_file(vectors, path)
    if lie.data:
        path.write_bytes(lie.data(state_file_bytes(len(weights), SPEC.outer)))
    num_elements = len(vectors["weights"])
    saved = describe_state(path, layout=start()[1].digest(), num_elements=num_elements, progress=lie.progress)
    crowd.add(Candidate(peer_id, peer_id, progress=lie.progress), saved)


def crowd_with(folder: Path, lie: Lie | None, *, num_honest: int = NUM_HONEST) -> Crowd:
    crowd = Crowd(SPEC)
    if lie:
        add(crowd, folder, LIAR, lie, honest(100))
    for seed in range(num_honest):
        add(crowd, folder, identity_of(f"honest {seed}").peer_id, Lie(), honest(seed))
    return crowd


def exported(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    flat = FlatParameters(AutoModelForCausalLM.from_pretrained(folder))
    return flat.read(0, flat.num_elements)


@functools.cache
def merge_without_the_liar() -> Tensor:
    return torch.stack([honest(seed) for seed in range(NUM_HONEST)]).mean(0)


def apart(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("name", LIES)
def test_a_merge_leaves_out_one_liar_of_eight_and_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = use(crowd_with(tmp_path, LIES[name]), monkeypatch)
    assert run(["export", "--merge", ticket, str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "the mean of 7 peers" in out
    assert f"the state of {named(LIAR)} was left out: " in out
    assert LIES[name].why in out
    assert out.count("was left out") == 1, "no honest peer is blamed"
    assert apart(exported(tmp_path / "model"), merge_without_the_liar()) < 1e-6


@pytest.mark.parametrize("name", WITHIN)
def test_a_lie_near_the_honest_states_moves_a_merge_by_less_than_one_per_cent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = use(crowd_with(tmp_path, WITHIN[name]), monkeypatch)
    assert run(["export", "--merge", ticket, str(tmp_path / "model")]) == 0
    assert apart(exported(tmp_path / "model"), merge_without_the_liar()) < FAR


def test_a_state_that_counts_less_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = use(crowd_with(tmp_path, WITHIN["half-scaled"]), monkeypatch)
    assert run(["export", "--merge", ticket, str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "the mean of 8 peers" in out
    why = "these states were clipped because they are far from the median (distances relative to its norm)"
    assert f"{why}: {named(LIAR)} (" in out


def test_states_that_are_honest_are_averaged_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = use(crowd_with(tmp_path, None), monkeypatch)
    assert run(["export", "--merge", ticket, str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "the mean of 7 peers" in out
    assert "left out" not in out
    assert "further from" not in out
    assert apart(exported(tmp_path / "model"), merge_without_the_liar()) < 1e-6


@pytest.mark.parametrize("name", LIES)
def test_a_fork_begins_with_the_state_of_an_honest_peer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = use(crowd_with(tmp_path, LIES[name], num_honest=4), monkeypatch)
    new = tmp_path / "new.toml"
    assert run(["fork", ticket, str(new), "--state-dir", str(tmp_path / "state")]) == 0
    model = build_model(SPEC.model, sequence_length=SPEC.data.sequence_length)
    load_start(model, TrainerSpec.load(new).model.start, state_dir=tmp_path / "state")
    weights = FlatParameters(model).read(0, honest(0).numel())
    assert any(torch.equal(weights, honest(seed)) for seed in range(4))


@pytest.mark.parametrize("command", [["export", "--merge"], ["fork"]], ids=["export", "fork"])
@pytest.mark.parametrize("name", ["garbage", "nan", "other-shape"])
def test_where_only_a_liar_is_there_the_command_ends_with_a_sentence(
    name: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ticket = use(crowd_with(tmp_path, LIES[name], num_honest=0), monkeypatch)
    state_dir = ["--state-dir", str(tmp_path / "state")] if command == ["fork"] else []
    assert run([*command, ticket, str(tmp_path / "made"), *state_dir]) == 4
    said = capsys.readouterr()
    assert "provided a usable state" in said.err
    assert named(LIAR) in said.err
    assert LIES[name].why in said.err
    assert "Traceback" not in said.err + said.out
    assert not (tmp_path / "made").exists()


def test_of_two_states_that_differ_wildly_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = use(crowd_with(tmp_path, LIES["six-six-six"], num_honest=1), monkeypatch)
    assert run(["export", "--merge", ticket, str(tmp_path / "model")]) != 0
    assert "too far apart to decide which ones are wrong" in capsys.readouterr().err


# newcomers, and peers that have fallen behind


async def enter(
    crowd: Crowd,
    target: Path,
    *,
    newer_than: float,
    loss_of: Callable[[Path | None], float] | None = None,
    has_own: bool = False,
) -> StateManifest | None:
    weights, layout = start()
    transport = cast(Transport, crowd.transport())
    check_file = functools.partial(read_state, expected=vectors_of(SPEC.outer, len(weights)))
    return await fetch_state(
        transport,
        list(crowd.live()),  # the liar comes first
        Admission(SPEC, transport, layout, live=crowd.live, check_file=check_file, loss_of=loss_of, has_own=has_own),
        target=target,
        newer_than=newer_than,
        live=crowd.live,
    )


@pytest.mark.parametrize("newer_than", [-1.0, 0.4], ids=["newcomer", "left behind"])
@pytest.mark.parametrize("name", ALONE)
def test_a_newcomer_passes_over_a_liar_and_takes_the_state_of_the_next_donor(
    name: str, newer_than: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = crowd_with(tmp_path, LIES[name])
    manifest = asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=newer_than))
    assert manifest is not None
    assert manifest.progress == PROGRESS
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(0))
    assert f"could not fetch the state from {LIAR}" in caplog.text


def test_a_newcomer_notices_false_weights_on_its_own_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crowd = crowd_with(tmp_path, Lie(lambda weights: state_of(torch.randn_like(weights))))
    crowd.candidates[:] = [replace(peer, loss=0.0 if peer.peer_id == LIAR else 2.0) for peer in crowd.candidates]
    honest_states = [honest(seed) for seed in range(NUM_HONEST)]

    def loss_of(path: Path | None) -> float:
        assert path, "a newcomer has no weights of its own"
        weights = load_file(path)["weights"]
        return 2.1 if any(torch.equal(weights, each) for each in honest_states) else 9.0

    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=-1.0, loss_of=loss_of))
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(0))
    assert f"from {LIAR}: its loss on this peer's data is 9, but the median of the swarm is 2" in caplog.text


@pytest.mark.parametrize(("num_honest", "taken"), [(1, 0), (2, 1), (NUM_HONEST, 3)])
def test_a_newcomer_whose_data_is_harder_takes_the_last_or_the_fourth_honest_state(
    num_honest: int, taken: int, tmp_path: Path
) -> None:
    crowd = crowd_with(tmp_path, None, num_honest=num_honest)
    crowd.candidates[:] = [replace(peer, loss=2.0) for peer in crowd.candidates]
    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=-1.0, loss_of=lambda path: 5.0))
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(taken))


def test_a_peer_takes_no_state_far_worse_than_its_own_weights_from_the_only_donor(tmp_path: Path) -> None:
    crowd = crowd_with(tmp_path, None, num_honest=1)
    crowd.candidates[:] = [replace(peer, loss=2.0) for peer in crowd.candidates]

    def loss_of(path: Path | None) -> float:
        return 5.0 if path else 3.0

    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=0.0, loss_of=loss_of, has_own=True)) is None


def test_a_loss_that_overflows_convinces_nobody(tmp_path: Path) -> None:
    crowd = crowd_with(tmp_path, None, num_honest=1)
    crowd.candidates[:] = [replace(peer, loss=2.0) for peer in crowd.candidates]
    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=-1.0, loss_of=lambda path: math.inf)) is None


@pytest.mark.parametrize(("own", "taken"), [(4.6, 0), (4.0, 3)])
def test_a_peer_whose_data_differ_takes_a_state_that_is_as_good_as_its_own_weights(
    own: float, taken: int, tmp_path: Path
) -> None:
    crowd = crowd_with(tmp_path, None)
    crowd.candidates[:] = [replace(peer, loss=2.0) for peer in crowd.candidates]

    def loss_of(path: Path | None) -> float:
        return 5.0 if path else own

    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=0.0, loss_of=loss_of, has_own=True))
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(taken))


@pytest.mark.parametrize("losses", [[11.0, 11.0, 11.0], [30.0, 30.0, 2.6, 11.0]], ids=["three", "one far worse"])
def test_no_state_is_accepted_because_worse_ones_were_refused(losses: list[float], tmp_path: Path) -> None:
    crowd = crowd_with(tmp_path, None)
    crowd.candidates[:] = [replace(peer, loss=2.0) for peer in crowd.candidates]
    found = iter([*losses, 2.1])
    assert asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=-1.0, loss_of=lambda path: next(found)))
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(len(losses)))


def test_who_spoils_a_part_of_a_state_does_not_bring_the_next_donor_into_disrepute(tmp_path: Path) -> None:
    """The liar sends a chunk and dies. The next donor completes the state, which is invalid, so it is fetched again."""
    crowd = crowd_with(tmp_path, LIES["nan"], num_honest=1)
    service = cast(Donor, crowd.network.service(LIAR))
    whole = service.on_fetch

    async def dies(want: FetchWant) -> AsyncGenerator[FetchItem]:
        async for item in whole(want):
            yield item
            if not isinstance(item, StateManifest):
                return

    service.on_fetch = dies
    asyncio.run(enter(crowd, tmp_path / "fetched", newer_than=-1.0))
    assert torch.equal(load_file(tmp_path / "fetched")["weights"], honest(0))
