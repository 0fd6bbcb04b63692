"""The way a machine computes a step changes neither the rows that it uses nor the result."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from noloco_p2p import devices
from noloco_p2p.devices import free_memory, total_memory
from noloco_p2p.errors import ModelError, SettingsError
from noloco_p2p.optim.inner import make_inner_optimizer
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import ModelSpec, TrainSpec
from noloco_p2p.trainer.compute import Compute, fitting, micro_batches, sequence_bytes, switch_on
from noloco_p2p.trainer.inner_step import InnerStep, OffloadedOptimizer
from noloco_p2p.trainer.model import build_model

MODEL = ModelSpec(hidden_size=32, num_layers=2, num_heads=2, mlp_size=48)
TRAIN = TrainSpec(warmup_steps=1, total_steps=50)
CPU = torch.device("cpu")


def make(compute: Compute | None = None, model: nn.Module | None = None) -> InnerStep:
    model = model or build_model(MODEL, sequence_length=16)
    switch_on(model, compute or Compute())
    return InnerStep(model, TRAIN, compute)


def batch(num_sequences: int = 6, *, seed: int = 0, num_tokens: int = 16) -> Tensor:
    return torch.randint(0, 384, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(seed))


def gradient(inner: InnerStep) -> Tensor:
    return torch.cat([grad.reshape(-1) for grad in inner.gradients()])


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 5))
def test_every_row_counts_once(num_sequences: int, at_once: int, num_ranks: int) -> None:
    parts = [
        list(micro_batches(num_sequences, at_once=at_once, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)
    ]
    assert len({len(mine) for mine in parts}) == 1, "all ranks compute equally often"
    counted = [(rows, share) for mine in parts for rows, share in mine if share]
    assert sorted(row for rows, _ in counted for row in range(rows.start, rows.stop)) == list(range(num_sequences))
    for mine in parts:
        for rows, share in mine:
            size = rows.stop - rows.start
            assert 0 < size <= (at_once or num_sequences)
            assert share in (0.0, size / num_sequences)


@pytest.mark.parametrize("at_once", [1, 4, 5])
def test_a_few_sequences_at_a_time_are_the_same_step(at_once: int) -> None:
    whole, parts = make(), make(Compute(micro_batch=at_once))
    losses = [float(inner.backward(batch())) for inner in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert torch.allclose(gradient(parts), gradient(whole), atol=1e-6)


def test_activation_checkpointing_is_the_same_step() -> None:
    plain, thrifty = make(), make(Compute(activation_checkpointing=True))
    assert float(plain.backward(batch())) == float(thrifty.backward(batch()))
    assert torch.equal(gradient(thrifty), gradient(plain))
    needed = [sequence_bytes(inner.backward, batch(1), CPU) for inner in (plain, thrifty)]
    assert needed[1] < needed[0] / 2
    with pytest.raises(SettingsError, match="activation-checkpointing"):
        switch_on(nn.Linear(2, 2), Compute(activation_checkpointing=True))


def test_fused_kernels_are_applied_to_the_model_or_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    given, library = list[nn.Module](), ModuleType("liger_kernel.transformers")
    vars(library)["_apply_liger_kernel_to_instance"] = lambda model: given.append(model)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    model = build_model(MODEL, sequence_length=16)
    switch_on(model, Compute())
    switch_on(model, Compute(liger=True))
    assert given == [model]
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, library.__name__, None)
    with pytest.raises(SettingsError, match=r"^--liger requires .*: pip install liger-kernel$"):
        switch_on(model, Compute(liger=True))
    with pytest.raises(SettingsError, match=r"^--liger works only on NVIDIA and AMD GPUs"):
        Compute.of(PeerSettings(liger=True, device="cpu"))


def test_bf16_computes_in_bf16_over_fp32_weights() -> None:
    plain, bf16 = make(), make(Compute(precision="bf16"))
    losses = [float(inner(batch(), progress=0.0)) for inner in (plain, bf16)]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    kept = [*bf16.trainable.values(), *bf16.state().values()]
    assert {value.dtype for value in kept} == {torch.float32}


def test_a_compiled_model_keeps_the_names_of_its_parameters() -> None:
    plain, compiled = make(), make(Compute(compile=True))
    assert list(compiled.trainable) == list(plain.trainable)
    assert compiled.model._compiled_call_impl is not None
    with torch.compiler.set_stance("force_eager"):  # compiling would take half a minute
        assert float(compiled.backward(batch())) == float(plain.backward(batch()))


class Narrow(nn.Module):
    """Runs out of memory with more than `most` sequences, in the backward pass, as an accelerator does."""

    def __init__(self, most: int, error: RuntimeError | None = None) -> None:
        super().__init__()
        self.inner = build_model(MODEL, sequence_length=16)
        self.most = most
        self.error = error or torch.OutOfMemoryError("no room")

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        result = self.inner(input_ids=input_ids, labels=labels)
        assert result.loss is not None
        result.loss.register_hook(self.check(len(input_ids)))
        return result

    def check(self, size: int):
        def hook(grad: Tensor) -> None:
            if size > self.most:
                raise self.error

        return hook


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("MPS backend out of memory (MPS allocated: 8.89 GB, ..")]
)
def test_out_of_memory_halves_what_is_done_at_a_time_and_goes_on(
    error: RuntimeError, caplog: pytest.LogCaptureFixture
) -> None:
    plain, narrow = make(), make(model=Narrow(2, error))
    with caplog.at_level(logging.WARNING):
        loss = float(narrow.backward(batch()))
    assert narrow.micro_batch == 2
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory with a micro-batch size of 6; using 3 from now on",
        "out of memory with a micro-batch size of 3; using 2 from now on",
    ]
    assert loss == pytest.approx(float(plain.backward(batch())), rel=1e-6)
    assert torch.allclose(gradient(narrow), gradient(plain), atol=1e-6), "nothing of the failed attempts is left"


def test_a_sequence_that_does_not_fit_is_an_error_with_advice() -> None:
    with pytest.raises(ModelError, match=r"with a micro-batch size of 1; .*--activation-checkpointing"):
        make(model=Narrow(0)).backward(batch())


def test_what_a_sequence_needs_grows_with_it_and_not_with_the_weights() -> None:
    inner = make(model=build_model(MODEL, sequence_length=64))
    short, long = (sequence_bytes(inner.backward, batch(1, num_tokens=size), CPU) for size in (16, 64))
    assert 3 * short < long < 8 * short
    logits = 64 * MODEL.vocab_size * 4
    assert logits < long < 20 * logits
    assert fitting(10_000, 1000, largest=16) == 8
    assert fitting(10, 1000, largest=16) == 1
    assert fitting(10**12, 1000, largest=16) == 16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_copies_in_bf16_of_the_weights_count_once_and_gradients_take_the_place_of_activations(
    precision: str,
) -> None:
    inner = make(Compute(precision=precision), model=build_model(MODEL, sequence_length=64))
    tokens = batch(num_tokens=64)
    assert inner.fit(tokens) == len(tokens)
    gradients = sum(4 * param.numel() for param in inner.trainable.values())
    needed = sequence_bytes(inner.backward, tokens, CPU)
    assert inner.activation_bytes == pytest.approx(needed - gradients, rel=0.03)


def test_fit_asks_memory_unless_it_is_told() -> None:
    assert make().fit(batch()) == 6
    assert make(Compute(micro_batch=4)).fit(batch()) == 4
    assert make().fit(batch()[:1]) == 1
    inner = make()
    inner.fit(batch())
    assert not inner.gradients()


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
def test_an_optimizer_stepped_in_buckets_is_the_same(bucket_bytes: int) -> None:
    models = [build_model(MODEL, sequence_length=16) for _ in range(2)]
    optimizers = [make_inner_optimizer(model.parameters(), TRAIN) for model in models]
    steppers = [optimizers[0], OffloadedOptimizer(optimizers[1], bucket_bytes=bucket_bytes)]
    for step in range(3):
        for model, stepper, optimizer in zip(models, steppers, optimizers, strict=True):
            model(input_ids=batch(seed=step), labels=batch(seed=step)).loss.backward()
            stepper.step()
            optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_offload_is_for_one_gpu() -> None:
    settings = PeerSettings(offload_optimizer=True)
    assert Compute.of(settings).offload_optimizer
    with pytest.raises(SettingsError, match="--offload-optimizer"):
        Compute.of(settings, num_ranks=2)


def test_without_state_the_optimizer_is_as_new() -> None:
    inner, fresh = make(), make()
    for step in range(3):
        inner(batch(seed=step), progress=0.5)
    inner.restore({})
    assert inner.state() == {}
    fresh.model.load_state_dict(inner.model.state_dict())
    for one in (inner, fresh):
        one(batch(seed=9), progress=0.5)
    assert all(torch.equal(value, fresh.state()[key]) for key, value in inner.state().items())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model(MODEL, sequence_length=16)
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        result = self.inner(input_ids=input_ids, labels=labels)
        result.loss = self.drop(result.loss.expand(1000)).mean()
        return result


def test_what_a_model_draws_is_that_of_the_step_it_is_in() -> None:
    inner = make(model=Dropping())
    first, other, again = (float(inner.backward(batch(), seed=seed)) for seed in (7, 8, 7))
    assert first == again != other


def test_what_a_container_caches_of_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    whole = free_memory()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nactive_file 200000\ninactive_file 400000\nfile_dirty 1000\n")
    assert free_memory() == 700_000
    assert total_memory() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > whole / 2
    assert total_memory() > 1_000_000
