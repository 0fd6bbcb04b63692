"""A batch that does not fit into memory ends this peer in words, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noloco_p2p.errors import DataError
from noloco_p2p.trainer.loop import draw


def no_memory() -> Tensor:
    raise MemoryError


def test_a_batch_is_drawn() -> None:
    batch = draw(lambda: torch.ones(2))
    assert batch is not None
    assert torch.equal(batch, torch.ones(2))


def test_no_memory_for_a_batch_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"no memory.*last checkpoint stays.*resumes"):
        draw(no_memory)
