"""The bytes of each codec, fixed: a peer of today must read a peer of tomorrow. The layout is decoded by hand here."""

from __future__ import annotations

import struct

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec import CODEC_NAMES, get_codec

VALUES = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 3.14159, 0.001, -2.75, 12.7])
GOLDEN = {
    "fp32": "00000000 0000803f 000080bf 0000003f 000080be d00f4940 6f12833a 000030c0 33334b41",
    "bf16": "0000 803f 80bf 003f 80be 4940 833a 30c0 4b41",
    "int8": "cd3d 00 0a f6 05 fe 1f 00 e5 7f",
    "int4": "e93f 20 01 df 70 00",
}
RAMP = (torch.arange(300, dtype=torch.float32) - 150) / 7  # several blocks and a short one
RAMP_DIGESTS = {
    "fp32": "177be7a2bdbdfa419a9adeea2edb0d41",
    "bf16": "d47511dfab6c8b576dfd88dbbbb5f1e6",
    "int8": "0b1426a85977513626a43e8261734f34",
    "int4": "75156c60b6b8213f2ecd165083cf229c",
}


def bf16(data: bytes) -> list[float]:
    """bf16 is the upper half of an fp32."""
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def by_hand(name: str, payload: bytes, num_elements: int) -> list[float]:
    if name == "fp32":
        return list(struct.unpack(f"<{num_elements}f", payload))
    if name == "bf16":
        return bf16(payload)
    block = 256 if name == "int8" else 128
    num_blocks = -(-num_elements // block)
    scales = bf16(payload[: 2 * num_blocks])
    codes = list(struct.unpack(f"<{len(payload) - 2 * num_blocks}b", payload[2 * num_blocks :]))
    if name == "int4":
        low = [(code + 8) % 16 - 8 for code in codes]
        high = [(code - part) // 16 for code, part in zip(codes, low, strict=True)]
        codes = (low + high)[:num_elements]
    return [code * scales[i // block] for i, code in enumerate(codes)]


def check_layout(name: str, values: Tensor) -> None:
    payload = get_codec(name).encode(values)
    decoded = get_codec(name).decode(payload, num_elements=len(values))
    assert decoded.tolist() == by_hand(name, payload, len(values))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_small_vector_has_its_golden_bytes(name: str) -> None:
    assert get_codec(name).encode(VALUES) == bytes.fromhex(GOLDEN[name])
    check_layout(name, VALUES)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_many_blocks_have_their_golden_digest(name: str) -> None:
    assert blake3(get_codec(name).encode(RAMP)).hexdigest()[:32] == RAMP_DIGESTS[name]
    check_layout(name, RAMP)


def test_bf16_rounds_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # half way between neighbours: the even one wins, down and up
    decoded = get_codec("bf16").decode(get_codec("bf16").encode(ties), num_elements=2)
    assert decoded.tolist() == [1.0, 1 + 2**-6]
