"""Start states: the weights that a forked run begins with, kept under the digest that its spec names."""

from __future__ import annotations

from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.flat import FlatParameters

HASHED_AT_ONCE = 1 << 20  # numbers; what is copied for the digest


def save_start(slow_weights: Tensor, *, state_dir: Path) -> str:
    """Keep a flat fp32 vector as a start state; gives the "blake3:<hex>" for `model.start`. Raises CheckpointError."""
    digest = _digest(slow_weights)
    path = _path(digest, state_dir)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"slow_weights": slow_weights}, temporary)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"the start state cannot be written to {path}: {error}") from None
    return digest


def load_start(model: nn.Module, start: str, *, state_dir: Path) -> bool:
    """Give the model the start state that its spec names; True when there is none to be had or it is done.

    False when the state is not on this machine. Raises ModelError when it is damaged or of another model.
    """
    if not start:
        return True
    path = _path(start, state_dir)
    if not path.exists():
        return False
    parameters = FlatParameters(model)
    try:
        slow_weights = load_file(path)["slow_weights"]
    except (SafetensorError, KeyError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if _digest(slow_weights) != start:
        raise ModelError(f"{path}: is damaged, its digest is not what model.start says; remove it and fork again")
    if slow_weights.numel() != parameters.num_elements:
        raise ModelError(
            f"model.start has {slow_weights.numel()} numbers, the model of this spec {parameters.num_elements}: "
            "a fork cannot change the sizes of the model"
        )
    parameters.write(0, slow_weights)
    return True


def _digest(slow_weights: Tensor) -> str:
    assert slow_weights.dtype is torch.float32
    hasher = blake3()
    for chunk in slow_weights.split(HASHED_AT_ONCE):
        hasher.update(chunk.numpy().tobytes())
    return "blake3:" + hasher.hexdigest()


def _path(start: str, state_dir: Path) -> Path:
    return state_dir / "starts" / f"{start.removeprefix('blake3:')[:64]}.safetensors"
