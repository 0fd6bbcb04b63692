"""The outer rules that NoLoCo is compared with, against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from noloco_p2p.codec import get_codec, section_bytes
from noloco_p2p.optim.allreduce import Ring, ring_bytes, ring_s
from noloco_p2p.optim.diloco import DiLoCo
from noloco_p2p.optim.rules import RULES
from noloco_p2p.simulate.lockstep import ring_of
from noloco_p2p.spec import OuterSpec

ROOT = Path(__file__).resolve().parents[3]


def vectors(seed: int, num_replicas: int = 4) -> Tensor:
    return torch.randn(num_replicas, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_replicas_that_agree(name: str) -> None:
    """Replicas with equal fast weights stay equal; with beta 1 and alpha 0 the outer step moves to those weights."""
    rule = RULES[name](OuterSpec(alpha=0.0, beta=1.0), Ring())
    slow, fast = torch.zeros(4, 6), vectors(1)[:1].expand(4, 6).clone()
    rule.outer_step(slow, fast)
    assert torch.allclose(slow, fast)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_told_in_the_help_and_in_the_docs(name: str) -> None:
    from noloco_p2p.cli import simulate

    assert name in Path(simulate.__file__).read_text(encoding="utf-8"), "the help of --rules"
    assert f"`{name}`" in (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8"), "the row of --rules"


def test_only_data_parallel_mixes_gradients() -> None:
    for name, make in RULES.items():
        gradients = vectors(2)
        make(OuterSpec(), Ring()).mix_gradients(gradients)
        mixed = vectors(2).mean(0).expand(4, 6) if name == "ddp" else vectors(2)
        assert torch.equal(gradients, mixed), name


def test_diloco_is_momentum_on_the_mean() -> None:
    rule, slow = DiLoCo(Ring(), alpha=0.5, beta=0.7), torch.zeros(4, 6)
    rule.outer_step(slow, vectors(3))
    first = 0.7 * vectors(3).mean(0)
    assert torch.allclose(slow, first.expand(4, 6))
    rule.outer_step(slow, slow + vectors(4))
    assert torch.allclose(slow, (first + 0.5 * first + 0.7 * vectors(4).mean(0)).expand(4, 6), atol=1e-6)


@pytest.mark.parametrize(("alpha", "beta", "is_nesterov"), [(0.9, 0.7, True), (0.3, 0.7, False), (0.0, 1.0, True)])
def test_diloco_is_sgd_of_torch_on_the_outer_gradient(alpha: float, beta: float, is_nesterov: bool) -> None:
    rule, slow = DiLoCo(Ring(), alpha=alpha, beta=beta, is_nesterov=is_nesterov), vectors(0)[:1].expand(4, 6).clone()
    parameter = torch.nn.Parameter(slow[0].clone())
    sgd = torch.optim.SGD([parameter], lr=beta, momentum=alpha, nesterov=is_nesterov and alpha > 0)
    for seed in range(1, 6):
        parameter.grad = -vectors(seed).mean(0)  # the gradient points uphill
        sgd.step()
        rule.outer_step(slow, slow + vectors(seed))
        assert torch.allclose(slow, parameter.detach().expand(4, 6), atol=1e-6)


def test_nesterov_by_hand() -> None:
    rule, slow = DiLoCo(Ring(), alpha=0.9, beta=0.7, is_nesterov=True), torch.zeros(2, 1)
    rule.outer_step(slow, slow + 1)
    assert slow.tolist() == [[pytest.approx(0.7 + 0.9 * 0.7)]] * 2
    rule.outer_step(slow, slow + 2)
    momentum = 0.9 * 0.7 + 0.7 * 2
    assert slow.tolist() == [[pytest.approx(1.33 + 0.7 * 2 + 0.9 * momentum)]] * 2


def to_tenths(values: Tensor) -> Tensor:
    """A codec by hand, which rounds to tenths."""
    return (10 * values).round() / 10


def test_a_coded_ring_rounds_every_partial_sum_and_then_the_mean() -> None:
    """Each of three replicas owns a segment, whose sum starts at the neighbour of the owner and ends at the owner."""
    vectors = torch.tensor([[0.06, 0.11, 0.34], [0.16, 0.02, 0.21], [0.08, 0.29, 0.04]])
    mean = Ring(to_tenths, 1.0).mean(vectors)
    first = 0.3 + 0.06  # 0.16 -> 0.2, + 0.08 -> 0.3, + the owner's 0.06
    second = 0.4 + 0.02  # 0.29 -> 0.3, + 0.11 -> 0.4, + the owner's 0.02
    third = 0.5 + 0.04  # 0.34 -> 0.3, + 0.21 -> 0.5, + the owner's 0.04
    assert mean.tolist() == pytest.approx([round(total / 3, 1) for total in (first, second, third)])


def test_a_ring_of_one_codes_nothing_and_one_without_a_codec_is_the_mean() -> None:
    assert torch.equal(Ring(to_tenths, 1.0).mean(vectors(1, 1)), vectors(1, 1)[0])
    assert torch.equal(Ring().mean(vectors(1)), vectors(1).mean(0))


@pytest.mark.parametrize(("rule", "codec", "coded"), [("diloco", "int8", "int8"), ("ddp", "int4", "bf16")])
def test_the_ring_of_a_rule_has_the_errors_and_bytes_of_its_codec(rule: str, codec: str, coded: str) -> None:
    """A hop among eight replicas codes a sum of up to seven vectors, and the last one codes their mean."""
    ring, exact = ring_of(rule, codec, num_elements=8 * 256), torch.randn(8, 8 * 256, generator=torch.manual_seed(0))
    assert ring.bytes_per_element == section_bytes(get_codec(coded), 8 * 256) / (8 * 256)
    assert ring.sent_bytes(8 * 256, 8) == pytest.approx(2 * 7 / 8 * section_bytes(get_codec(coded), 8 * 256))
    error = (ring.mean(exact) - exact.mean(0)).norm() / exact.mean(0).norm()
    once = get_codec(coded).decode(get_codec(coded).encode(exact[0, :256].contiguous()), num_elements=256)
    of_codec = (once - exact[0, :256]).norm() / exact[0, :256].norm()
    assert of_codec < error < 4 * of_codec


def test_ddp_with_fp32_stays_exact() -> None:
    assert ring_of("ddp", "fp32", num_elements=10) == Ring()


def test_an_all_reduce_of_eight_sends_seven_bytes_a_parameter() -> None:
    assert ring_bytes(400, 8) == 700
    assert ring_s(700, 8, bytes_per_s=100, delay_s=0.5) == 7 + 14 * 0.5
    assert RULES["ddp"](OuterSpec(), Ring()).sent_bytes(100, 8) == (700, 0)
    assert RULES["diloco"](OuterSpec(), Ring()).sent_bytes(100, 8) == (0, 700)
    half = Ring(to_tenths, 2.0)
    assert RULES["ddp"](OuterSpec(), half).sent_bytes(100, 8) == (350, 0)
