"""Parameters as one vector: reading, writing and subtracting give the same result for any division into pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noloco_p2p.errors import ModelError
from noloco_p2p.outer.flat import FlatParameters

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def model_of(sizes: list[int], dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.randn(size, generator=generator).to(dtype)))
    return model


def whole(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().float() for param in model.parameters()])


@settings(deadline=None)
@given(SIZES, st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_any_piece_is_that_of_the_whole(sizes: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    model = model_of(sizes, dtype)
    flat, vector = FlatParameters(model), whole(model)
    start = data.draw(st.integers(0, flat.num_elements - 1))
    stop = data.draw(st.integers(start + 1, flat.num_elements))
    other = torch.randn(stop - start, generator=torch.Generator().manual_seed(2))
    assert torch.equal(flat.read(start, stop), vector[start:stop])
    flat.write(start, other)
    vector[start:stop] = other.to(dtype).float()
    assert torch.equal(whole(model), vector)


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    model = nn.Module()
    model.register_parameter("turned", nn.Parameter(torch.zeros(2, 3).t()))
    with pytest.raises(ModelError, match="turned"):
        FlatParameters(model)
