"""Compare the lab with `noloco simulate`, which has one model per replica: the losses of some seeds, and the time.

    python benchmarks/lab/against_simulate.py [--seeds 3] [--steps 40] > benchmarks/results/lab_agreement.txt

Both train 8 replicas of toy.toml (0.12M parameters) with Muon and `modulo`, on links on which the weights take 0.5
inner steps, as those of 125M parameters do at 1,000 Mbit/s. A replica begins one swap of everything per step. On slower
links, the simulator's slices of so small a model are only half as large as those of the lab, because frames of at most
4,096 numbers pass one link after another, and offers take a tenth of the link. Large models have large frames.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from swarm import run_swarm

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import IDEAL

TOY = Path(__file__).resolve().parents[1] / "toy.toml"
STEP_S, MBIT_S, CLAIMED = 1.23, 1000, 125_000_000


def case(steps: int, batch_size: int, seed: int) -> tuple[Material, Plan]:
    changes = {
        "train.total_steps": steps,
        "train.warmup_steps": steps // 10,
        "train.batch_size": batch_size,
        "train.inner_optimizer": "muon",
        "codec.weights": "modulo",
        "outer.closing_mixings": 0,
        "outer.min_inner_steps": 1,
    }
    material = Material.of(TrainerSpec.load(TOY).with_changes(changes, origin="the case"), {}, seed=seed)
    mbit_s = MBIT_S * material.model().num_parameters() / CLAIMED
    link = replace(IDEAL, name="scaled", up_mbit_s=mbit_s, down_mbit_s=mbit_s, delay_ms=1)
    return material, Plan(8, seed=seed, step_s=STEP_S, links=(link,), evaluations=1)


def timed(material: Material, plan: Plan, *, is_lab: bool) -> tuple[Result, float]:
    began_s = time.process_time()
    result = run_swarm(material, plan) if is_lab else simulate_swarm(material, plan)
    return result, time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one thread, torch {torch.__version__}, {arguments.steps} steps, 8 replicas, seeds 1 to {arguments.seeds}")
    for batch_size in (4, 1):
        print(f"\n{batch_size} sequences of 64 tokens per step and replica")
        print(f"{'':9} {'losses':24} {'mean':>6} {'merged':>7} {'spread %':>8} {'swaps':>6} {'age':>5} {'s':>6}")
        both: list[float] = []
        for is_lab in (False, True):
            runs = [
                timed(*case(arguments.steps, batch_size, 1 + seed), is_lab=is_lab) for seed in range(arguments.seeds)
            ]
            losses = [result.loss for result, _ in runs]
            both.append(fmean(seconds for _, seconds in runs))
            print(
                f"{'lab' if is_lab else 'simulate':9} {' '.join(f'{loss:.4f}' for loss in losses):24} "
                f"{fmean(losses):.4f} {fmean(result.merged_loss for result, _ in runs):7.4f} "
                f"{fmean(100 * result.spread for result, _ in runs):8.3f} "
                f"{fmean(result.swaps.committed for result, _ in runs):6.0f} "
                f"{fmean(result.swaps.age_steps for result, _ in runs):5.2f} {both[-1]:6.1f}"
                + (f"   standard deviation of the losses: {stdev(losses):.4f}" if len(losses) > 1 else ""),
                flush=True,
            )
        print(f"the lab is {both[0] / both[1]:.1f} times as fast (target 5)")


if __name__ == "__main__":
    main()
