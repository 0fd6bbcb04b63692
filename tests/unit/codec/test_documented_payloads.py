"""The payloads that docs/protocol.md shows are those that a swap sends."""

from __future__ import annotations

import json
import re

import torch
from blake3 import blake3
from documented import ROOT

from noloco_p2p.gossip.coder import Coder, Coding
from noloco_p2p.gossip.units import Slice, Units


def test_the_payloads_of_the_protocol_page() -> None:
    [block] = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"), re.DOTALL)
    shown = json.loads(block)
    values = torch.tensor(shown["values"])
    coder, exponents = Coder("modulo", Units(len(values))), (-5).to_bytes(1, "big", signed=True)
    coding = Coding(coder, Slice(0, 1), values, swap_id=bytes(range(16)), proposals=(exponents, exponents))
    assert [bytes(coding.encode(number, [0])[0]).hex() for number in range(3)] == shown["modulo"]
    assert bytes(coder.plain.encode(values)).hex() == shown["int8"]
    first_block = bytes(4)
    assert int.from_bytes(blake3(bytes(range(16)) + first_block).digest(8), "little") == shown["seed"]
