"""Find the models and tokenizers that a spec names, on the hub or in folders that are bound on this machine.

A spec may come from a stranger. It can therefore name only folders that the user of this machine has bound with --model
NAME=FOLDER. The hub's own libraries do not ensure this. They read a folder in the current directory if it has the given
name, and follow an adapter to another model. For this reason, the files of a model on the hub are first fetched into
the hub's cache, and then read from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from noloco_p2p.errors import ModelError, SpecError
from noloco_p2p.spec import HUB_NAME

CONFIG = ("config.json", "generation_config.json")
WEIGHTS = (*CONFIG, "*.safetensors", "*.safetensors.index.json")
TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja")
# Adapters can name any base model, and subfolders hold other formats of the same model.
NEVER = ("adapter_*", "*/*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model or tokenizer that a spec names.

    It is in the folder `bound`, or on the hub at `revision` if `bound` is None.
    """

    name: str
    revision: str
    bound: Path | None

    def folder(self, files: tuple[str, ...]) -> Path:
        """Return a folder with the files that match the patterns `files`.

        Raises ModelError if an index of weights names a file outside the folder. Errors of the hub's client propagate
        to the caller.
        """
        folder = self.bound or Path(
            snapshot_download(self.name, revision=self.revision, allow_patterns=[*files], ignore_patterns=[*NEVER])
        )
        for index in folder.glob("*.index.json"):
            files_of(index)
        return folder

    def file(self, name: str) -> Path:
        """Return the path of one file.

        Raises FileNotFoundError if there is no such file. Errors of the hub's client propagate to the caller.
        """
        if self.bound is None:
            try:
                return Path(hf_hub_download(self.name, name, revision=self.revision))
            except EntryNotFoundError:
                raise FileNotFoundError(f"{self.name} has no file {name}") from None
        path = self.bound / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return path


def files_of(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor from an index of weights.

    Raises ModelError if it names anything but files beside it. `transformers` would open any path, so a model on the
    hub could start a run from the private weights of this machine.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is not an index of weights") from None
    if foreign := next((name for name in names.values() if name != Path(name).name), None):
        raise ModelError(f"{index} lists the file {foreign!r}, which is not beside it")
    return names


def find_source(field: str, name: str, *, revision: str = "", folders: Mapping[str, str] | None = None) -> ModelSource:
    """Find the source of a name without opening a file or using the network.

    `field` is the name of the spec's field in error messages. `folders` maps the names that are bound here to their
    folders. Raises SpecError if the name is neither bound nor a valid hub name, and ModelError if a bound folder is
    missing or holds an adapter without its model.
    """
    bound = (folders or {}).get(name)
    if bound is None:
        if not HUB_NAME.fullmatch(name):
            raise SpecError(
                f"{field} {name!r} is neither OWNER/NAME on the hub nor bound on this machine; "
                f"use --model {name}=FOLDER"
            )
        return ModelSource(name, revision or "main", None)
    folder = Path(bound)
    if not folder.is_dir():
        raise ModelError(f"{name} is bound to {bound}, which is not a folder")
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ModelError(f"{field} {name!r} is an adapter without its base model; bind the folder of the base model")
    return ModelSource(name, revision or "main", folder)
