"""The batched lab against the models, optimizers and swaps of peers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import ladder
import pytest
import torch
from harness.patience import PATIENCE_S
from harness.specs import tiny_llama
from rules import Lockstep, int4
from stack import Stack, StackOptimizer
from swarm import LabReplica, Swarm, run_swarm

from noloco_p2p.gossip.units import Slice
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, parse_churn, peer_name
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import OuterSpec, TrainSpec
from noloco_p2p.testing.links import IDEAL
from noloco_p2p.trainer.inner_step import InnerStep

STEPS = 16
SPEC = tiny_llama("lab", train=TrainSpec(total_steps=STEPS, batch_size=2, warmup_steps=2), outer=OuterSpec())


def material(**changes: object) -> Material:
    return Material.of(SPEC.with_changes({"codec.weights": "modulo", **changes}, origin="a test"), {})


def slow_link(of: Material, *, steps: float) -> Any:
    """Return a link on which all weights, at 0.6 bytes per parameter, take this many seconds."""
    mbit_s = 0.6 * 8 * FlatParameters(of.model()).num_elements / 1e6 / steps
    return replace(IDEAL, name="slow", up_mbit_s=mbit_s, down_mbit_s=mbit_s, delay_ms=1)


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as peers do on a CPU. Where it has bf16, the lab is faster, but further away."""
    monkeypatch.setattr("stack.products_of", lambda device: "fp32")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_row_of_the_stack_trains_as_the_model_of_a_peer(optimizer: str) -> None:
    tiny = material(**{"train.inner_optimizer": optimizer})
    stack, streams = Stack(tiny, 3), [tiny.batches(peer_name(number), replica=number) for number in range(3)]
    steps = StackOptimizer(stack, tiny.spec.train)
    models = [tiny.model() for _ in range(3)]
    peers = [InnerStep(model, tiny.spec.train) for model in models]
    for numbers in ([0, 1, 2], [1], [0, 2], [2, 1]):  # replicas with different speeds
        batches, rows = [next(streams[number]) for number in numbers], stack.flat[numbers]
        progress = [0.1 * (1 + number) for number in numbers]
        steps.step(rows, numbers, stack.gradients(rows, torch.stack(batches)), progress)
        stack.flat[numbers] = rows
        for number, batch, at in zip(numbers, batches, progress, strict=True):
            peers[number](batch, progress=at)
    for row, model in zip(stack.flat, models, strict=True):
        own = FlatParameters(model).read(0, stack.num_parameters)
        torch.testing.assert_close(row, own, rtol=0, atol=2e-6)
        assert stack.evaluate(row[None], tiny.validation) == pytest.approx([tiny.loss(model)], rel=1e-5)


@pytest.mark.parametrize("waits", [False, True])
def test_the_lab_agrees_with_the_simulator(waits: bool) -> None:
    outer = {"outer.wait": True, "outer.inner_steps": 4, "outer.max_wait_s": 3.0} if waits else {}
    tiny = material(**{"outer.min_inner_steps": 1, "outer.closing_mixings": 0, **outer})
    plan = Plan(4, links=(slow_link(tiny, steps=0.8),), evaluations=1)
    lab, simulated = run_swarm(tiny, plan), simulate_swarm(tiny, plan)
    assert lab.loss == pytest.approx(simulated.loss, rel=0.01)
    assert lab.virtual_s == pytest.approx(simulated.virtual_s, abs=6.0)
    assert lab.swaps.age_steps == pytest.approx(simulated.swaps.age_steps, abs=0.8)


def test_the_same_seed_gives_the_same_bits() -> None:
    tiny = material()
    one, other = (run_swarm(tiny, Plan(4, links=(slow_link(tiny, steps=3.0),), evaluations=1)) for _ in range(2))
    assert (one.loss, one.swaps, one.virtual_s) == (other.loss, other.swaps, other.virtual_s)


def test_partners_add_opposite_half_differences() -> None:
    async def halves() -> tuple[torch.Tensor, torch.Tensor]:
        lab = Swarm(material(), Plan(2))
        one, other = (LabReplica(number, lab, None) for number in range(2))
        lab.stack.flat[1] += 0.01 * torch.randn_like(lab.stack.flat[1])
        codings, _ = lab._coded(one, other, Slice(0, one.weights.units.num_units))
        return tuple(  # pyright: ignore[reportReturnType]
            torch.cat([coding.half_difference(index) for index in range(len(coding.chunks))]) for coding in codings
        )

    own, theirs = run_virtual(halves())
    assert own.abs().max() > 0
    assert torch.equal(own, -theirs)


