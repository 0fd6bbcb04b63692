"""Check another peer's state before it is used by a newcomer, a peer that catches up, a merge or a fork.

The functions raise CheckpointError with a message that explains the problem. They do not use the network.
`peer/state_admission.py` asks the swarm for positions, and `robust_mean.py` compares states with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.errors import CheckpointError
from noloco_p2p.spec import OuterSpec, Spec

WEIGHTS, OUTER_MOMENTUM = "weights", "outer_momentum"
MIN_POSITIONS = 3  # with fewer positions, it is unclear which one is wrong


def vectors_of(outer: OuterSpec, num_elements: int) -> dict[str, int]:
    """Return the flat vectors of a state of this run, as a mapping from their names to their sizes."""
    names = (WEIGHTS, OUTER_MOMENTUM) if outer.keeps_momentum else (WEIGHTS,)
    return dict.fromkeys(names, num_elements)


def read_state(path: Path, expected: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the vectors of a state file after `check_vectors` has accepted them.

    They are mapped from the file and not copied. Raises OSError if the file cannot be read, and CheckpointError for an
    invalid state or another file format.
    """
    try:
        tensors = load_file(path)
    except SafetensorError:
        raise CheckpointError("the state is not a safetensors file") from None
    check_vectors(tensors, expected)
    return tensors


def check_vectors(tensors: Mapping[str, object], expected: Mapping[str, int]) -> None:
    """Raise CheckpointError if a vector has the wrong size or dtype, or contains non-finite numbers.

    `expected` maps the name of each flat vector to its size. Other entries are ignored.
    """
    for name, num_elements in expected.items():
        vector = tensors.get(name)
        if not isinstance(vector, Tensor) or vector.shape != (num_elements,):
            raise CheckpointError(
                f"the state has no vector {name} of {num_elements} elements: it belongs to another model"
            )
        if vector.dtype is not torch.float32:
            raise CheckpointError(f"{name} in the state is {vector.dtype} instead of float32")
        if not all(bool(torch.isfinite(chunk).all()) for chunk in vector.split(CHUNK_ELEMENTS)):
            raise CheckpointError(f"{name} in the state contains non-finite values")


def check_position(progress: float, others: Sequence[float], spec: Spec) -> None:
    """Raise CheckpointError if a position in the schedule is far from the median of the live peers, `others`."""
    if len(others) < MIN_POSITIONS:
        return
    middle = median(others)
    if not abs(progress - middle) <= 2 * spec.furthest:  # NaN is refused, too
        raise CheckpointError(
            f"the state is at {100 * progress:.1f} % of the schedule, but the swarm is at {100 * middle:.1f} %"
        )
