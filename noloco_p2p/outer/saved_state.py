"""Save the outer state of a peer in a checkpoint, restore it, and describe it to newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.transfer.donor import SavedState, describe_state

STATE_FILE = "outer"  # stem of the file with slow weights and outer momentum in a checkpoint
FAST_FILE = "fast"  # stem of the file with the model's weights, if a checkpoint is taken within a round
INNER_FILE = "optimizer"  # stem of the file with the state of the inner optimizer
BUFFERS_FILE = "buffers"  # stem of the file with buffers such as running statistics, if the model has any


def tensors_of(state: OuterState, model: nn.Module, *, is_within_round: bool) -> dict[str, dict[str, Tensor]]:
    """Return the tensors to save, by file and name.

    Between rounds, the model equals its slow weights and is left out.
    """
    tensors = {STATE_FILE: state.tensors()}
    if buffers := persistent_buffers(model):
        tensors[BUFFERS_FILE] = buffers
    if is_within_round:
        tensors[FAST_FILE] = state.parameters.named_values()
    return tensors


def put_back(checkpoint: Checkpoint, state: OuterState, model: nn.Module) -> dict[str, Any]:
    """Restore the state and the model from a checkpoint, and return its position in the run.

    Raises CheckpointError if the checkpoint is damaged or belongs to another model.
    """
    position = checkpoint.meta["outer"]
    check_layout(position, state.parameters.model_layout, origin=str(checkpoint.path))
    state.take(checkpoint.load(STATE_FILE))
    if position["steps"]:
        state.parameters.take(checkpoint.load(FAST_FILE))
    if buffers := persistent_buffers(model):
        restore_buffers(buffers, checkpoint.load(BUFFERS_FILE))
    return position


def for_newcomers(folder: Path, state: OuterState, position: dict[str, Any]) -> SavedState:
    """Return a description for newcomers of the checkpoint in `folder`, written at this position in the run."""
    return describe_state(
        folder / f"{STATE_FILE}.safetensors",
        layout=state.layout,
        num_elements=state.num_elements,
        round_index=position["round"],
        progress=position["progress"],
    )


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
    raise CheckpointError(f"{origin} belongs to another model: {difference}; use another --state-dir or `noloco fork`")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in `state_dict`, such as running statistics, by name. Each appears once, and none is copied.

    Each peer keeps its own buffers, which are not sent. Partners whose running statistics differ a little can swap
    without harm, because training does not read these statistics. A newcomer starts with the buffers of its own model.
    After a merge, recompute them from data (`torch.optim.swa_utils.update_bn`), because the mean of several models'
    statistics differs from the statistics of the mean model.
    """
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


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
            buffer.copy_(saved[name])
