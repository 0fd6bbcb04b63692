"""A tiny Llama in stages, and the single machine that a pipeline is compared with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from harness.specs import tiny_llama
from torch import Tensor, nn

from noloco_p2p.optim.inner import learning_rate, make_inner_optimizers
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.staged import staged
from noloco_p2p.spec import OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.model import causal_lm_loss, hidden_matrices

FP32: dict[str, Any] = {"pipeline.activations": "fp32", "pipeline.gradients": "fp32"}


def spec_of(num_stages: int = 3, steps: int = 4, **changes: Any) -> TrainerSpec:
    spec = tiny_llama(
        "staged",
        train=TrainSpec(total_steps=steps, batch_size=4, warmup_steps=1),
        outer=OuterSpec(closing_mixings=0),
    )
    changes = {"model.num_layers": num_stages, "model.hidden_size": 16, "data.sequence_length": 16, **changes}
    return staged(spec.with_changes({"model.parameter_seeds": True, **changes}), num_stages)


@functools.cache
def _material(canonical: bytes, digest: str) -> Material:
    return Material.of(TrainerSpec.from_json(canonical, expected_digest=digest, origin="test"), {})


def material_of(spec: TrainerSpec) -> Material:
    return _material(spec.canonical_json(), spec.digest())


def assert_trained_as(alone: Mapping[str, Tensor], start: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compare parameters relative to how far training has moved each of them.

    AdamW enlarges the rounding of a gradient that is almost 0, so a single element may differ by a few 1e-5.
    """
    for name, param in model.named_parameters():
        assert not torch.allclose(param, start[name], atol=1e-3, rtol=0), f"{name} has not been trained"
        assert torch.allclose(param, alone[name], atol=1e-4, rtol=0), name
        assert torch.dist(param, alone[name]) < 3e-4 * torch.dist(alone[name], start[name]), name


def trained_alone(spec: TrainerSpec) -> dict[str, Tensor]:
    """Train the whole model on one machine, clipping the parameters of each stage separately; return its parameters."""
    material, train = material_of(spec), spec.train
    model = material.model()
    batches = material.batches("replica-0")
    optimizers = make_inner_optimizers(model.parameters(), train, matrices=hidden_matrices(model))
    assert spec.pipeline.cut != "auto"
    ends = [sum(spec.pipeline.cut[: stage + 1]) for stage in range(spec.pipeline.stages)]
    parts: list[list[Tensor]] = [[] for _ in ends]
    for name, param in model.named_parameters():
        block = int(name.split(".")[2]) if ".layers." in name else 0
        parts[next(stage for stage, end in enumerate(ends) if block < end)].append(param)
    for step in range(train.total_steps):
        causal_lm_loss(model, next(batches)).backward()
        for part in parts:
            torch.nn.utils.clip_grad_norm_(part, train.clip_norm / spec.pipeline.stages**0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, step / train.total_steps)
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}
