"""A trained model as a Hugging Face folder, for any program that reads one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.spec import ModelSpec
from noloco_p2p.trainer.byte_tokenizer import for_export
from noloco_p2p.trainer.lora import has_adapters, merged_weights, save_adapters
from noloco_p2p.trainer.model import configured_for_export, quiet


def export_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, adapters_of: ModelSpec | None = None
) -> Path:
    """Write model and tokenizer so that `AutoModelForCausalLM` and `AutoTokenizer` load them with no network.

    LoRA adapters are merged into the weights that are written; with `adapters_of`, the spec of the model, they are
    written alone, as peft reads them.

    All of the folder appears at once, or nothing does. Raises SettingsError when `folder` exists and is not empty,
    CheckpointError when it cannot be written.
    """
    check_export_folder(folder)
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        _write(model, tokenizer, partial, adapters_of)
        partial.chmod(0o755)
        partial.rename(folder)  # replaces an empty folder, never a full one
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the model cannot be exported to {folder}: {error}") from None
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def check_export_folder(folder: Path) -> None:
    """Raises SettingsError when an export to `folder` would have to overwrite something. Ask before hours of work."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder} exists and is not an empty folder; nothing is overwritten, name another one")


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, adapters_of: ModelSpec | None
) -> None:
    with quiet(), configured_for_export(model, tokenizer):
        if adapters_of:
            save_adapters(model, adapters_of.lora, folder, base=adapters_of.pretrained)
        elif has_adapters(model):
            model.save_pretrained(folder, state_dict=merged_weights(model))
        else:
            model.save_pretrained(folder)
        for_export(tokenizer).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
