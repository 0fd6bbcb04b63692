"""The payloads that docs/protocol.md shows are those that the codecs make."""

from __future__ import annotations

import json
import re

import torch
from documented import ROOT

from noloco_p2p.codec import get_codec
from noloco_p2p.codec.dither import dither_seed
from noloco_p2p.codec.modulo import PASSES, Grid


def test_the_payloads_of_the_protocol_page() -> None:
    [block] = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"), re.DOTALL)
    shown = json.loads(block)
    values = torch.tensor(shown["values"])
    grid = Grid((-5).to_bytes(1, "big", signed=True), dither_seed(bytes(range(16)), 1))
    assert shown["seed"] == grid.seed
    by_need = [codec.encode(values, grid=grid).hex() for codec in PASSES]
    assert by_need == shown["modulo"]
    assert get_codec("int8").encode(values).hex() == shown["int8"]
