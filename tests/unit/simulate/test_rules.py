"""The rules that NoLoCo is compared with, against arithmetic by hand and against torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from documented import ROOT
from harness.specs import published, tiny_llama
from rules import OUTER_STEPS, RULES, AllReduce, DiLoCo, Lockstep, codec_of, main, run_named
from torch import Tensor

from noloco_p2p.codec import get_codec
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import ABSENT_STEPS, Churn, Plan, peer_name
from noloco_p2p.simulate.result import Result
from noloco_p2p.spec import TrainSpec
from noloco_p2p.testing.links import IDEAL, LinkProfile
from noloco_p2p.trainer.inner_step import InnerStep

STEPS, INNER_STEPS = 12, 3
SPEC = tiny_llama(
    "lockstep",
    train=TrainSpec(total_steps=STEPS, batch_size=2, warmup_steps=2),
    outer=published(inner_steps=INNER_STEPS),
)


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as peers do on a CPU. Where it has bf16, the lab is faster, but further away."""
    monkeypatch.setattr("stack.products_of", lambda device: "fp32")


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.of(SPEC, {})


def vectors(seed: int, num_replicas: int = 4) -> Tensor:
    return torch.randn(num_replicas, 6, generator=torch.Generator().manual_seed(seed))


# rules


@pytest.mark.parametrize(("alpha", "beta", "is_nesterov"), [(0.9, 0.7, True), (0.3, 0.7, False), (0.0, 1.0, True)])
def test_diloco_is_sgd_of_torch_on_the_mean_outer_gradient(alpha: float, beta: float, is_nesterov: bool) -> None:
    rule = DiLoCo(vectors(0)[0].clone(), AllReduce(), alpha=alpha, beta=beta, is_nesterov=is_nesterov)
    parameter = torch.nn.Parameter(rule.slow_weights.clone())
    sgd = torch.optim.SGD([parameter], lr=beta, momentum=alpha, nesterov=is_nesterov and alpha > 0)
    for seed in range(1, 6):
        parameter.grad = -vectors(seed).mean(0)  # the gradient points uphill
        sgd.step()
        rule.step(rule.slow_weights + vectors(seed))
        assert torch.allclose(rule.slow_weights, parameter.detach(), atol=1e-6)


def test_nesterov_by_hand() -> None:
    rule = DiLoCo(torch.zeros(1), AllReduce(), alpha=0.9, beta=0.7, is_nesterov=True)
    rule.step(torch.tensor([[0.5], [1.5]]))
    assert rule.slow_weights.item() == pytest.approx(0.7 + 0.9 * 0.7)
    rule.step((rule.slow_weights + 2)[None])
    assert rule.slow_weights.item() == pytest.approx(1.33 + 0.7 * 2 + 0.9 * (0.9 * 0.7 + 0.7 * 2))


def to_tenths(values: Tensor) -> Tensor:
    """A codec by hand, which rounds to tenths."""
    return (10 * values).round() / 10


def test_a_coded_all_reduce_rounds_what_is_sent_and_then_the_mean() -> None:
    """Each of three replicas owns a segment, to which the others send theirs."""
    vectors = torch.tensor([[0.06, 0.11, 0.34], [0.16, 0.02, 0.21], [0.08, 0.29, 0.04]])
    mean = AllReduce(to_tenths, 1.0).mean(vectors)
    first = 0.06 + 0.2 + 0.1  # the owner's 0.06, 0.16 -> 0.2, 0.08 -> 0.1
    second = 0.1 + 0.02 + 0.3  # 0.11 -> 0.1, the owner's 0.02, 0.29 -> 0.3
    third = 0.3 + 0.2 + 0.04  # 0.34 -> 0.3, 0.21 -> 0.2, the owner's 0.04
    assert mean.tolist() == pytest.approx([round(total / 3, 1) for total in (first, second, third)])


def test_an_all_reduce_of_one_codes_nothing_and_one_without_a_codec_is_the_mean() -> None:
    assert torch.equal(AllReduce(to_tenths, 1.0).mean(vectors(1, 1)), vectors(1, 1)[0])
    assert torch.equal(AllReduce().mean(vectors(1)), vectors(1).mean(0))


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_an_all_reduce_has_the_errors_and_bytes_of_its_codec(codec: str) -> None:
    """Vectors are coded once, and then their mean. A ring would code sums of up to seven vectors."""
    size = 8 * 256
    all_reduce, exact = AllReduce.of(codec, num_elements=size), torch.randn(8, size, generator=torch.manual_seed(0))
    assert all_reduce.sent_bytes(size, 8) == pytest.approx(2 * 7 / 8 * get_codec(codec).num_bytes((size,)))
    error = (all_reduce.mean(exact) - exact.mean(0)).norm() / exact.mean(0).norm()
    once = get_codec(codec).decode(get_codec(codec).encode(exact[0, :256]), shape=(256,))
    of_codec = (once - exact[0, :256]).norm() / exact[0, :256].norm()
    assert of_codec < error < 2 * of_codec


