"""Muon: the result and the precision of its orthogonalization, and a state that is compatible with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_p2p.optim import muon
from noloco_p2p.optim.muon import Muon, orthogonalize, product_dtype

SHAPES = [(24, 24), (24, 60), (60, 24), (24, 30)]


class Products(TorchDispatchMode):
    """Records the dtypes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in ("mm", "matmul")):
            self.dtypes += [arg.dtype for arg in args if isinstance(arg, Tensor)]
        return func(*args, **(kwargs or {}))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices_with_gradients(seed: int = 0) -> list[Parameter]:
    params = [Parameter(gaussian(*shape, seed=seed)) for shape in SHAPES for _ in range(3)]
    for number, param in enumerate(params):
        param.grad = gaussian(*param.shape, seed=100 + number)
    return params


def test_on_a_cpu_no_product_is_in_bf16() -> None:
    optimizer = Muon(matrices_with_gradients())
    with Products() as products:
        optimizer.step()
    assert set(products.dtypes) == {torch.float32}
    with Products() as products:
        torch.optim.Muon(matrices_with_gradients()).step()
    assert torch.bfloat16 in products.dtypes, "the test sees products in bf16"


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_an_accelerator_computes_in_bf16_only_where_it_has_bf16(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(muon, "has_fast_bf16", lambda device: has_bf16)
    assert product_dtype(torch.device("cuda")) is dtype
    assert product_dtype(torch.device("mps")) is torch.float32
    assert product_dtype(torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_singular_values_come_near_1_and_the_directions_stay(shape: tuple[int, int], scale: float) -> None:
    matrix = gaussian(*shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize((scale * matrix).unsqueeze(0))[0]
    values = torch.linalg.svdvals(found)
    assert values.max() <= 1.35
    assert values[:-2].min() >= 0.6, "all but the smallest, which may be below what is lifted to 1"
    cosine = (found * (u @ vh)).sum() / found.norm() / (u @ vh).norm()
    assert cosine >= 0.95


def test_a_singular_value_of_exactly_1_and_a_matrix_of_zeros_stay_finite() -> None:
    one_rank = torch.outer(gaussian(24), gaussian(60)).unsqueeze(0)
    assert torch.linalg.svdvals(orthogonalize(one_rank))[0, 0] == pytest.approx(1.0, abs=0.35)
    assert not orthogonalize(torch.zeros(1, 24, 60)).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tall_matrix_gives_the_transpose_and_a_batch_what_each_gives_alone(shape: tuple[int, int]) -> None:
    batch = gaussian(3, *shape)
    together = orthogonalize(batch)
    if shape[0] != shape[1]:  # scaling starts with the rows of a square matrix, so with the columns of its transpose
        assert torch.allclose(together, orthogonalize(batch.mT).mT, atol=1e-5)
    for matrix, expected in zip(batch, together, strict=True):
        assert torch.allclose(orthogonalize(matrix.unsqueeze(0))[0], expected, atol=1e-5)


def test_iterating_on_gram_matrices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = gaussian(3, 24, 60)
    by_gram = orthogonalize(batch)
    monkeypatch.setattr(muon, "LONG", float("inf"))
    assert torch.allclose(orthogonalize(batch), by_gram, atol=1e-5)


def test_bf16_stays_near_fp32() -> None:
    for shape in SHAPES:
        batch = gaussian(2, *shape)
        exact, coarse = orthogonalize(batch), orthogonalize(batch.bfloat16()).float()
        cosine = (exact * coarse).sum() / exact.norm() / coarse.norm()
        assert cosine >= 0.98, shape


def test_a_step_is_near_that_of_torch_and_the_state_is_its_own() -> None:
    ours, theirs = matrices_with_gradients(), matrices_with_gradients()
    before = [param.detach().clone() for param in ours]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    mine, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for number in range(2):  # in the first step the momentum points along the gradient
        for own, other in zip(ours, theirs, strict=True):
            own.grad = other.grad = gaussian(*own.shape, seed=200 + number)
        mine.step()
        reference.step()
        for start, own, other in zip(before, ours, theirs, strict=True):
            decayed = start * (1 - 0.02 * 0.1)  # the rest is the step along the orthogonal matrix
            step, expected = own.detach() - decayed, other.detach() - decayed
            assert (step * expected).sum() / step.norm() / expected.norm() >= 0.93
            assert step.norm() == pytest.approx(float(expected.norm()), rel=0.4)
            size = 0.02 * 0.2 * max(step.shape) ** 0.5 * min(step.shape) ** 0.5  # all singular values are about 1
            assert step.norm() == pytest.approx(size, rel=0.2)
        before = [param.detach().clone() for param in theirs]
        for own, start in zip(ours, before, strict=True):
            own.data.copy_(start)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.state[own]["momentum_buffer"], reference.state[other]["momentum_buffer"])
    mine.load_state_dict(reference.state_dict())


def test_a_parameter_without_a_gradient_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    params = matrices_with_gradients()
    params[1].grad = None
    before = params[1].detach().clone()
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 1)  # one matrix at a time
    Muon(params).step()
    assert torch.equal(params[1], before)
    assert not torch.equal(params[0], before)
