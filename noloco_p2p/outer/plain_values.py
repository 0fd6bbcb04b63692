"""Write values of Python as JSON such that reading them gives equal values, which JSON alone does not do.

JSON turns the keys of a dict into strings and tuples into lists. A MultiStepLR then never finds its milestones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.errors import SettingsError

MARK = "~"  # begins the only key of an object that stands for what JSON does not have


def packed(value: object, name: str) -> Any:
    """Return JSON values for `unpacked`. Raises SettingsError, with the place in `name`, for what cannot be kept."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return _items(value, name)
    if isinstance(value, tuple):
        return {f"{MARK}tuple": _items(value, name)}
    if isinstance(value, Tensor) and value.ndim == 0:  # a learning rate, for example
        return {f"{MARK}tensor": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, Mapping):
        if type(value) is not Counter and all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return {key: packed(each, f"{name}[{key!r}]") for key, each in value.items()}
        kind = "counter" if type(value) is Counter else "dict"
        pairs = [[packed(key, name), packed(each, f"{name}[{key!r}]")] for key, each in value.items()]
        return {f"{MARK}{kind}": pairs}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise SettingsError(
        f"{name} is a {kind}, which a checkpoint cannot keep as JSON: return numbers, strings, lists, tuples or dicts, "
        "such as `value.item()` for a tensor"
    )


def _items(values: list[object] | tuple[object, ...], name: str) -> list[Any]:
    return [packed(each, f"{name}[{index}]") for index, each in enumerate(values)]


def unpacked(value: Any) -> Any:
    """Return the values that were given to `packed`."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"~tuple": items}:
            return tuple(map(unpacked, items))
        case {"~dict": pairs}:
            return {unpacked(key): unpacked(each) for key, each in pairs}
        case {"~tensor": [dtype, number]}:
            return torch.tensor(number, dtype=getattr(torch, dtype), device="cpu")
        case {"~counter": pairs}:
            return Counter({unpacked(key): unpacked(each) for key, each in pairs})
        case _:
            return {key: unpacked(each) for key, each in value.items()}
