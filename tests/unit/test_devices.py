"""Doubles of devices that a test machine lacks: the calls to torch, and the decisions that follow from its answers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from noloco_p2p import devices
from noloco_p2p.devices import free_and_total_bytes, has_fast_bf16, is_out_of_memory, peak_bytes, synchronize
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.compute import Compute, choose_device, free_bytes, peak_flops
from noloco_p2p.trainer.needs import Counts, check_memory, estimate

CPU, MPS, CUDA = torch.device("cpu"), torch.device("mps"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> dict[int, bool]:
    """Pretend to be a machine with CUDA devices; return a mapping from their indices to "has bf16 instructions"."""
    cards, current = {0: True}, [0]

    def enter(device: torch.device) -> object:
        current[0] = device.index or 0
        return nullcontext()

    def is_bf16_supported(*, including_emulation: bool = True) -> bool:
        return including_emulation or cards[current[0]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    return cards


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be Apple silicon with 10 GiB for the GPU: tensors take 3, and the driver has reserved one more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 * GIB)


def test_auto_is_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch, mac: None) -> None:
    assert choose_device("auto") == choose_device("mps") == MPS
    assert choose_device("auto", gpu=1) == CPU, "Apple's GPU is one device"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == CUDA
    assert choose_device("auto", gpu=1) == torch.device("cuda:1")


def test_a_device_that_is_not_here_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, mac: None) -> None:
    with pytest.raises(SettingsError, match=r"--device mps names one GPU"):
        choose_device("mps", gpu=0)
    with pytest.raises(SettingsError, match=r"torch found 0 CUDA devices on this machine"):
        choose_device("cuda:0")
    with pytest.raises(SettingsError, match=r"--device 'tpu' is not a known device; use auto, cpu, cuda:N"):
        choose_device("tpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"torch found no Apple GPU on this machine; use --device cpu"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    with pytest.raises(SettingsError, match=r"torch was built without MPS"):
        choose_device("mps")


def test_auto_is_bf16_only_where_the_slowest_card_has_instructions_for_it(nvidia: dict[int, bool]) -> None:
    assert [Compute().is_bf16(device) for device in (CPU, MPS, CUDA)] == [False, False, True]
    assert Compute(precision="bf16").is_bf16(CPU)
    assert not Compute(precision="fp32").is_bf16(CUDA)
    nvidia.update({0: True, 1: False})
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert (has_fast_bf16(first), has_fast_bf16(second)) == (True, False)
    assert [Compute(num_ranks=2).is_bf16(device) for device in (first, second)] == [False, False]
    nvidia[1] = True
    assert [Compute(num_ranks=2).is_bf16(device) for device in (first, second)] == [True, True]


@pytest.mark.parametrize(
    ("capabilities", "is_fast"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": False}, False),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
    ],
)
def test_a_processor_is_fast_at_bf16_by_its_instructions(
    capabilities: dict[str, object], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert has_fast_bf16(CPU) == is_fast


def test_what_is_slow_or_ignored_is_told_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TrainerSpec.from_dict({"name": "r", "train": {"inner_optimizer": "muon"}}, origin="test")
    lora = TrainerSpec.from_dict({"name": "r", "model": {"lora": {"rank": 4, "base_dtype": "bf16"}}}, origin="test")
    for is_fast in (True, False):
        monkeypatch.setattr("noloco_p2p.trainer.compute.has_fast_bf16", lambda _, is_fast=is_fast: is_fast)
        told = [
            *Compute(precision="bf16").warnings(CPU, plain),
            *Compute().warnings(CPU, lora),
        ]
        assert len(told) == (0 if is_fast else 2)
        assert Compute().warnings(CPU, plain) == []
    for line, what in zip(told, ("--precision fp32 is faster", "model.lora.base_dtype"), strict=True):
        assert "3 to 20 times as long" in line
        assert what in line
    (line,) = Compute(precision="bf16").warnings(CUDA, plain)
    assert "emulates them" in line
    for device in (CPU, MPS):
        (line,) = Compute(offload_optimizer=True).warnings(device, plain)
        assert "--offload-optimizer is ignored" in line
    assert Compute(offload_optimizer=True, precision="fp32").warnings(CUDA, plain) == []


def test_out_of_memory_is_known_from_other_errors() -> None:
    mps = "MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: 9.07 GB)."
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError(mps))
    assert is_out_of_memory(RuntimeError("Invalid buffer size: 23.30 GiB"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


def test_memory_of_a_mac_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, mac: None) -> None:
    assert free_and_total_bytes(MPS) == (7 * GIB, 10 * GIB)
    assert peak_bytes(MPS) == 4 * GIB
    assert [devices.has_own_memory(device) for device in (CPU, MPS, CUDA)] == [False, False, True]
    waited: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda *arguments: waited.append(arguments))
    synchronize(MPS)
    synchronize(CPU)
    assert waited == [()], "torch.mps takes no device"
    monkeypatch.setattr("noloco_p2p.trainer.compute.free_memory", lambda: 100 * GIB)
    assert free_bytes(MPS, moment_bytes=GIB) == 6 * GIB
    monkeypatch.setattr("noloco_p2p.trainer.compute.free_memory", lambda: 5 * GIB)
    assert free_bytes(MPS, moment_bytes=GIB) == 4 * GIB
    monkeypatch.setattr("noloco_p2p.trainer.compute.free_memory", lambda: 0)
    assert free_bytes(MPS, moment_bytes=GIB) == 0


def test_a_model_must_fit_into_the_gpu_and_with_all_else_into_a_mac(monkeypatch: pytest.MonkeyPatch, mac: None) -> None:
    def check(num_parameters: int) -> None:
        spec, settings = TrainerSpec(name="r"), PeerSettings()
        check_memory(estimate(spec, Counts(num_parameters), settings, has_gpu=False), spec, settings, MPS)

    monkeypatch.setattr(devices, "total_memory", lambda: 100 * GIB)
    check(500_000_000)
    with pytest.raises(SettingsError, match=r"of memory on mps, .* this machine has 10\.0 GiB"):
        check(800_000_000)  # 16 bytes each
    monkeypatch.setattr(devices, "total_memory", lambda: GIB * 15 // 2)
    with pytest.raises(SettingsError, match=r"of main memory and swap space"):
        check(500_000_000)  # 16 bytes each take 7.45 GiB, and swaps need more


def test_peaks_are_those_of_the_maker_and_unknown_cards_have_none() -> None:
    assert peak_flops("AMD Instinct MI300X") == 1307e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("AMD Radeon RX 7900 XTX") is None
    assert devices.describe(CPU) == "the processor"
