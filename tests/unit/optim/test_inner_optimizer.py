"""The inner optimizer follows the spec: which parameters decay, and with which hyperparameters."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from noloco_p2p.optim.inner import make_inner_optimizer, make_inner_optimizers
from noloco_p2p.spec import TrainSpec


def two_parameters() -> tuple[Parameter, Parameter]:
    return Parameter(torch.ones(3, 2)), Parameter(torch.ones(4))


def decays(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    return {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = two_parameters()
    train = TrainSpec(weight_decay=0.1, learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.99)
    optimizer = make_inner_optimizer([matrix, vector], train)
    assert all(group["betas"] == (0.8, 0.99) for group in optimizer.param_groups)
    assert decays(optimizer) == {id(matrix): 0.1, id(vector): 0.0}
    matrix.grad, vector.grad = torch.zeros(3, 2), torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(matrix.data, torch.full((3, 2), 0.95))  # only the decay: 1 - 0.5 * 0.1
    assert vector.tolist() == [1.0] * 4


def test_muon_has_the_numbers_of_the_spec() -> None:
    matrix, vector = two_parameters()
    train = TrainSpec(inner_optimizer="muon", muon_momentum=0.75, weight_decay=0.1, learning_rate=0.5)
    muon, adamw = make_inner_optimizers([matrix, vector], train, matrices=[matrix])
    for gradient in (torch.ones(3, 2), torch.zeros(3, 2)):
        matrix.grad = gradient
        muon.step()
    torch.testing.assert_close(muon.state[matrix]["momentum_buffer"], torch.full((3, 2), 0.75 * 0.25))
    assert decays(muon) == {id(matrix): 0.1}
    assert decays(adamw) == {id(vector): 0.0}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_trainable_parameter_is_in_one_group_and_no_group_is_empty(weight_decay: float) -> None:
    matrix, vector = two_parameters()
    frozen = Parameter(torch.ones(2), requires_grad=False)
    for parameters in ([matrix], [vector], [matrix, vector]):
        optimizer = make_inner_optimizer(iter([*parameters, frozen]), TrainSpec(weight_decay=weight_decay))
        assert set(decays(optimizer)) == {id(p) for p in parameters}
        assert all(group["params"] for group in optimizer.param_groups)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="trainable"):
        make_inner_optimizer([Parameter(torch.ones(2), requires_grad=False)], TrainSpec())
