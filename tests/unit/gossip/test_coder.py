"""Both partners compute opposite half-differences, whatever the codec, the distance and the passes that it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.coder import Coder, Coding
from noloco_p2p.gossip.units import Slice, Units

NUM_ELEMENTS = 300_000
PART = Slice(3, 20)


class Side:
    """One partner."""

    def __init__(self, vector: Tensor, codec: str) -> None:
        self.vector = vector
        self.coder = Coder(codec, Units(len(vector)))

    def coding(self, other: Side, swap_id: bytes) -> Coding:
        start, stop = self.coder.units.bounds(PART)
        proposals = self.coder.propose(PART), other.coder.propose(PART)
        return Coding(self.coder, PART, self.vector[start:stop].clone(), swap_id=swap_id, proposals=proposals)


def swap(one: Side, other: Side, swap_id: bytes = b"swap") -> tuple[int, int]:
    """Swap PART and apply the half-differences. Return the number of passes and the bytes of one side."""
    codings = [one.coding(other, swap_id), other.coding(one, swap_id)]
    number, num_bytes, indices = 0, 0, [*range(len(codings[0].chunks))]
    while indices:
        payloads = [coding.encode(number, indices) for coding in codings]
        assert [*map(len, payloads[0])] == [codings[0].num_bytes(number, index) for index in indices]
        num_bytes += sum(map(len, payloads[0]))
        failed = [
            coding.check(number, indices, theirs) for coding, theirs in zip(codings, reversed(payloads), strict=True)
        ]
        assert failed[0] == failed[1]
        number, indices = number + 1, failed[0]
    start = one.coder.units.bounds(PART)[0]
    for index, chunk in enumerate(codings[0].chunks):
        halves = [coding.half_difference(index) for coding in codings]
        assert torch.equal(halves[0], -halves[1])
        for side, half in zip((one, other), halves, strict=True):
            side.vector[start + chunk.start : start + chunk.stop] += half
    for coding in codings:
        coding.learn()
    return number, num_bytes


def sides(codec: str, *, apart: float) -> tuple[Side, Side]:
    rng = torch.Generator().manual_seed(5)
    vector = torch.randn(NUM_ELEMENTS, generator=rng)
    return Side(vector.clone(), codec), Side(vector + apart * torch.randn(NUM_ELEMENTS, generator=rng), codec)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "modulo"])
def test_a_swap_conserves_the_mean_and_halves_the_spread(codec: str) -> None:
    one, other = sides(codec, apart=1e-3)
    start, stop = one.coder.units.bounds(PART)
    mean, outside = (one.vector + other.vector) / 2, one.vector[:start].clone()
    for number in range(8):  # modulo begins with int8, whose steps are longer than the distance
        swap(one, other, swap_id=bytes([number]))
    assert torch.allclose((one.vector + other.vector) / 2, mean, atol=1e-6)
    assert torch.equal(one.vector[:start], outside)
    left = {"fp32": 1e-6, "bf16": 4e-3, "int8": 2e-2, "modulo": 1e-3}[codec]
    assert float((one.vector - other.vector)[start:stop].square().mean().sqrt()) < left


def test_modulo_needs_four_bits_once_distances_are_known() -> None:
    one, other = sides("modulo", apart=1e-3)
    first = swap(one, other, b"first")
    for side in (one, other):
        side.vector += 1e-3 * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(id(side) % 1000))
    second = swap(one, other, b"second")
    start, stop = one.coder.units.bounds(PART)
    assert first[1] >= stop - start  # int8: nothing was known
    assert second[1] < 0.8 * (stop - start)


def test_a_jump_costs_a_swap_and_no_precision() -> None:
    one, other = sides("modulo", apart=1e-4)
    swap(one, other, b"first")
    swap(one, other, b"second")
    other.vector += 0.5 * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(3))
    mean, before = (one.vector + other.vector) / 2, one.vector.clone()
    assert swap(one, other, b"third")[0] == 3
    assert torch.equal(one.vector, before), "no chunk is mixed that failed in the last pass"
    assert swap(one, other, b"fourth")[0] == 1
    assert torch.allclose((one.vector + other.vector) / 2, mean, atol=1e-6)
    start, stop = one.coder.units.bounds(PART)
    assert float((one.vector - other.vector)[start:stop].square().mean().sqrt()) < 0.1


def test_nobody_changes_a_chunk_after_the_first_pass() -> None:
    """A liar lets a pass fail on purpose, because it could otherwise answer what it has read meanwhile."""
    one, other = sides("modulo", apart=1e-4)
    for swap_id in (b"first", b"second"):
        swap(one, other, swap_id)
    coding, lie = one.coding(other, b"third"), other.coding(one, b"third")
    other.vector += 100.0
    late = other.coding(one, b"third")
    [first], [second] = lie.encode(0, [0]), late.encode(1, [0])
    assert coding.encode(0, [0])
    assert coding.check(0, [0], [bytes(first)[:-1] + b"?"]) == [0]
    with pytest.raises(CorruptPayload, match="changed its chunk 0"):
        coding.check(1, [0], [second])


def test_a_value_that_is_not_finite_is_not_sent() -> None:
    one, other = sides("modulo", apart=1e-4)
    start, _ = one.coder.units.bounds(PART)
    one.vector[start] = torch.nan
    coding = one.coding(other, b"swap")
    with pytest.raises(ValueError, match="not finite"):
        coding.encode(0, [0])
