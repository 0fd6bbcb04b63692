"""The bytes of each codec are fixed, so that peers of different versions can read each other's payloads.

The tests also decode the layout by hand.
"""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from codec_promises import PROMISES, RAMP, VALUES
from torch import Tensor

from noloco_p2p.codec import get_codec


def check_layout(name: str, values: Tensor) -> None:
    payload = get_codec(name).encode(values)
    decoded = get_codec(name).decode(payload, num_elements=len(values))
    assert decoded.tolist() == PROMISES[name].by_hand(payload, len(values))


@pytest.mark.parametrize("name", PROMISES)
def test_small_vector_has_its_golden_bytes(name: str) -> None:
    assert get_codec(name).encode(VALUES) == bytes.fromhex(PROMISES[name].golden)
    check_layout(name, VALUES)


@pytest.mark.parametrize("name", PROMISES)
def test_many_blocks_have_their_golden_digest(name: str) -> None:
    assert blake3(get_codec(name).encode(RAMP)).hexdigest()[:32] == PROMISES[name].ramp_digest
    check_layout(name, RAMP)


def test_bf16_rounds_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # ties, which round to even: one down, one up
    decoded = get_codec("bf16").decode(get_codec("bf16").encode(ties), num_elements=2)
    assert decoded.tolist() == [1.0, 1 + 2**-6]
