"""Write outer_step.json: outer steps as the authors' own implementation computes them.

    python tests/vectors/outer_step.py REFERENCE

REFERENCE is src/noloco/sparse_optimizer_c.py of github.com/gensyn-ai/noloco; the stored file comes from its commit
a1b4a42. Every replica is a process on gloo with two small parameters, to which random numbers are added between outer
steps. The reference uses one number for beta and gamma, its outer learning rate.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

VECTORS = Path(__file__).with_suffix(".json")
SHAPES = ((3, 4), (5,))
CASES = (  # replicas, rounds, alpha, beta = gamma
    (2, 4, 0.5, 0.7),
    (4, 6, 0.5, 0.7),
    (4, 3, 0.3, 0.9),
)


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(tensors: Any) -> list[list[float]]:
    return [tensor.detach().flatten().tolist() for tensor in tensors]


def replica(rank: int, path: str, case: tuple[int, int, float, float], folder: str) -> None:
    """Write the steps of one replica to FOLDER/RANK."""
    replicas, rounds, alpha, beta = case
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=replicas)
    reference, generator = load(path), torch.Generator().manual_seed(rank)

    def noise(scale: float) -> list[Tensor]:
        return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]

    model = nn.ParameterList(noise(1.0))
    optimizer = reference.SparseOptimizerC(model, dist.group.WORLD, 2, 1, outer_lr=beta, outer_momentum=alpha, lr=1e-3)

    def state() -> dict[str, list[list[float]]]:
        slow, fast, momentum = optimizer.step_params, model.parameters(), optimizer.momentum
        return {"slow": listed(slow), "fast": listed(fast), "momentum": listed(momentum)}

    steps = []
    for number in range(rounds):
        with torch.no_grad():
            for parameter, update in zip(model.parameters(), noise(0.1), strict=True):
                parameter.add_(update)
        order = reference.create_random_permutation(replicas, number + 1)
        group = reference.find_group(reference.batched(order, 2))
        before = state()
        optimizer.step()  # no parameter has a gradient, so Adam does nothing
        steps.append({"round": number, "rank": rank, "group": group, "before": before, "after": state()})
    Path(folder, str(rank)).write_text(json.dumps(steps), encoding="utf-8")
    dist.destroy_process_group()


def run(path: str, case: tuple[int, int, float, float]) -> dict[str, Any]:
    replicas, rounds, alpha, beta = case
    with tempfile.TemporaryDirectory() as folder:
        spawn(replica, (path, case, folder), nprocs=replicas)
        steps = [step for rank in range(replicas) for step in json.loads(Path(folder, str(rank)).read_text())]
    return {"replicas": replicas, "rounds": rounds, "alpha": alpha, "beta": beta, "gamma": beta, "steps": steps}


def main() -> None:
    (path,) = sys.argv[1:]
    note = "by tests/vectors/outer_step.py; gamma equals the outer learning rate there"
    report = {"note": note, "cases": [run(path, case) for case in CASES]}
    VECTORS.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
