"""A partner is refused if its outer gradient points against this peer's gradient, and only then."""

from __future__ import annotations

import pytest

from noloco_p2p.optim.gates import OPEN, cosine_refusal


@pytest.mark.parametrize(
    ("dot", "is_refused"), [(6.0, False), (0.0, False), (-0.59, False), (-0.61, True), (-6.0, True)]
)
def test_the_limit_is_a_cosine_of_minus_a_tenth(dot: float, is_refused: bool) -> None:
    assert bool(cosine_refusal(dot=dot, own_norm=2.0, partner_norm=3.0)) == is_refused


def test_a_gradient_of_zeros_has_no_direction_and_open_gates_refuse_nothing() -> None:
    assert cosine_refusal(dot=0.0, own_norm=0.0, partner_norm=3.0) == ""
    assert cosine_refusal(dot=-1e-37, own_norm=0.0, partner_norm=3.0) == ""
    assert cosine_refusal(dot=-1e-37, own_norm=3.0, partner_norm=0.0) == ""
    assert cosine_refusal(dot=-6.0, own_norm=2.0, partner_norm=3.0, limits=OPEN) == ""
