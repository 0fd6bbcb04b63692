"""Represent the state of the inner optimizer as named tensors, so that a checkpoint needs no pickle."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError

log = logging.getLogger(__name__)


class InnerState(Protocol):
    """The state of an inner optimizer that a checkpoint keeps."""

    def state(self) -> dict[str, Tensor]:
        """Return the moments by name, without copying them."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. If `tensors` is empty, reset the optimizer.

        Raises CheckpointError if the tensors do not match the model.
        """
        ...


def inner_state(
    optimizer: Optimizer | Sequence[Optimizer] | InnerState | None, model: nn.Module
) -> tuple[InnerState | None, Sequence[Optimizer]]:
    """Return the inner optimizer's `InnerState` and the torch optimizers, of which the last one ends an inner step.

    Raises ModelError if the optimizer trains parameters that do not belong to the model, because they would not be
    swapped.
    """
    if isinstance(optimizer, Optimizer):
        optimizer = [optimizer]
    if optimizer is None or not isinstance(optimizer, Sequence):
        return optimizer, ()
    if not optimizer:
        raise ModelError("the list of optimizers is empty")
    return TorchOptimizers(optimizer, dict(model.named_parameters())), optimizer


class TorchOptimizers:
    """The `InnerState` of torch optimizers, each of which has its own parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[str, Tensor]) -> None:
        """Wrap these optimizers. `names` maps names to the parameters of the model."""
        own = {id(parameter) for parameter in names.values()}
        num_foreign = sum(id(parameter) not in own for one in optimizers for parameter in _parameters(one))
        if num_foreign:
            raise ModelError(
                f"the optimizer trains {num_foreign} parameters that do not belong to the model and would not be "
                "swapped: put all trained parameters into one model, such as an nn.ModuleDict"
            )
        self._optimizers = optimizers
        self._names = names
        self._is_warned = False

    def state(self) -> dict[str, Tensor]:
        """Return the state. If a field is not a tensor, log a warning and return an empty state.

        A checkpoint that cannot be saved must not end training.
        """
        try:
            return flatten_optimizers(self._optimizers, self._names)
        except CheckpointError as error:
            if not self._is_warned:
                log.warning("%s; after a restart, the inner optimizer will start from scratch", error)
            self._is_warned = True
            return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        restore_optimizers(self._optimizers, self._names, tensors)


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the gradients of a step overflowed, so that the step changes nothing.

    This can be the case only in a step that a GradScaler started. A scaler skips such a step itself, unless a fused
    optimizer handles the overflow.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())


def flatten_optimizers(optimizers: Sequence[Optimizer], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of each parameter under keys `field/parameter name`. The result is empty before the first step.

    The fields are step, exp_avg and exp_avg_sq for AdamW, and momentum_buffer for Muon. `names` maps names to the
    parameters of the optimizers, as `dict(model.named_parameters())` does, so the order of their groups does not
    matter. The tensors are not copied. Hyperparameters are left out because they belong to the spec. Raises
    CheckpointError if a field is not a tensor.
    """
    name_of = {id(parameter): name for name, parameter in names.items()}
    flat: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            for field, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"the state of {type(optimizer).__name__} cannot be saved: its {field!r} is not a tensor"
                    )
                flat[f"{field}/{name_of[id(parameter)]}"] = value
    return flat


def restore_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    keep_on_cpu: bool = False,
) -> None:
    """Restore what `flatten_optimizers` returned, by copying it to the device of each parameter.

    If `keep_on_cpu` is true, moments are copied to pinned memory instead. The optimizers keep their learning rates and
    other hyperparameters. A parameter without saved state is reset. Raises CheckpointError if names or shapes do not
    match the model.
    """
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        if name not in names or not _fits(tensor, names[name]):
            raise CheckpointError(
                f"optimizer state {key} {tuple(tensor.shape)} does not match any parameter of this model"
            )
        saved.setdefault(name, {})[field] = tensor.clone()  # the checkpoint may be a mapped file
    name_of = {id(parameter): name for name, parameter in names.items()}
    for optimizer in optimizers:
        state: dict[int, dict[str, Tensor]] = {}
        moments: list[tuple[Tensor, dict[str, Tensor]]] = []
        for index, parameter in enumerate(_parameters(optimizer)):  # torch numbers parameters in this order
            fields = saved.get(name_of[id(parameter)])
            if fields and keep_on_cpu:  # load_state_dict then restores only the step counts
                moments.append(
                    (parameter, {field: value.pin_memory() for field, value in fields.items() if value.ndim})
                )
                fields = {field: value for field, value in fields.items() if not value.ndim}
            if fields is not None:
                state[index] = fields
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for parameter, fields in moments:
            optimizer.state[parameter].update(fields)


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a value can belong to a parameter.

    It must be a scalar or have the shape of the parameter or, as with Adafactor, of one of its rows or columns.
    """
    if value.ndim == parameter.ndim:
        return all(mine in (1, whole) for mine, whole in zip(value.shape, parameter.shape, strict=True))
    return not value.ndim


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
