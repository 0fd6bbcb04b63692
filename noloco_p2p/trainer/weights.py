"""Draw or read the weights of a model (or part of a model) on the meta device, parameter by parameter.

Memory is allocated only for the parameters that the model has. Each parameter is drawn or read independently, so the
weights of a part of a model are bitwise identical to those in the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from noloco_p2p.errors import ModelError
from noloco_p2p.trainer.model_source import ModelSource, files_of

SEED_BYTES = 6  # 2 ** 48 seeds
KEPT = "_is_hf_initialized"  # an attribute of transformers: `_init_weights` skips a parameter that has it
CPU = torch.device("cpu")

Places = list[tuple[nn.Module, str]]  # the modules that use a parameter; a tied parameter has several


def draw(model: PreTrainedModel, *, seed: int) -> None:
    """Draw each parameter on the CPU, from its own seed, with the initialization that the model defines.

    The caller's random state is restored.
    """
    places = _places(model)
    for name in places:
        _put(places[name], torch.empty_like(model.get_parameter(name), device=CPU))
    params = [model.get_parameter(name) for name in places]
    for param in params:
        setattr(param, KEPT, True)
    with torch.random.fork_rng(devices=[]):
        for name, param in zip(places, params, strict=True):
            owner, _ = places[name][0]
            torch.default_generator.manual_seed(seed_of(f"{seed}/{name}"))
            setattr(param, KEPT, False)
            model._init_weights(owner)
            setattr(param, KEPT, True)
    _fill_buffers(model)


def load(model: PreTrainedModel, source: ModelSource) -> None:
    """Read each parameter as fp32 from a source's safetensors, opening only the files that hold the model's parameters.

    Raises ModelError if a parameter is missing or has another shape. Errors of the hub's client propagate to the
    caller.
    """
    places = _places(model)
    for path, names in _files(source, list(places)).items():
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            for name in names:
                shape = list(model.get_parameter(name).shape)
                if name not in held or file.get_slice(name).get_shape() != shape:
                    raise ModelError(f"{path} has no tensor {name} of shape {shape}")
                # The tensor is copied, because it is in the mapped file and would change with it.
                _put(places[name], file.get_tensor(name).to(torch.float32, copy=True))
    for param in model.parameters():
        setattr(param, KEPT, True)
    _fill_buffers(model)


def seed_of(name: str) -> int:
    """Derive a seed for torch's generator that is the same on every machine."""
    return int.from_bytes(blake3(name.encode()).digest(length=SEED_BYTES), "little")


def _places(model: nn.Module) -> dict[str, Places]:
    """Map the name of each parameter in `named_parameters()` to the modules that use it."""
    found: dict[int, tuple[str, Places]] = {}
    for path, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            found.setdefault(id(param), (f"{path}.{key}", []))[1].append((module, key))
    return dict(found.values())


def _put(places: Places, values: Tensor) -> None:
    param = Parameter(values)
    for module, key in places:
        module.register_parameter(key, param)


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, such as position frequencies and scales.

    All parameters must have the attribute KEPT, which this function removes at the end.
    """
    for module in model.modules():
        own = list(module.named_buffers(recurse=False))
        for key, buffer in own:
            module._buffers[key] = torch.empty_like(buffer, device=CPU)
        if own:
            model._init_weights(module)
    for param in model.parameters():
        delattr(param, KEPT)


def _files(source: ModelSource, names: list[str]) -> dict[Path, list[str]]:
    """Map each file to the tensors among `names` that it contains."""
    try:
        index = source.file(SAFE_WEIGHTS_INDEX_NAME)
    except FileNotFoundError:  # a model in one file has no index
        return {source.file(SAFE_WEIGHTS_NAME): names}
    file_of = files_of(index)
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if name not in file_of:
            raise ModelError(f"{index} lists no file for the tensor {name}")
        by_file[file_of[name]].append(name)
    return {source.file(file): held for file, held in by_file.items()}
