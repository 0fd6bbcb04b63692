"""Compare a pipeline with whole models, at a batch from which the whole model learns as well as from smaller ones.

    python benchmarks/lab/stages.py run [--only pipeline] [--minutes 5]     adds cells to results/stages.jsonl
    python benchmarks/lab/stages.py table                                   what is done, as in results/stages.txt

Four heads, or four peers with the whole model, train on 2.5M tokens of corpus.py. First, whole models try batches and
rates ("tuning"). The pipeline has 3 stages of 4 replicas, and the largest batch within 1 % of the best, with its best
rate. It is compared with whole models that have the same links. All compute in fp32, as stages do on a CPU.

Times are those of a model of width 4,096 with 1B parameters per stage, on GPUs with 60 TFLOP/s and microbatches of 512
tokens: a replica computes 14.6 of them per second, and sends one in 0.17 s at 100 Mbit/s. Here, a microbatch is one
sequence of 64 tokens of 66 bytes, so a link of 0.2 Mbit/s takes as long. Only microbatches are to scale: weights travel
35 times faster than 1B parameters would. Peers swap at every second step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import stack
from corpus import CACHE, make
from ladder import HELD_OUT
from rows import cell_of, command
from swarm import run_swarm

from noloco_p2p.flow.frames import Backward, Forward, Frame
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, parse_links
from noloco_p2p.simulate.stage_result import simulate_stages
from noloco_p2p.simulate.staged import StagedPlan, StageNode, staged
from noloco_p2p.spec import TrainerSpec

OUT = Path(__file__).resolve().parents[1] / "results" / "stages.jsonl"
HEADS, STAGES, LENGTH, TOKENS = 4, 3, 64, 4 * 32 * 64 * 300
BATCHES, RATES = (8, 16, 32), (0.008, 0.016, 0.032)
HIGHER = {16: (0.064,), 32: (0.064,)}  # further rates of batches whose best rate was the highest of the others
NEAR = 1.01  # the largest loss of a batch that counts as good, relative to the best
LINKS = {"100 Mbit/s, 50 ms": "0.2mbit-50ms", "1 Gbit/s, 5 ms": "2mbit-5ms"}
SEQUENCE_S = 6 * STAGES / (8 * 14.6)  # compute of a sequence, forward and backward, without recomputation
SLOW, FAST = LINKS


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str  # "tuning", "whole" or "pipeline"
    batch: int  # sequences of a replica or a head in a step
    rate: float
    link: str = SLOW
    lost: float = 0.0  # share of the activations and gradients that are lost on their way
    seed: int = 1

    @property
    def steps(self) -> int:
        return TOKENS // (HEADS * LENGTH * self.batch)


def cells(found: list[dict[str, Any]]) -> Iterator[Cell]:
    """Yield the cells of the tuning, and, once they are done, those of the comparison."""
    tuning = [Cell("tuning", batch, rate) for batch in BATCHES for rate in (*RATES, *HIGHER.get(batch, ()))]
    yield from tuning
    losses = {cell_of(Cell, row): row["loss"] for row in found}
    if not all(cell in losses for cell in tuning):
        return
    good = [cell for cell in tuning if losses[cell] <= NEAR * min(losses[each] for each in tuning)]
    batch = max(cell.batch for cell in good)
    best = min((cell for cell in good if cell.batch == batch), key=losses.__getitem__)
    for kind in ("whole", "pipeline"):
        yield from (replace(best, kind=kind, link=link) for link in LINKS)
    yield replace(best, kind="pipeline", lost=0.01)


def spec_of(cell: Cell) -> TrainerSpec:
    values = {
        "name": "stages",
        "model": {"hidden_size": 64, "num_layers": STAGES, "num_heads": 4, "mlp_size": 172, "parameter_seeds": True},
        "data": {"source": "text", "sequence_length": LENGTH},
        "train": {
            "total_steps": cell.steps,
            "warmup_steps": cell.steps // 10,
            "batch_size": cell.batch,
            "learning_rate": cell.rate,
            "inner_optimizer": "muon",
        },
        "outer": {"min_inner_steps": 2},
        "evaluate": {"num_sequences": HELD_OUT},
    }
    return TrainerSpec.from_dict(values, origin="the lab")


def run(cell: Cell) -> dict[str, Any]:
    began_s, spec, links = time.monotonic(), spec_of(cell), parse_links([LINKS[cell.link]])
    text, step_s = {"text": make(CACHE)}, cell.batch * SEQUENCE_S
    if cell.kind != "pipeline":
        plan = Plan(HEADS, cell.seed, step_s, links=links, evaluations=1)
        with patch.object(stack, "products_of", lambda device: "fp32"):
            result = run_swarm(Material.of(spec, text, seed=cell.seed), plan)
        told = {"loss": result.loss, "merged_loss": result.merged_loss}
    else:
        material = Material.of(staged(spec, STAGES), text, seed=cell.seed)
        pipeline = StagedPlan((HEADS,) * STAGES, cell.seed, step_s, links=(links,), evaluations=1)
        found = simulate_stages(material, pipeline, on_made=lambda nodes: lose(nodes, cell.lost))
        told = {
            "loss": found.loss,
            "merged_loss": found.merged_loss,
            "late": [stage.late_share for stage in found.stages],
            "lost_microbatches": found.num_lost / (found.num_lost + found.num_done),
            "of_predicted": found.tokens_per_s / found.predicted_tokens_per_s,
        }
    return {**asdict(cell), "steps": cell.steps, **told, "wall_s": time.monotonic() - began_s}


def lose(nodes: list[StageNode], share: float) -> None:
    """Lose this share of the activations and gradients that arrive."""
    rng = random.Random("lost")
    for node in nodes:

        def arrives(sender: StageNode, frame: Frame | None, arrive: Any = node._arrive) -> None:
            if not (isinstance(frame, Forward | Backward) and rng.random() < share):
                arrive(sender, frame)

        node._arrive = arrives


def table(found: list[dict[str, Any]]) -> str:
    lines = ["             batch    rate  loss    merged  late             lost   of predicted tokens/s"]
    for row in found:
        line = f"{row['kind']:12} {row['batch']:5} {row['rate']:7.3f}  {row['loss']:.4f}  {row['merged_loss']:.4f}"
        if row["kind"] == "pipeline":
            late = " ".join(f"{100 * share:3.0f} %" for share in row["late"])
            line += f"  {late}  {100 * row['lost_microbatches']:4.1f} %  {100 * row['of_predicted']:3.0f} %"
        lines.append(f"{line}  {row['link']}" + ", messages lost" * bool(row["lost"]))
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, OUT, cells, run, table)