def test_a_rule_has_a_codec_for_many_replicas_whatever_the_spec_says() -> None:
    assert [codec_of(rule, "modulo") for rule in RULES] == ["int8", "int8", "bf16", "int8", "int4"]
    assert [codec_of(rule, "fp32") for rule in RULES] == ["fp32", "fp32", "fp32", "fp32", "int4"]
    assert AllReduce.of("fp32", num_elements=10) == AllReduce()
    assert AllReduce.of("int4", num_elements=10).bytes_per_element == 0.5 + 2 / 64


@pytest.fixture(scope="module")
def of_init() -> Material:
    """Return a material with the codec and the outer step that `noloco init` writes, which are for pairs."""
    spec = SPEC.with_changes({"codec.weights": "modulo", "outer.alpha": 0.0, "outer.beta": 1.0}, origin="a test")
    assert (spec.codec, spec.outer.has_outer_step) == (PRESETS["tiny"].codec, PRESETS["tiny"].outer.has_outer_step)
    return Material.of(spec, {})


@pytest.mark.parametrize("rule", ["diloco", "diloco-nesterov", "ddp"])
def test_no_rule_suffers_from_the_codec_that_init_writes(rule: str, of_init: Material) -> None:
    own, exact = (run_named(name, of_init, Plan(4, evaluations=1)) for name in (rule, f"{rule}:fp32"))
    assert own.loss == pytest.approx(exact.loss, rel=0.002)
    assert own.sent_bytes < 0.6 * exact.sent_bytes


@pytest.mark.parametrize("rule", OUTER_STEPS)
def test_diloco_takes_its_own_outer_step_if_the_spec_has_none(rule: str, of_init: Material) -> None:
    alpha, beta = OUTER_STEPS[rule]
    outer = of_init.spec.outer.model_copy(update={"alpha": alpha, "beta": beta})
    told = replace(of_init, spec=of_init.spec.model_copy(update={"outer": outer}))
    assert run_named(rule, of_init, Plan(2)).loss == simulated(told, rule, num_replicas=2).loss


# runs


def simulated(material: Material, rule: str, **plan: object) -> Result:
    return Lockstep(material, Plan(**{"num_replicas": 4, **plan}), rule).run()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns(rule: str, material: Material) -> None:
    """A rule learns more than half as much as local training; one that ignored the fast weights would learn little."""
    result, alone = (simulated(material, name) for name in (rule, "local"))
    assert result.curve[0].loss - result.loss > 0.5 * (alone.curve[0].loss - alone.loss)
    assert (result.spread == 0.0) == (rule not in ("local", "streaming")), "everybody mixes"
    assert (result.virtual_s, result.steps) == (pytest.approx(STEPS), STEPS)
    if rule == "streaming":
        return
    exchanges = {"ddp": STEPS, "local": 0}.get(rule, STEPS / INNER_STEPS)
    assert result.sent_bytes == exchanges * 1.5 * 4 * result.num_parameters


def test_data_parallel_replicas_are_one_model_with_the_batches_of_all(material: Material) -> None:
    model = material.model()
    inner = InnerStep(model, SPEC.train)
    streams = [material.batches(peer_name(number), replica=number) for number in range(4)]
    for step in range(STEPS):
        inner(torch.cat([next(stream) for stream in streams]), progress=step / STEPS)
    assert simulated(material, "ddp").loss == pytest.approx(material.loss(model), rel=1e-5)


def test_a_rule_is_as_fast_as_its_slowest_replica_and_link(material: Material) -> None:
    slow = LinkProfile("slow", down_mbit_s=8, up_mbit_s=0.8, delay_ms=50, jitter_ms=0)
    result = simulated(material, "diloco", links=(IDEAL, slow), speeds=(1.0, 0.25))
    exchange_s = 1.5 * 4 * result.num_parameters / 1e5 + 2 * 0.1
    assert result.virtual_s == pytest.approx(4 * STEPS + STEPS / INNER_STEPS * exchange_s)


