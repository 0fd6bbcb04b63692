"""Store and load start states, which are the initial weights of forked runs, and revive a stage from kept weights.

A start state is a folder, named after the digest in the spec of its run. It contains the parameters by name, and the
file DIGESTS with the digest of each parameter. The digest of the file DIGESTS identifies the whole state. A peer of a
stage therefore reads and checks only its own part, however the forked run is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.flat import FlatParameters, content_digest
from noloco_p2p.outer.saved_state import STATE_FILE, check_layout
from noloco_p2p.outer.weights import WEIGHTS
from noloco_p2p.trainer.export import temporary_folder
from noloco_p2p.trainer.model_source import ModelSource
from noloco_p2p.trainer.weights import load

DIGESTS = "digests.json"


class NewStart:
    """A start state that is written part by part to `folder`.

    Once the state is complete, `digest` is the value for `model.start`, "blake3:<hex>".
    """

    def __init__(self, folder: Path) -> None:
        self.digest = ""
        self.folder = folder
        self._digests: dict[str, str] = {}
        self._num_files = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write one part of the state. `tensors` maps names of parameters to fp32 values."""
        save_file(dict(tensors), self.folder / f"{self._num_files:05d}.safetensors")
        self._num_files += 1
        self._digests |= {name: content_digest(values) for name, values in tensors.items()}

    def finish(self, state_dir: Path) -> None:
        listed = json.dumps(self._digests, sort_keys=True).encode()
        (self.folder / DIGESTS).write_bytes(listed)
        self.digest = _digest(listed)
        folder = _folder(self.digest, state_dir)
        if not folder.exists():  # otherwise the same state was forked before
            self.folder.rename(folder)
        self.folder = folder


@contextmanager
def new_start(state_dir: Path) -> Iterator[NewStart]:
    """Yield a start state that is stored at the end, or removed on failure.

    Raises CheckpointError if it cannot be written.
    """
    starts = state_dir / "starts"
    with temporary_folder(starts, fault=f"the start state cannot be written to {starts}") as partial:
        start = NewStart(partial)
        yield start
        start.finish(state_dir)


def has_start(start: str, *, state_dir: Path) -> bool:
    """Return True if the start state that a spec names is on this machine, or if the spec names none."""
    return not start or _folder(start, state_dir).exists()


def load_start(model: nn.Module, start: str, *, state_dir: Path) -> None:
    """Load the start state that a spec names into a model or a stage, if it is on this machine.

    Raises ModelError if the state is damaged or belongs to another model.
    """
    if not start or not (folder := _folder(start, state_dir)).exists():
        return
    parameters, found = FlatParameters(model), dict[str, Tensor]()
    try:
        listed = (folder / DIGESTS).read_bytes()
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                held = set(file.keys())
                found |= {name: file.get_tensor(name) for name, _ in parameters.named if name in held}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from None
    digests = json.loads(listed) if _digest(listed) == start else {}
    if not digests or any(content_digest(values) != digests.get(name) for name, values in found.items()):
        raise ModelError(
            f"{folder} is damaged: its digest differs from model.start; remove it and run `noloco fork` again"
        )
    for name, param in parameters.named:
        if name not in found or found[name].shape != param.shape:
            has = f"the shape {list(found[name].shape)}" if name in found else "no values"
            raise ModelError(
                f"{name} has the shape {list(param.shape)} in this spec, but {has} in model.start; a fork cannot "
                "change the sizes of the model"
            )
    parameters.take(found)


def revive(model: PreTrainedModel, folder: Path) -> None:
    """Load a stage from `folder`, which is a checkpoint of this stage or an exported model.

    An operator who has kept such a folder restores a stage with it that no peer holds any more.

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


def _digest(listed: bytes) -> str:
    return f"blake3:{blake3(listed).hexdigest()}"


def _folder(start: str, state_dir: Path) -> Path:
    return state_dir / "starts" / start.removeprefix("blake3:")[:64]
