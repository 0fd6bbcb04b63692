"""Restore a stage that no peer holds any more, from a checkpoint or an export that the operator has kept."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.saved_state import STATE_FILE, check_layout
from noloco_p2p.outer.weights import WEIGHTS
from noloco_p2p.trainer.model_source import ModelSource
from noloco_p2p.trainer.weights import load


def revive(model: PreTrainedModel, folder: Path) -> None:
    """Load a stage from `folder`, which is a checkpoint of this stage or an exported model.

    Raises CheckpointError if it is neither, or if it belongs to another model.
    """
    if (folder / "config.json").is_file():
        try:
            load(model, ModelSource(str(folder), "", folder))
        except (ModelError, SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{folder} is not an export of this model: {error}") from None
        return
    checkpoint = Checkpoint(folder) if (folder / "manifest.json").is_file() else Checkpoints(folder).newest()
    if checkpoint is None:
        raise CheckpointError(f"{folder} contains neither a checkpoint of this stage nor an exported model")
    parameters = FlatParameters(model)
    check_layout(checkpoint.meta["outer"], parameters.model_layout, origin=str(checkpoint.path))
    parameters.write(0, checkpoint.load(STATE_FILE)[WEIGHTS])
