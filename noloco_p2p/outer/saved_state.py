"""The outer state of a peer in a checkpoint: what is written, how it is put back, and what newcomers get of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.buffers import persistent_buffers, restore_buffers
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.transfer.donor import SavedState, describe_state

STATE_FILE = "outer"  # stem of the file with slow weights and outer momentum in a checkpoint
FAST_FILE = "fast"  # stem of the file with the model's weights, when a checkpoint is taken within a round
INNER_FILE = "optimizer"  # stem of the file with the state of the inner optimizer
BUFFERS_FILE = "buffers"  # stem of the file with running statistics and the like, where a model has some


def tensors_of(state: OuterState, model: nn.Module, *, is_within_round: bool) -> dict[str, dict[str, Tensor]]:
    """File -> name -> tensor. Between two rounds the model equals its slow weights, and is not written."""
    tensors = {STATE_FILE: state.tensors()}
    if buffers := persistent_buffers(model):
        tensors[BUFFERS_FILE] = buffers
    if is_within_round:
        tensors[FAST_FILE] = state.parameters.named_values()
    return tensors


def put_back(checkpoint: Checkpoint, state: OuterState, model: nn.Module) -> dict[str, Any]:
    """State and model become those of the checkpoint; returns its place in the run. Raises CheckpointError."""
    place = checkpoint.meta["outer"]
    check_layout(place, state.parameters.model_layout, origin=str(checkpoint.path))
    state.take(checkpoint.load(STATE_FILE))
    if place["steps"]:
        state.parameters.take(checkpoint.load(FAST_FILE))
    if buffers := persistent_buffers(model):
        restore_buffers(buffers, checkpoint.load(BUFFERS_FILE))
    return place


def for_newcomers(folder: Path, state: OuterState, place: dict[str, Any]) -> SavedState:
    """The checkpoint in `folder`, written at that place in the run."""
    return describe_state(
        folder / f"{STATE_FILE}.safetensors",
        layout=state.layout,
        num_elements=state.num_elements,
        round_index=place["round"],
        progress=place["progress"],
    )


def check_layout(place: Mapping[str, Any], layout: ModelLayout, *, origin: str) -> None:
    """Raises CheckpointError, with the first tensor that differs, when a place in a run is of another model.

    origin: what the place was read from, for the message.
    """
    if place["layout"] == layout.digest():
        return
    try:
        difference = layout.first_difference(ModelLayout.from_json(place["tensors"]))
    except (KeyError, ValueError):
        difference = "it does not say which"
    raise CheckpointError(f"{origin} is of another model: {difference}; use another --state-dir, or `noloco fork`")
