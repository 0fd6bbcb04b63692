"""Represent the state of the inner optimizer as named tensors, so that a checkpoint needs no pickle.

A scalar of Python becomes a tensor whose key names its type, such as `int:step/0.weight`. The hyperparameters of a
script's own optimizers are kept as well, such as `group:0.1:float/lr`, because a scheduler changes them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.outer.flat import named_parameters
from noloco_p2p.telemetry.console import counted

log = logging.getLogger(__name__)

SCALARS = {"bool": (bool, torch.bool), "int": (int, torch.int64), "float": (float, torch.float64)}
GROUP = "group:"  # begins the keys of hyperparameters
SCALES = {"absmax1", "absmax2", "qmap1", "qmap2"}  # fields with the code and the scales of moments of 8 bits
DEEPEST = 4  # wrappers around one optimizer


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

    A wrapper, such as that of accelerate, is replaced by the torch optimizer inside. Raises ModelError if the optimizer
    is of an unknown kind, or if it trains parameters that do not belong to the model, because they would not be
    swapped.
    """
    if optimizer is None:
        return None, ()
    if isinstance(optimizer, Sequence):
        if not optimizer:
            raise ModelError("the list of optimizers is empty")
        found = [_unwrapped(one) for one in optimizer]
    elif callable(getattr(optimizer, "restore", None)) and callable(getattr(optimizer, "state", None)):
        return optimizer, ()  # pyright: ignore[reportReturnType] - only an InnerState has both
    else:
        found = [_unwrapped(optimizer)]
    return TorchOptimizers(found, dict(named_parameters(model))), found


def _unwrapped(optimizer: object) -> Optimizer:
    """Return the innermost torch optimizer. It has the moments, and some wrappers call it without their own `step`."""
    one, found = optimizer, None
    for _ in range(DEEPEST):
        if isinstance(one, Optimizer) and "_optimizer_step_post_hooks" in vars(one):
            found = one
        one = getattr(one, "optimizer", None) or getattr(one, "base_optimizer", None)
    if found:
        return found
    raise ModelError(
        f"the steps of {type(optimizer).__name__} cannot be counted, because it is not a torch optimizer: pass the "
        "torch optimizer inside it, or pass None and call `step` after each inner step"
    )


class TorchOptimizers:
    """The `InnerState` of torch optimizers, each of which has its own parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[str, Tensor]) -> None:
        """Wrap these optimizers. `names` maps names to the parameters of the model."""
        self._optimizers = optimizers
        self._names = names
        self._own = {id(parameter) for parameter in names.values()}
        self._is_warned = False
        self.check()

    def check(self) -> None:
        """Raise ModelError if a parameter does not belong to the model. Groups can be added at any time."""
        num_foreign = sum(id(each) not in self._own for one in self._optimizers for each in _parameters(one))
        if num_foreign:
            raise ModelError(
                f"the optimizer trains {num_foreign} parameters that do not belong to the model and would not be "
                "swapped: put all trained parameters into one model, such as an nn.ModuleDict"
            )

    def state(self) -> dict[str, Tensor]:
        """Return the state and the hyperparameters.

        A checkpoint that cannot be saved must not end training. So if a field of the state is neither a tensor nor a
        number, log a warning and return the hyperparameters alone.
        """
        self.check()
        groups = dict(self._hyperparameters())
        try:
            return groups | flatten_optimizers(self._optimizers, self._names)
        except CheckpointError as error:
            if not self._is_warned:
                log.warning("%s; after a restart, the inner optimizer will start from scratch", error)
            self._is_warned = True
            return groups

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        moments = {key: value for key, value in tensors.items() if not key.startswith(GROUP)}
        restore_optimizers(self._optimizers, self._names, moments)
        trained = {id(parameter) for one in self._optimizers for parameter in _parameters(one)}
        held = {key.partition("/")[2] for key in moments}
        if lost := sorted(name for name in held if id(self._names[name]) not in trained):
            log.warning(
                "the saved optimizer state of %s was not restored, because no optimizer trains %s yet: add all groups "
                "of parameters before you create the NoLoCo",
                counted(len(lost), "parameter"),
                lost[0],
            )
        groups = {
            f"{number}.{index}": group
            for number, optimizer in enumerate(self._optimizers)
            for index, group in enumerate(optimizer.param_groups)
        }
        for key in tensors.keys() - moments.keys():
            kind, _, name = key.removeprefix(GROUP).partition("/")
            where, _, kind = kind.partition(":")
            if where in groups:  # a group that is added later keeps what it is added with
                _put_back(groups[where], name, _plain(kind, tensors[key]))

    def _hyperparameters(self) -> Iterator[tuple[str, Tensor]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    kind, tensor = _as_tensor(value)
                    if tensor is not None:
                        yield f"{GROUP}{number}.{index}:{kind}/{name}", tensor


def _as_tensor(value: object) -> tuple[str, Tensor | None]:
    """Return the type of a tensor, a number or a tuple of numbers, and a tensor with its value, or None for others."""
    if isinstance(value, Tensor):
        return "", value.detach()
    for kind, (python, dtype) in SCALARS.items():
        if isinstance(value, python):
            return kind, torch.tensor(value, dtype=dtype, device="cpu")
    if isinstance(value, tuple) and value and all(isinstance(each, int | float) for each in value):
        return "floats", torch.tensor(value, dtype=torch.float64, device="cpu")
    return "", None


def _plain(kind: str, saved: Tensor) -> Any:
    """Return the value from which `_as_tensor` made a tensor."""
    if kind == "floats":
        return tuple(saved.tolist())
    return SCALARS[kind][0](saved.item()) if kind else saved.clone()  # the checkpoint may be a mapped file


def _put_back(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a hyperparameter. A tensor keeps its identity, because a compiled step may hold it."""
    if isinstance(group.get(name), Tensor):
        group[name].copy_(torch.as_tensor(value, device="cpu"))
    else:
        group[name] = value


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
    matter. The tensors are not copied. Raises CheckpointError if a field is neither a tensor nor a number.
    """
    name_of = {id(parameter): name for name, parameter in names.items()}
    flat: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            for field, value in optimizer.state.get(parameter, {}).items():
                kind, tensor = _as_tensor(value)
                if tensor is None and value is not None:
                    raise CheckpointError(
                        f"the state of {type(optimizer).__name__} cannot be saved: its {field!r} is a "
                        f"{type(value).__name__}"
                    )
                if tensor is not None:
                    flat[f"{kind}{':' * bool(kind)}{field}/{name_of[id(parameter)]}"] = tensor
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
    saved: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        kind, _, field = field.rpartition(":")
        if name not in names or not (field in SCALES or _fits(tensor, names[name])):
            raise CheckpointError(
                f"optimizer state {key} {tuple(tensor.shape)} does not match any parameter of this model"
            )
        saved.setdefault(name, {})[field] = _plain(kind, tensor)
    name_of = {id(parameter): name for name, parameter in names.items()}
    for optimizer in optimizers:
        state: dict[int, dict[str, Any]] = {}
        moments: list[tuple[Tensor, dict[str, Tensor]]] = []
        for index, parameter in enumerate(_parameters(optimizer)):  # torch numbers parameters in this order
            fields = saved.get(name_of[id(parameter)])
            if fields and keep_on_cpu:  # load_state_dict then restores only the step counts
                moments.append(
                    (parameter, {field: value.pin_memory() for field, value in fields.items() if _is_array(value)})
                )
                fields = {field: value for field, value in fields.items() if not _is_array(value)}
            if fields is not None:
                state[index] = fields
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for parameter, fields in moments:
            optimizer.state[parameter].update(fields)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


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
