"""The files of a checkpoint of a peer, and how to restore and check them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.checkpoint import Checkpoint, Vector
from noloco_p2p.outer.flat import named_buffers
from noloco_p2p.outer.weights import Weights, check_vectors

STATE_FILE = "weights"  # stem of the file that newcomers fetch: the weights and, with alpha > 0, the outer momentum
# Stem of the file with the model's parameters, if they are not those in STATE_FILE or fp32 cannot represent them.
FAST_FILE = "model"
INNER_FILE = "optimizer"  # stem of the file with the state of the inner optimizer
BUFFERS_FILE = "buffers"  # stem of the file with buffers such as running statistics, if the model has any


def put_back(checkpoint: Checkpoint, weights: Weights, model: nn.Module) -> dict[str, Any]:
    """Restore the weights and the buffers from a checkpoint, and return its position in the run.

    Raises CheckpointError if the checkpoint is damaged or belongs to another model.
    """
    position = checkpoint.meta["outer"]
    check_layout(position, weights.parameters.model_layout, origin=str(checkpoint.path))
    weights.take(checkpoint.load(STATE_FILE))
    if checkpoint.has(FAST_FILE):
        weights.parameters.take(checkpoint.load(FAST_FILE))
    if buffers := persistent_buffers(model):
        restore_buffers(buffers, checkpoint.load(BUFFERS_FILE))
    return position


def read_state(path: Path, expected: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the vectors of a state file after `check_vectors` has accepted them.

    They are mapped from the file and not copied. Raises OSError if the file cannot be read, and CheckpointError for an
    invalid state or another file format.
    """
    try:
        tensors = load_file(path)
    except SafetensorError:
        raise CheckpointError("the state is not a safetensors file") from None
    check_vectors(tensors, expected)
    return tensors


def vector_in(path: Path, name: str) -> Vector:
    """Return a vector of a state file that `read_state` has accepted. Its parts are read when they are needed, so
    that memory never holds the whole vector.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]

    def read(start: int, stop: int) -> Tensor:
        return torch.from_numpy(np.fromfile(path, "<f4", count=stop - start, offset=8 + length + begin + 4 * start))

    return Vector((end - begin) // 4, read)


def check_layout(position: Mapping[str, Any], layout: ModelLayout, *, origin: str) -> None:
    """Raise CheckpointError if a position in a run belongs to another model. The error names the first difference.

    `origin` tells the user where the position came from.
    """
    if position["layout"] == layout.digest():
        return
    try:
        difference = layout.first_difference(ModelLayout.from_json(position["tensors"]))
    except (KeyError, ValueError):
        difference = "its list of tensors is missing or invalid"
    raise CheckpointError(
        f"{origin} belongs to another model: {difference}; use another --state-dir or `noloco fork`, or in a script "
        "NoLoCo(..., resume=False)"
    )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in `state_dict`, such as running statistics, by name. Each appears once, and none is copied.

    Each peer keeps its own buffers, which are not sent. Partners whose running statistics differ a little can swap
    without harm, because training does not read these statistics. A newcomer starts with the buffers of its own model.
    After a merge, recompute them from data (`torch.optim.swa_utils.update_bn`), because the mean of several models'
    statistics differs from the statistics of the mean model.
    """
    return dict(named_buffers(model))


def restore_buffers(buffers: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy the saved buffers to `buffers`.

    Raises CheckpointError, before anything changes, if names or shapes differ.
    """
    for name, buffer in buffers.items():
        if name not in saved or saved[name].shape != buffer.shape:
            raise CheckpointError(
                f"the checkpoint has no buffer {name} {tuple(buffer.shape)}: it belongs to another model"
            )
    with torch.no_grad():
        for name, buffer in buffers.items():
            if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                buffer.data = saved[name].to(buffer.device, buffer.dtype, copy=True)  # its elements shared their memory
            else:
                buffer.copy_(saved[name])