def test_slow_links_carry_fewer_swaps_and_old_half_differences() -> None:
    tiny = material()
    fast, slow = (
        run_swarm(tiny, Plan(4, links=(slow_link(tiny, steps=steps),), evaluations=1)) for steps in (0.5, 8.0)
    )
    assert slow.sent_bytes < 0.6 * fast.sent_bytes
    assert 0 < slow.swaps.link_use <= 1
    assert fast.spread < slow.spread


def test_claimed_parameters_lengthen_transfers() -> None:
    tiny = material()
    num, link = FlatParameters(tiny.model()).num_elements, slow_link(tiny, steps=1.0)
    alone, claimed = (run_swarm(tiny, Plan(4, links=(link,), evaluations=1), claimed=n) for n in (0, 8 * num))
    assert claimed.sent_bytes < 0.6 * alone.sent_bytes


def test_replicas_with_a_least_interval_meet_all_others() -> None:
    """Their steps end at fixed times, so those that are free first would be the same two in each round."""
    plan = Plan(4, step_s=2.5, evaluations=1)

    async def partners() -> list[Counter[str]]:
        lab = Swarm(material(**{"outer.min_inner_steps": 2, "train.total_steps": 60}), plan)
        await lab.run()
        return [Counter(swap.partner for swap in replica.swaps) for replica in lab.all]

    for each in run_virtual(partners()):
        assert len(each) == 3
        assert max(each.values()) < 0.6 * each.total()


def test_replicas_come_leave_and_are_slow() -> None:
    tiny = material()
    churn = parse_churn("join:3@4, crash:0@5, join:0@8, leave:1@10, lose:0.3", num_replicas=4)
    plan = Plan(4, speeds=(1.0, 1.0, 0.5, 1.0), links=(slow_link(tiny, steps=2.0),), churn=replace(churn, absent=0.2))
    result = run_swarm(tiny, plan)
    assert result.num_replicas == 3
    assert result.swaps.failed > 0
    assert result.loss < 0.99 * tiny.loss(tiny.model())


def test_streaming_mixes_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = material(**{"outer.inner_steps": 4})
    plan = Plan(4, links=(slow_link(tiny, steps=2.0),), evaluations=1)

    def run(rule: str) -> tuple[Result, torch.Tensor]:
        lab = Lockstep(tiny, plan, rule, num_slices=2)
        return lab.run(), lab.weights[3]

    (streaming, _), (alone, own), (blocking, _) = run("streaming"), run("local"), run("diloco")
    assert streaming.virtual_s == alone.virtual_s < blocking.virtual_s
    assert streaming.spread < 0.7 * alone.spread
    assert streaming.loss == pytest.approx(blocking.loss, rel=0.02)
    monkeypatch.setattr(Lockstep, "present", lambda lab, step: [0, 1, 2])
    assert torch.equal(run("streaming")[1], own), "who is absent receives nothing"


def test_a_rule_that_waits_takes_fewer_steps_in_the_same_time() -> None:
    tiny = material(**{"outer.inner_steps": 2})
    plan = Plan(4, links=(slow_link(tiny, steps=2.0),), evaluations=1)
    free, waiting = (Lockstep(tiny, plan, rule, limit_s=float(STEPS)).run() for rule in ("local", "diloco"))
    assert (free.steps, free.virtual_s) == (STEPS, STEPS)
    assert waiting.steps < STEPS <= waiting.virtual_s
    tiny, plan = material(**{"outer.inner_steps": 1000}), Plan(2, step_s=1.1, evaluations=1)
    last = Lockstep(tiny, plan, "diloco", limit_s=1.1 * STEPS).run()
    assert last.spread < 1e-6, "rounding errors do not prevent the last outer step"


def test_int4_is_off_by_at_most_half_a_step() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert (int4(values) - values).abs().max() <= 0.51 * values.abs().max() / 7


