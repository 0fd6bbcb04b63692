"""The short form of `make fuzz`: decoders of bytes from the network raise nothing but the errors that they document."""

from __future__ import annotations

import pytest
from fuzzed import fuzz, targets

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_anything_is_read_or_refused(name: str) -> None:
    fuzz(TARGETS[name], num_examples=100)
