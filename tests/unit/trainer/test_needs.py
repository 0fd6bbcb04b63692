"""What a run costs a machine is told before it trains, and is what happens; a model that can never fit is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from harness.processes import small_spec
from training_peer import training_peer

from noloco_p2p import devices
from noloco_p2p.cli.app import run
from noloco_p2p.codec import get_codec
from noloco_p2p.doctor import swarm as doctor
from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.units import MOST_ELEMENTS
from noloco_p2p.optim.muon import BATCH_ELEMENTS
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import OuterSpec, StateCodecName, TrainerSpec
from noloco_p2p.testing.peers import MemorySwarm
from noloco_p2p.trainer import needs
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.loop import Trainer
from noloco_p2p.trainer.model import build_model, count_parameters
from noloco_p2p.trainer.needs import SENT_BYTES, Counts, Needs, check_memory, estimate

CPU = torch.device("cpu")
TINY = PRESETS["tiny"].model
MUON = {"train.inner_optimizer": "muon"}
ADAMW = {"train.inner_optimizer": "adamw"}
ADAMW_8BIT = {"train.inner_optimizer": "adamw8bit"}


def needs_of(spec: TrainerSpec, num_parameters: int, *, has_gpu: bool = False, **settings: Any) -> Needs:
    return estimate(spec, Counts(num_parameters), PeerSettings(**settings), has_gpu=has_gpu)


def check(spec: TrainerSpec, num_parameters: int, *, frozen_bytes: int = 0) -> None:
    counts, settings = Counts(num_parameters, frozen_bytes=frozen_bytes), PeerSettings()
    check_memory(estimate(spec, counts, settings, has_gpu=False), spec, settings, CPU)


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_are_counted_without_a_model(rank: int) -> None:
    spec = TINY.model_copy(update={"lora": TINY.lora.model_copy(update={"rank": rank})})
    model = build_model(spec, sequence_length=16)
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    frozen_bytes = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    in_matrices = sum(each.numel() for each in InnerStep(model, PRESETS["tiny"].train).muon_matrices)
    assert count_parameters(spec, sequence_length=16) == (trainable, in_matrices, frozen_bytes)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False, "num_heads": 4, "num_kv_heads": 2}])
def test_the_sizes_of_a_llama_are_counted_without_torch(changes: dict[str, Any]) -> None:
    spec = TINY.model_copy(update=changes)
    assert Counts.of_sizes(spec) == count_parameters(spec, sequence_length=16)
    assert needs.SLICE_BYTES == 4 * MOST_ELEMENTS
    assert needs.MUON_BYTES == 5 * 4 * BATCH_ELEMENTS


def test_a_model_of_any_size_is_counted_at_once() -> None:
    vast = TINY.model_copy(update={"hidden_size": 131_072, "num_heads": 1024, "mlp_size": 524_288})
    assert count_parameters(vast, sequence_length=16).num_parameters == vast.num_parameters() > 10**11


def test_what_a_machine_can_never_hold_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "total_memory", lambda: 1 << 30)
    with pytest.raises(SettingsError, match=r"trains 100M parameters and needs at least \d\.\d GiB of main memory"):
        check(TrainerSpec(name="r"), 100_000_000)
    with pytest.raises(SettingsError, match=r"this machine has 1\.0 GiB"):
        check(TrainerSpec(name="r"), 1_000_000, frozen_bytes=1 << 30)
    check(TrainerSpec(name="r"), 10_000_000)


def test_only_an_outer_step_takes_memory_that_grows_with_the_model() -> None:
    plain, momentum = TrainerSpec(name="r"), TrainerSpec(name="r", outer=OuterSpec(alpha=0.5))
    small, large, with_momentum = (
        needs_of(spec, size) for spec, size in ((plain, 10**8), (plain, 10**10), (momentum, 10**10))
    )
    assert small.host_bytes == large.host_bytes < 1.1 * 2**30
    assert with_momentum.host_bytes - large.host_bytes == 8 * 10**10  # slow weights and momentum


@pytest.mark.parametrize(
    ("optimizer", "rank"),
    [(ADAMW, 0), (ADAMW, 4), (MUON, 0), (MUON, 4), (ADAMW_8BIT, 0)],
    ids=["adamw", "adamw, adapters", "muon", "muon, adapters", "adamw8bit"],
)
def test_the_memory_of_the_model_is_that_of_its_weights_gradients_and_moments(
    optimizer: dict[str, str], rank: int
) -> None:
    spec = PRESETS["tiny"].with_changes({**optimizer, "model.lora.rank": rank, "model.lora.base_dtype": "bf16"})
    counts = count_parameters(spec.model, sequence_length=16)
    model = build_model(spec.model, sequence_length=16)
    step, tokens = InnerStep(model, spec.train), torch.zeros(1, 16, dtype=torch.long)
    step(tokens, progress=0.0)
    step.backward(tokens)
    held = [*model.parameters(), *step.gradients(), *step.state().values()]
    told = estimate(spec, counts, PeerSettings(), has_gpu=False).model_bytes
    muon = 20 * counts.num_matrix_parameters if optimizer == MUON else 0  # copies during its step
    codes = 2048 * len(step.trainable) if optimizer == ADAMW_8BIT else 0  # all parameters share two
    assert sum(tensor.nbytes for tensor in held) - codes == pytest.approx(told - muon, rel=0.002)


@pytest.mark.parametrize("changes", [ADAMW, MUON, {"outer.alpha": 0.5}], ids=["adamw", "muon", "outer step"])
def test_checkpoints_and_states_have_the_sizes_that_are_told(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = small_spec("sizes").with_changes(changes)
    with MemorySwarm(spec) as swarm:
        trainer = Trainer(training_peer(swarm, tmp_path, max_steps=1), say=lambda line: None)
        told, folder = trainer.needs(), trainer.train()
    assert folder
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert sum(sizes.values()) == pytest.approx(told.checkpoint_bytes, rel=0.05)
    assert sizes["weights"] == pytest.approx(told.state_bytes, rel=0.01)


def test_disk_space_does_not_grow_and_what_is_written_in_a_day_does() -> None:
    told = needs_of(TrainerSpec(name="r"), 10**8, save_every_s=3600.0, keep_checkpoints=4)
    assert told.checkpoint_bytes == 12 * 10**8
    assert told.disk_bytes == 5 * told.checkpoint_bytes, "one of them is being written"
    assert told.written_bytes_per_day == 24 * told.checkpoint_bytes


def test_limits_of_this_machine_bound_traffic_and_the_time_to_fetch_a_state() -> None:
    free = needs_of(TrainerSpec(name="r"), 10**8)
    assert free.begin_s == pytest.approx(9 + 1.06 * 32), "400 MB at 100 Mbit/s"
    assert free.lines()[-2].endswith("and train after 43 s at 100 Mbit/s")
    assert (
        "the whole link (45 GB per hour each way at 100 Mbit/s), unless --max-upload limits them; " in free.lines()[-1]
    )
    slow_up = needs_of(TrainerSpec(name="r"), 10**8, max_upload="20mbit", max_download="50mbit")
    assert slow_up.begin_s == pytest.approx(9 + 1.06 * 64)
    limited = "swaps: use up to 9 GB per hour each way at 20 Mbit/s; sending all weights once takes 20 s"
    assert slow_up.lines()[-1] == limited
    assert [line for line in free.lines() if line not in free.lines(for_others=False)] == [free.lines()[-2]]
    assert needs_of(TrainerSpec(name="r"), 10**6).lines()[-1] == (
        "swaps: use up to 45 GB per hour each way at 100 Mbit/s, but far less with a model as small as this one, "
        "unless --max-upload limits them; sending all weights once takes less than 1 s"
    )


def test_a_gpu_holds_the_model_and_main_memory_a_copy_of_the_checkpoint() -> None:
    spec, num = TrainerSpec(name="r"), 10**9
    on_cpu, on_gpu = needs_of(spec, num), needs_of(spec, num, has_gpu=True)
    assert (on_cpu.model_bytes, on_cpu.copy_bytes) == (16 * num, 0)
    assert (on_gpu.model_bytes, on_gpu.copy_bytes, on_gpu.host_bytes) == (16 * num, 12 * num, on_cpu.host_bytes)
    offloaded = needs_of(spec, num, has_gpu=True, offload_optimizer=True)
    assert (offloaded.model_bytes, offloaded.host_bytes) == (8 * num, on_cpu.host_bytes + 8 * num)
    assert estimate(spec, Counts(num), PeerSettings(), has_gpu=True, num_ranks=4).model_bytes == 4 * num


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
def test_init_doctor_and_join_tell_the_same(
    tmp_path: Path, optimizer: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOLOCO_DEVICE", "cpu")
    monkeypatch.setenv("NOLOCO_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    setting = f"--set=train.inner_optimizer={optimizer['train.inner_optimizer']}"
    assert run(["init", str(tmp_path / "run.toml"), setting]) == 0
    spec = TrainerSpec.load(tmp_path / "run.toml")
    with MemorySwarm(spec) as swarm:
        trainer = Trainer(training_peer(swarm, tmp_path / "peer", micro_batch=1), say=lambda line: None)
        told = trainer.needs().lines()
    _, first, *lines = capsys.readouterr().out.splitlines()
    assert lines == told[1:]
    tokens, checked = doctor.model(spec, PeerSettings.load())
    assert first == f"tokens: {tokens.found}"
    assert checked.found.splitlines()[: len(told)] == told


@pytest.mark.parametrize("name", SENT_BYTES)
def test_all_weights_take_as_many_bytes_as_the_payloads_of_their_codec(name: str) -> None:
    if name != "modulo":  # whose payloads depend on the partners
        assert get_codec(name).num_bytes((1 << 18,)) == pytest.approx(SENT_BYTES[name] * (1 << 18), rel=0.02)
    assert set(SENT_BYTES) == set(get_args(StateCodecName))


def test_activations_are_told_if_they_are_known() -> None:
    spec, settings = TrainerSpec(name="r"), PeerSettings()
    unknown, known = (
        estimate(spec, Counts(10**8), settings, has_gpu=False, activation_bytes=size) for size in (None, 3 << 30)
    )
    assert "needs: 2.5 GiB of memory plus activations (1.5 GiB of it for the model), " in unknown.lines()[1]
    assert "needs: 5.5 GiB of memory (1.5 GiB of it for the model and 3.0 GiB for activations), " in known.lines()[1]


def test_too_little_free_memory_and_disk_space_are_told_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda: 1 << 30)
    settings = PeerSettings(state_dir=tmp_path / "missing")
    memory, disk = estimate(TrainerSpec(name="r"), Counts(10**13), settings, has_gpu=False).warnings(settings)
    assert re.search(r"needs \d+\.\d TiB of main memory, but this machine has 1\.0 GiB free", memory)
    assert re.search(r"checkpoints need \d+\.\d TiB of disk space, but .* is free", disk)
