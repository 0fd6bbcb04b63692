"""Compare the loss of Muon with this project's orthogonalization and with that of torch, for paired seeds of the toy.

    python benchmarks/study/orthogonalization.py [--seeds 0,1,2]

`torch.optim.Muon` (five iterations, here in fp32 so that precision plays no role) is compared with
`noloco_p2p.optim.muon` (scaled rows, three iterations), in synchronous training and in rounds of five steps, with 8
replicas and 400 steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean

import torch
import torch.optim._muon as torch_muon
from study import STUDIES, machine, run_case
from torch import Tensor

from noloco_p2p.optim import inner, muon

CASES = {case.name: case for case in STUDIES["best"] if case.name in ("ddp", "5: 0 1 1")}


def newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Orthogonalize as `torch.optim.Muon` does, but in the dtype of `grad`."""
    a, b, c = coefficients
    is_tall = grad.size(0) > grad.size(1)
    matrix = grad.T if is_tall else grad
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if is_tall else matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    torch.set_num_threads(1)
    torch_muon._zeropower_via_newtonschulz = newton_schulz
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {"torch": torch.optim.Muon, "ours": muon.Muon}
    print(f"# {machine()}")
    for name, case in CASES.items():
        losses: dict[str, list[float]] = {which: [] for which in optimizers}
        for seed in seeds:
            for which, optimizer in optimizers.items():
                inner.Muon = optimizer  # pyright: ignore[reportAttributeAccessIssue]
                losses[which].append(run_case(case, steps=400, replicas=8, seed=seed)["loss"])
            show(name, f"seed {seed}", **{which: each[-1] for which, each in losses.items()})
        show(name, "mean", **{which: fmean(each) for which, each in losses.items()})


def show(case: str, what: str, *, torch: float, ours: float) -> None:
    print(f"{case:<10} {what:<7} torch {torch:.4f}  ours {ours:.4f}  {100 * (ours / torch - 1):+.2f} %", flush=True)


if __name__ == "__main__":
    main()
