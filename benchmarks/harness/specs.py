"""Provide small run specs with exact codecs for tests."""

from __future__ import annotations

from typing import Any

from noloco_p2p.spec import CodecSpec, DataSpec, EvaluateSpec, ModelSpec, OuterSpec, TrainerSpec, TrainSpec

FP32 = CodecSpec(weights="fp32")


def published(**changes: Any) -> OuterSpec:
    """Return the outer step of arXiv 2506.10911, which keeps outer momentum."""
    return OuterSpec(**{"alpha": 0.5, "beta": 0.7, **changes})


def tiny_llama(name: str, *, train: TrainSpec, outer: OuterSpec, num_sequences: int = 8) -> TrainerSpec:
    """Return a spec with about 35,000 parameters, on the built-in text. An inner step takes a few milliseconds."""
    return TrainerSpec(
        name=name,
        model=ModelSpec(hidden_size=32, num_layers=1, num_heads=2, mlp_size=48),
        data=DataSpec(sequence_length=32),
        train=train,
        outer=outer,
        codec=FP32,
        evaluate=EvaluateSpec(num_sequences=num_sequences),
    )