@pytest.mark.parametrize("rule", ["ddp", "diloco"])
def test_absent_replicas_take_the_mean_of_the_others(rule: str, material: Material) -> None:
    """All replicas stay equal, fewer of them count, and each sends 2 (n - 1) / N vectors and one per absentee."""
    churn = Churn(absent=0.4)
    clean, churned, lost = (simulated(material, rule, churn=each) for each in (Churn(), churn, Churn(absent=1.0)))
    assert (churned.spread, lost.spread) == (0, 0)
    assert churned.loss != clean.loss
    assert churned.loss < churned.curve[0].loss
    exchanges = range(0 if rule == "ddp" else INNER_STEPS - 1, STEPS, 1 if rule == "ddp" else INNER_STEPS)
    present = [sum(not churn.is_absent(peer_name(n), step, seed=0) for n in range(4)) for step in exchanges]
    assert len(set(present)) > 1
    assert STEPS > ABSENT_STEPS
    sent = [(2 * (n - 1) + 4 - n) / 4 * 4 * clean.num_parameters if n else 0 for n in present]
    assert churned.sent_bytes == pytest.approx(sum(sent))
    assert lost.sent_bytes == 0


# the command


@pytest.fixture
def own_rule(tmp_path: Path) -> Path:
    """Return a file with the rule that the page for researchers shows."""
    [shown] = re.findall(
        r"```py\n(.*?)```", ROOT.joinpath("docs/researchers.md").read_text(encoding="utf-8"), re.DOTALL
    )
    path = tmp_path / "mine.py"
    path.write_text(shown, encoding="utf-8")
    return path


def test_a_rule_of_ones_own(own_rule: Path, material: Material) -> None:
    """The rule of the page sends a vector of weights to one other replica at every third step."""
    slow = LinkProfile("slow", down_mbit_s=8, up_mbit_s=8, delay_ms=50, jitter_ms=0)
    plan = Plan(4, links=(slow,), evaluations=2)
    exact, coded, alone = (
        run_named(each, material, plan) for each in (f"{own_rule}:Chain", f"{own_rule}:Chain:int8", "local")
    )
    sent = STEPS / 3 * 4 * exact.num_parameters
    assert exact.sent_bytes == sent
    assert exact.virtual_s == pytest.approx(STEPS + sent / 1e6 + STEPS / 3 * 0.1)
    assert coded.sent_bytes == pytest.approx(
        sent * get_codec("int8").num_bytes((exact.num_parameters,)) / 4 / exact.num_parameters, rel=0.02
    )
    assert coded.loss == pytest.approx(exact.loss, rel=0.01)
    assert exact.spread < 0.7 * alone.spread
    assert exact.curve[-1].sent_bytes == sent


def test_rules_codecs_and_a_plot(
    own_rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, rules = tmp_path / "run.toml", f"noloco:bf16,diloco:int4,{own_rule}:Chain"
    spec.write_text(render(SPEC), encoding="utf-8")
    monkeypatch.setattr(
        "sys.argv", ["rules.py", str(spec), "--rules", rules, "--replicas", "2", "--plot", str(tmp_path)]
    )
    main()
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == rules.split(",")
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("adam", "there is no rule 'adam'; choose from noloco, diloco, "),
        ("diloco:modulo", "there is no codec 'modulo' for many replicas; choose one of fp32, bf16, int8, int4"),
        ("absent.py:Mine", "absent.py:Mine: there is no file absent.py"),
        ("mine.py:", "there is no rule '' in mine.py; name its class, as in mine.py:NAME"),
        ("mine.py:Other", "there is no rule 'Other' in mine.py"),
        ("mine.py:NoLab", "NoLab is not a rule, which is a class that takes a Lockstep"),
        ("mine.py:NoStep", "NoStep is not a rule"),
        ("mine.py:Mine:int5", "there is no codec 'int5'"),
    ],
)
def test_a_wrong_rule_or_codec_is_refused_before_the_first_run(
    rule: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "class NoLab:\n    def after_step(self, step): ...\n"
        "class NoStep:\n    def __init__(self, lab): ...\n"
        "class Mine(NoLab):\n    def __init__(self, lab): ...\n"
    )
    Path("run.toml").write_text(render(SPEC))
    monkeypatch.setattr("rules.run_named", lambda *arguments: pytest.fail("a rule ran"))
    monkeypatch.setattr("sys.argv", ["rules.py", "run.toml", "--rules", f"local,{rule}"])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err


def test_no_replicas_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["rules.py", "run.toml", "--replicas", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "--replicas must be at least 1" in capsys.readouterr().err
