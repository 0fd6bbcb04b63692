"""The layout of a model describes its tensors. Two peers can swap only if their layouts are equal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

MAX_LAYOUT_BYTES = 1 << 20  # about 10,000 tensors; a larger list from the network is refused
MAX_NAME = 200  # longer tensor names are truncated in messages


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The trainable tensors of a model by name and shape, and its frozen tensors by name, shape and content.

    Frozen tensors are never sent. Buffers, such as running statistics, may differ between peers and are not included.
    """

    trainable: tuple[tuple[str, tuple[int, ...]], ...]
    frozen: tuple[tuple[str, tuple[int, ...], str], ...] = ()  # name, shape, BLAKE3 digest of the bytes

    @property
    def num_elements(self) -> int:
        """The size of the flat vector of all trainable tensors."""
        return sum(math.prod(shape) for _, shape in self.trainable)

    def as_json(self) -> bytes:
        """Return the canonical JSON encoding of the layout."""
        return json.dumps({"trainable": self.trainable, "frozen": self.frozen}, separators=(",", ":")).encode()

    def digest(self) -> str:
        """Return the digest as 64 hexadecimal digits. Two peers can swap only if their digests are equal."""
        return blake3(self.as_json()).hexdigest()

    @classmethod
    def from_json(cls, data: bytes | str) -> ModelLayout:
        """Parse the output of `as_json`. Raises ValueError for any other data."""
        if len(data) > MAX_LAYOUT_BYTES:
            raise ValueError(f"the list of tensors has {len(data)} bytes, but the limit is {MAX_LAYOUT_BYTES}")
        try:
            return _LAYOUT.validate_json(data, strict=True)
        except ValidationError as error:
            raise ValueError(f"the list of tensors is invalid: {error.errors()[0]['msg']}") from None

    def first_difference(self, other: ModelLayout) -> str:
        """Describe the first tensor that differs in `other`, trainable tensors first, or return "" if none differs."""
        for what, ours, theirs in (
            ("trainable", self.trainable, other.trainable),
            ("frozen", self.frozen, other.frozen),
        ):
            for one, two in zip_longest(ours, theirs):
                if one != two:
                    return _difference(what, one, two)
        return ""


_LAYOUT = TypeAdapter(ModelLayout)


def _difference(what: str, ours: tuple[Any, ...] | None, theirs: tuple[Any, ...] | None) -> str:
    if ours and theirs and ours[:2] == theirs[:2]:
        return f"the {what} tensor {_shown(ours)} has different values, perhaps because of another revision or seed"
    return f"the {what} tensors differ: this model has {_shown(ours)}, the other has {_shown(theirs)}"


def _shown(tensor: tuple[Any, ...] | None) -> str:
    if tensor is None:
        return "none"
    name = "".join(char for char in tensor[0][:MAX_NAME] if char.isprintable())
    return f"{name} {list(tensor[1])}"
