"""The short form of `make fuzz`: each decoder of bytes from the network succeeds, or raises an error that it
documents."""

from __future__ import annotations

import pytest
from fuzzed import fuzz, targets

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_anything_is_read_or_refused(name: str) -> None:
    fuzz(TARGETS[name], num_examples=100)
