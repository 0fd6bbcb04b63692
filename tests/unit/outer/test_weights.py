"""Weights are copied between two steps of the optimizer, and small half-differences reach 16-bit weights."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from noloco_p2p.gossip.units import Slice
from noloco_p2p.outer import weights as weights_module
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.weights import Weights, add_
from noloco_p2p.spec import OuterSpec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, -3.7, 1e-5, 0.0])
def test_the_expectation_of_a_sum_is_exact(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(1)
    values = torch.full((100_000,), value).to(dtype)
    before, offset = values.double(), max(abs(value), 1e-5) * 2.0**-13  # a small part of the distance of two numbers
    for _ in range(20):
        add_(values, torch.full((100_000,), offset))
    gained = (values.double() - before).mean() / (20 * offset)
    assert float(gained) == pytest.approx(1.0, abs=0.05)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_a_copy_sees_no_step_half_done(device: str) -> None:
    model = nn.ParameterList([torch.zeros(100_000), torch.zeros(100_000)]).to(device)  # together less than a chunk
    weights, stop = Weights(FlatParameters(model), OuterSpec()), threading.Event()

    def train() -> None:
        step = 0
        while not stop.wait(1e-4):  # the time of the forward and backward passes
            step += 1
            with weights.lock, torch.no_grad():
                for param in model:
                    param.fill_(step)

    thread = threading.Thread(target=train)
    thread.start()
    seen: set[float] = set()
    try:
        while len(seen) < 20:
            copy = weights.read(0, 200_000)
            assert float(copy.min()) == float(copy.max())
            seen.add(float(copy[0]))
    finally:
        stop.set()
        thread.join()


class Accelerator:
    """A double of `torch.cuda`. Copies are made at once, and it records what a stream waits for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: torch.device) -> Accelerator:  # noqa: N802 - as torch names it
        return self

    def Event(self, *, blocking: bool) -> Accelerator:  # noqa: N802 - as torch names it
        return self

    def current_stream(self, device: torch.device) -> str:
        return "training"

    def stream(self, stream: object) -> nullcontext[None]:
        return nullcontext()

    def wait_stream(self, stream: str) -> None:
        self.calls.append(f"wait for {stream}")

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_a_copy_from_an_accelerator_waits_only_for_what_is_queued_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterList([torch.randn(300_000), torch.randn(700_000)])
    monkeypatch.setattr(weights_module, "has_own_memory", lambda device: True)
    monkeypatch.setattr(weights_module, "MOST_ELEMENTS", 400_000)
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    accelerator = Accelerator()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    weights = Weights(FlatParameters(model), OuterSpec())
    accelerator.calls.clear()
    copy = weights.read(100_000, 1_000_000)
    assert torch.equal(copy, torch.cat([param.detach() for param in model])[100_000:])
    assert accelerator.calls == ["wait for training", "record", "synchronize"] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_half_differences_are_added_where_they_belong(device: str) -> None:
    model = nn.ParameterList([torch.randn(300_000), torch.randn(700_000)]).to(device)
    weights = Weights(FlatParameters(model), OuterSpec())
    part = Slice(10, 200)
    start, stop = weights.units.bounds(part)
    expected, halves = weights.read(0, 1_000_000), torch.randn(stop - start)
    expected[start:stop] += halves
    weights.add(start, halves)
    assert torch.equal(weights.read(0, 1_000_000), expected)


MEMORY = """
import psutil, torch
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.weights import Weights
from noloco_p2p.spec import OuterSpec

model = torch.nn.ParameterList([torch.zeros(1 << 24), torch.zeros(1 << 24)])
before = psutil.Process().memory_info().rss
weights = Weights(FlatParameters(model), OuterSpec())
print(psutil.Process().memory_info().rss - before)
"""


def test_weights_without_an_outer_step_take_little_memory() -> None:
    """The C library kept a hole of 1 MiB for each small sample of a chunk, in total as much as the model."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 20, "a quarter of the model"
