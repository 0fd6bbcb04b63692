"""Export a trained model as a Hugging Face folder that any program can load, and upload it to the hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from noloco_p2p.data.stream import BYTE_OFFSET
from noloco_p2p.errors import CheckpointError, PushError, SettingsError
from noloco_p2p.spec import ModelSpec, TrainerSpec
from noloco_p2p.trainer.lora import has_adapters, merged_weights, save_adapters
from noloco_p2p.trainer.model import build_on_meta, build_tokenizer, configure_for_export, quiet, save_config

LOST = "lost+found"  # in every new file system


def export_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, adapters_of: ModelSpec | None = None
) -> Path:
    """Write the model and its tokenizer so that `AutoModelForCausalLM` and `AutoTokenizer` can load them offline.

    LoRA adapters are merged into the weights. If the spec of the model is passed as `adapters_of`, only the adapters
    are written, in peft's format. The folder appears atomically. Raises SettingsError if `folder` exists and is not
    empty, and CheckpointError if it cannot be written.
    """
    configure_for_export(model, tokenizer)
    with new_folder(folder) as partial, quiet():
        if adapters_of:
            save_adapters(model, adapters_of.lora, partial, base=adapters_of.pretrained)
        else:
            model.save_pretrained(partial, state_dict=merged_weights(model) if has_adapters(model) else None)
        _for_export(tokenizer).save_pretrained(partial)
    return folder


class StageShards:
    """A writer that exports a model to `folder` one stage at a time, with one file per stage.

    A model that is not cut has one stage. Only one stage has to be in memory at any time.
    """

    def __init__(self, folder: Path, spec: TrainerSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._file_of: dict[str, str] = {}
        self._num_bytes = 0

    def write(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the file of one stage.

        `tensors` maps the names that tensors have in the whole model to their values. A tied tensor appears only once.
        """
        num_stages = self._spec.pipeline.stages
        name = f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors" if num_stages > 1 else SAFE_WEIGHTS_NAME
        save_file(dict(tensors), self._folder / name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(tensors, name)
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, *, folders: Mapping[str, str] | None = None) -> None:
        """Write the files that belong to the whole model. `folders` maps the names of bound models to their folders."""
        spec = self._spec
        model = build_on_meta(spec.model, sequence_length=spec.data.sequence_length, folders=folders)
        tokenizer = build_tokenizer(spec.data, folders=folders)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self._file_of.items()))}
        if spec.pipeline.stages > 1:
            (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        configure_for_export(model, tokenizer)
        with quiet():
            save_config(model, self._folder)
            _for_export(tokenizer).save_pretrained(self._folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose content is in `folder` at the end, or is removed on failure.

    A new folder appears atomically. An empty one that exists may be a link, mounted or the current one, so files are
    moved into it, config.json last. Raises SettingsError as `check_export_folder` does, and CheckpointError if
    something cannot be written.
    """
    check_export_folder(folder)
    exists = folder.is_dir()
    fault = f"the model cannot be exported to {folder}"
    with temporary_folder(folder if exists else folder.parent, fault=fault) as partial:
        yield partial
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if exists:
            for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
                path.rename(folder / path.name)
        else:
            partial.chmod(0o755)
            partial.rename(folder)


@contextmanager
def temporary_folder(parent: Path, *, fault: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed at the end unless it has been renamed.

    Raises CheckpointError with `fault` if something cannot be written.
    """
    partial: Path | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        yield partial
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{fault}: {error}") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check_export_folder(folder: Path) -> None:
    """Raise SettingsError if an export to `folder` would overwrite something, or cannot be written.

    Call this before any long work.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        raise SettingsError(f"cannot export to {folder}: this user may not write to {place}, or it is read-only")
    if folder.exists() and (not folder.is_dir() or any(path.name != LOST for path in folder.iterdir())):
        raise SettingsError(
            f"{folder} already exists and is not an empty folder; choose another folder, because files are never "
            "overwritten"
        )


def _for_export(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that other programs can load.

    A byte tokenizer keeps the ids of ByT5, but no longer adds an end token, which would terminate a prompt. Other
    tokenizers are returned unchanged.
    """
    if not isinstance(tokenizer, ByT5Tokenizer):
        return tokenizer
    special = [tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token]
    vocabulary = {str(token): number for number, token in enumerate(special)}
    # `ByteLevel` writes a byte that is printable in Latin-1 as itself, and the others as the characters from 256 on.
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocabulary |= {letter: BYTE_OFFSET + byte for byte, letter in enumerate(letters)}
    coder = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=tokenizer.unk_token))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=coder,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
    )


def claim_repo(repo: str) -> None:
    """Create the private repository if it does not exist. Call this before long work. Raises PushError."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - the HTTP library, upload threads and the disk share no base
        raise PushError(
            f"--push-to-hub {repo}: {_first_line(error)}. "
            "Log in with `hf auth login`, or set HF_TOKEN; the token needs write access"
        ) from None


def push(folder: Path, repo: str) -> str:
    """Upload the new files in `folder`, and return the address of the repository.

    Files with the same name are replaced. `folder` is never changed. Raises PushError if the upload fails.
    """
    try:
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, exported by noloco_p2p")
        return f"{HfApi().endpoint}/{repo}"
    except Exception as error:  # noqa: BLE001 - as above
        raise PushError(f"{folder} is complete but could not be pushed to {repo}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
