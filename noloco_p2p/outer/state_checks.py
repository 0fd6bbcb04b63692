"""Check another peer's state before it is used by a newcomer, a peer that catches up, a merge or a fork.

The functions check tensors, positions in the run, and the sketches that peers publish. They raise CheckpointError with
a message that explains the problem. They do not use the network. `peer/state_admission.py` asks the swarm for the
values that these functions need, and `robust_mean.py` compares states with each other.

The limits are based on measurements in honest swarms (`benchmarks/honest_states.py`) with a schedule of 40 rounds. Real
runs have far longer schedules, so their weights move less in a round. States that were 32 rounds apart differed by up
to 0.75 of their norm, and their norms differed by a factor of up to 1.6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.codec.sketch import AT_REST, MARKS, Sketch, norm, sketch, unpack
from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.staleness import FRESH_ROUNDS, STALE_ROUNDS
from noloco_p2p.spec import OuterSpec, Spec

SLOW_WEIGHTS, OUTER_MOMENTUM = "slow_weights", "outer_momentum"
MIN_POSITIONS = 3  # with fewer positions, it is unclear which one is wrong
MIN_SKETCHES = 2  # sketches of other peers; a single one is not enough to refuse a state
MARKS_COMPARED = 2  # each mark takes one pass over the state, at 3 ns per number
LARGEST_DISTANCE = 1.0  # relative to the norm: 0.75 plus three standard deviations of a sketch (9 % of a distance)
LARGEST_NORM_RATIO = 1.75  # the ratio is up to 1.6 in honest swarms


def vectors_of(outer: OuterSpec, num_elements: int) -> dict[str, int]:
    """Return the flat vectors of a state of this run, as a mapping from their names to their sizes."""
    names = (SLOW_WEIGHTS, OUTER_MOMENTUM) if outer.keeps_momentum else (SLOW_WEIGHTS,)
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


def check_position(round_index: int, progress: float, others: Sequence[tuple[int, float]], spec: Spec) -> None:
    """Raise CheckpointError if a position in the run is far from the positions of the swarm.

    `others` holds the round and the progress of each live peer, including the donor. The round counters of honest peers
    differ because their speeds and round lengths do, so a counter is refused only if it deviates far more.
    """
    if len(others) < MIN_POSITIONS:
        return
    outer, middle = spec.outer, median(progress for _, progress in others)
    if not abs(progress - middle) <= STALE_ROUNDS * outer.longest_round / spec.schedule_steps:
        raise CheckpointError(
            f"the state is at {100 * progress:.1f} % of the schedule, but the swarm is at {100 * middle:.1f} %"
        )
    shortest = outer.min_inner_steps if outer.is_auto else outer.longest_round
    most = FRESH_ROUNDS * outer.longest_round / shortest * median(count for count, _ in others) + STALE_ROUNDS
    if not 0 <= round_index <= most:
        raise CheckpointError(
            f"the state claims to be from round {round_index}, which no peer of this swarm can have reached"
        )


def check_sketches(slow_weights: Tensor, published: Sequence[str], *, progress: float, spec: Spec) -> None:
    """Raise CheckpointError if the weights are far from the sketches that most of the other peers publish.

    `published` holds the packed sketches of the other peers. The state is sketched at the same marks, except for marks
    that are further from `progress` than the staleness limit. Anyone can compute these sketches and construct weights
    that pass. This check therefore finds only faults and simple lies, and a comparison with other donors finds more.
    """
    reach = STALE_ROUNDS * spec.outer.longest_round / spec.schedule_steps
    read = [found for text in published if (found := unpack(text)) and abs(_progress_of(found) - progress) <= reach]
    marks = [mark for mark, _ in Counter(found.mark for found in read).most_common(MARKS_COMPARED)]
    compared = [found for found in read if found.mark in marks]
    if len(compared) < MIN_SKETCHES:
        return
    length = norm(slow_weights)
    own = {mark: sketch(slow_weights, run=spec.digest(), mark=mark) for mark in marks}
    num_far = sum(_is_far(own[found.mark], length, found) for found in compared)
    if num_far > len(compared) / 2:
        raise CheckpointError(f"the weights are far from those published by {num_far} of {len(compared)} other peers")


def _is_far(own: Tensor, length: float, other: Sketch) -> bool:
    distance = float((own - torch.tensor(other.numbers, dtype=torch.float64)).norm())
    is_near = distance <= LARGEST_DISTANCE * other.norm
    return not (is_near and other.norm / LARGEST_NORM_RATIO <= length <= LARGEST_NORM_RATIO * other.norm)


def _progress_of(found: Sketch) -> float:
    return 1.0 if found.mark == AT_REST else found.mark / MARKS