def row_of(cell: ladder.Cell) -> dict[str, Any]:
    swaps = {"age_steps": 1.0, "link_use": 1.0}
    values = {"loss": cell.learning_rate, "merged_loss": cell.learning_rate, "steps": 1, "wall_s": 0.0}
    fields = {name: getattr(cell, name) for name in ladder.Cell.__dataclass_fields__}
    return {**fields, **values, "swaps": swaps, "sent_per_parameter_step": 0.0}


def test_streaming_sends_all_that_a_link_carries_in_a_step() -> None:
    cell, links = ladder.Cell("0.1M", "muon", "streaming", "100", 1), ("free", "100", "20", "200", "1000")
    assert [ladder.slices_of(replace(cell, link=link)) for link in links] == [8, 8, 39, 4, 1]
    assert [ladder.slices_of(each) for each in (replace(cell, replicas=16), replace(cell, slow=0.1))] == [9, 4]


def test_the_ladder_skips_what_is_done_and_transfers_what_the_tuning_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ran = tmp_path / "ladder.jsonl", list[ladder.Cell]()
    monkeypatch.setattr(ladder, "run", lambda cell, device: ran.append(cell) or row_of(cell))
    monkeypatch.setattr("rows.CACHE", tmp_path)
    monkeypatch.setattr("sys.argv", ["ladder.py", "run", "--sizes", "0.1M", "--out", str(out)])
    assert not [*ladder.ladder([])], "nothing is transferred before the whole grid is done"
    ladder.main()
    assert ran == [*ladder.tuning()]
    ladder.main()
    cells = [*ladder.ladder(ladder.read(out))]
    assert ran[len([*ladder.tuning()]) :] == [cell for cell in cells if cell.size == "0.1M"]
    best = {cell.learning_rate for cell in cells if cell.size == "1M"}
    lowest = [min(rates) for rates in (*ladder.RATES.values(), *ladder.LOWER.values())]
    wanted = {round(rate * 64 / 160, 6) for rate in lowest}
    assert best == wanted, "the rate is inverse to the width"
    num = len(ran)
    ladder.main()
    assert len(ran) == num, "a finished cell does not run again"
    monkeypatch.setattr("sys.argv", ["ladder.py", "run", "--sizes", "3M", "--minutes", "1", "--out", str(out)])
    ladder.main()
    assert len(ran) == num, "a cell that would not end in time does not begin"
    assert "ours" in ladder.table(ladder.read(out))
    capsys.readouterr()


def test_sizes_have_the_parameters_of_their_names() -> None:
    for cell in ladder.tuning():
        spec = ladder.ladder_spec(cell, 1).model
        assert spec.num_parameters() == ladder.SIZES[cell.size].num_parameters
    found = [f"{size.num_parameters / 1e6:.1g}M" for name, size in ladder.SIZES.items() if size.hidden < 384]
    assert found == ["0.1M", *["0.3M"] * 3, "1M", "3M"]


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_the_corpus_holds_each_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    licence, first, second = "# a licence\n" * 50, "x = 1\n" * 50, "y = 2\n" * 50
    archives = [
        archive(tmp_path / "a.tar.gz", {"a/a.py": f"{licence}\n\n{first}", "a/b.png": first, "a/short.py": "z"}),
        archive(tmp_path / "b.tar.gz", {"b/a.py": second, "b/copy.py": second, "b/c.py": licence}),
    ]
    found = [*corpus.texts(archives)]
    assert found == [f"{licence}\n\n{first}", second]
    monkeypatch.setattr(corpus, "download", lambda folder: archives)
    pattern = corpus.make(tmp_path / "out")
    lines = [line for path in sorted(tmp_path.glob("out/text-*.jsonl")) for line in path.read_text().splitlines()]
    assert sorted(json.loads(line)["text"] for line in lines) == sorted(found)
    monkeypatch.setattr(corpus, "download", lambda folder: pytest.fail("it is there already"))
    assert corpus.make(tmp_path / "out") == pattern


def test_the_page_has_the_tables_of_the_committed_rows() -> None:
    page = Path(ladder.__file__).with_name("page.py")  # as `make lab` starts it
    subprocess.run([sys.executable, page, "--check"], check=True, timeout=PATIENCE_S)
