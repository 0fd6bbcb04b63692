"""Optimizer and random state as named tensors, so that a checkpoint holds no pickle."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.errors import CheckpointError


def flatten_optimizers(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`flatten_optimizer` of several, each with parameters of its own."""
    return {key: value for optimizer in optimizers for key, value in flatten_optimizer(optimizer, names).items()}


def restore_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `flatten_optimizers`; each takes what is its parameters'. Raises CheckpointError."""
    for optimizer in optimizers:
        restore_optimizer(optimizer, names, tensors)


def flatten_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of each parameter as `field/parameter name`: for AdamW step, exp_avg and exp_avg_sq, for Muon
    momentum_buffer; nothing before step 1.

    `names` maps names to the parameters of the optimizer, as `dict(model.named_parameters())` does: the order of its
    groups then does not matter. The tensors are the optimizer's own, not copies; hyperparameters belong to the spec.
    """
    name_of = {id(parameter): name for name, parameter in names.items()}
    flat: dict[str, Tensor] = {}
    for parameter in _parameters(optimizer):
        for field, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"optimizer state {field} is no tensor"
            flat[f"{field}/{name_of[id(parameter)]}"] = value
    return flat


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `flatten_optimizer`; copies to each parameter's device. The learning rate and the other
    hyperparameters stay the optimizer's own. Raises CheckpointError when names or shapes are not this model's."""
    fields: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        if name not in names or (tensor.ndim and tensor.shape != names[name].shape):
            raise CheckpointError(f"optimizer state {key} {tuple(tensor.shape)} belongs to no parameter of this model")
        fields.setdefault(name, {})[field] = tensor.clone()  # the checkpoint may be a mapped file
    name_of = {id(parameter): name for name, parameter in names.items()}
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):  # torch numbers them in this order
        name = name_of[id(parameter)]
        if name in fields:
            state[index] = fields[name]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def rng_state() -> dict[str, Tensor]:
    """State of every generator that training may use: torch (CPU, each CUDA device in use), Python, NumPy if loaded."""
    version, numbers, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        state |= {f"cuda.{index}": value for index, value in enumerate(torch.cuda.get_rng_state_all())}
    if numpy := sys.modules.get("numpy"):
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = torch.tensor([position, has_gauss, *keys.tolist()], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """The inverse of `rng_state`; devices that this machine does not have are left out. Raises CheckpointError."""
    try:
        torch.set_rng_state(state["torch"].clone())
        version, *numbers = state["python"].tolist()
        gauss = state["python_gauss"].item()
        random.setstate((version, tuple(numbers), None if math.isnan(gauss) else gauss))
        if "numpy" in state:
            _restore_numpy(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the random state of the checkpoint cannot be used: {error!r}") from None
    num_devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    for index in range(num_devices):
        if f"cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda.{index}"].clone(), index)


def _restore_numpy(state: Mapping[str, Tensor]) -> None:
    import numpy as np

    position, has_gauss, *keys = state["numpy"].tolist()
    cached: Any = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
