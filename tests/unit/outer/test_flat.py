"""Parameters as one vector: reading, writing and subtracting give the same result for any division into pieces."""

from __future__ import annotations

import warnings
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noloco_p2p.errors import ModelError
from noloco_p2p.outer.flat import FlatParameters, check_values, named_buffers

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


def holding(**tensors: Tensor) -> nn.Module:
    """Return a model with parameters, and with buffers where the name begins with `buffer`."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            model.register_buffer(name, tensor)
        else:
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return model


def coded() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@torch.inference_mode()
def inferred() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (holding(turned=torch.zeros(2, 3).t()), "turned is not contiguous"),
        (holding(empty=torch.zeros(2, device="meta")), "empty is on the meta device"),
        (holding(buffer=torch.zeros(2, device="meta")), "buffer is on the meta device"),
        (holding(buffer_of_few=torch.eye(2).to_sparse()), r"buffer_of_few is stored as torch.sparse_coo"),
        (holding(small=torch.zeros(2).to(torch.float8_e4m3fn)), r"small is torch.float8_e4m3fn"),
        (holding(buffer_of_codes=coded()), r"buffer_of_codes is torch.qint8, which a checkpoint cannot hold"),
        (nn.LazyLinear(3), "weight has no shape yet: run one batch through the model"),
        (inferred(), "weight was created in inference mode"),
        (cast(nn.Module, [nn.Linear(2, 2)]), "must be an nn.Module, but it is a list"),
        (holding(a=(shared := torch.zeros(6)), b=shared[2:]), "a and b share memory"),
    ],
    ids=lambda value: value.split(" is ")[-1] if isinstance(value, str) else "",
)
def test_a_model_that_cannot_be_kept_or_swapped_is_refused_by_name(model: nn.Module, message: str) -> None:
    def check() -> None:
        check_values(model)
        FlatParameters(model)

    with pytest.raises(ModelError, match=message):
        check()


class Wrapper(nn.Module):
    """DDP and accelerate keep the model under this name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_do_not_change_what_a_model_is() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def compiled(module: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(module))

    plain = make()
    in_part = nn.Sequential(*(compiled(each) for each in make()))
    for same in (compiled(make()), Wrapper(make()), Wrapper(compiled(make())), in_part):
        assert FlatParameters(same).layout() == FlatParameters(plain).layout()
        assert [name for name, _ in named_buffers(same)] == [name for name, _ in named_buffers(plain)]
