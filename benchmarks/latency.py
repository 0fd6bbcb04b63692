"""Compare the time of an exchange with one peer (a swap) with that of an exchange with all peers (a tree all-reduce).

    python benchmarks/latency.py [--quick] [--json FILE]

The time of a send has a log-normal distribution with a median of 1, and nothing else takes time. A pair is done when
both sends are done. In a tree all-reduce, every peer waits for its children (at most two), adds their vectors to its
own, and sends the sum to its parent. The total returns in the opposite direction. By formula, a pair takes E[max of two
sends] = (1 + erf(sigma / 2)) exp(sigma^2 / 2), and a tree takes 2 x depth times as long. In a large tree, the slowest
of many paths counts, so the time is longer than that of the formula.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from claims import machine

SIGMAS = (0.1, 0.5, 1.0)
SIZES = tuple(2**power for power in range(1, 13))


@dataclass(frozen=True, slots=True)
class Row:
    """The mean times, in units of the median time of a send."""

    num_peers: int
    sigma: float
    pair: float
    pair_formula: float
    tree: float
    tree_formula: float

    @property
    def ratio(self) -> float:
        return self.tree / self.pair


def pair_formula(sigma: float) -> float:
    return (1 + math.erf(sigma / 2)) * math.exp(sigma**2 / 2)


def tree_depth(num_peers: int) -> int:
    """Return the depth of a binary tree in which every node is a peer, numbered as in a heap."""
    return num_peers.bit_length() - 1


def simulate_pair(rng: np.random.Generator, sigma: float, trials: int) -> float:
    return float(rng.lognormal(0.0, sigma, (trials, 2)).max(axis=1).mean())


def simulate_tree(rng: np.random.Generator, num_peers: int, sigma: float, trials: int) -> float:
    """Return the mean time of a tree all-reduce. Peers are numbered as in a heap: the parent of k is (k - 1) // 2."""
    parents = (np.arange(1, num_peers) - 1) // 2
    total = 0.0
    for _ in range(trials):
        up, down = rng.lognormal(0.0, sigma, (2, num_peers))
        ready = np.zeros(num_peers)
        for level in reversed(range(1, tree_depth(num_peers) + 1)):  # deepest first; a level is a slice of the heap
            nodes = np.arange(2**level - 1, min(2 ** (level + 1) - 1, num_peers))
            np.maximum.at(ready, parents[nodes - 1], ready[nodes] + up[nodes])
        told = np.full(num_peers, ready[0])
        for level in range(1, tree_depth(num_peers) + 1):
            nodes = np.arange(2**level - 1, min(2 ** (level + 1) - 1, num_peers))
            told[nodes] = told[parents[nodes - 1]] + down[nodes]
        total += told.max()
    return total / trials


def measure(quick: bool) -> list[Row]:
    rng = np.random.default_rng(0)
    trials = 50 if quick else 1000
    rows = []
    for sigma in SIGMAS:
        expected = pair_formula(sigma)
        for num_peers in SIZES:
            tree = simulate_tree(rng, num_peers, sigma, trials)
            pair = simulate_pair(rng, sigma, 100 * trials)
            rows.append(Row(num_peers, sigma, pair, expected, tree, 2 * tree_depth(num_peers) * expected))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer trials")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = measure(args.quick)
    print(machine())
    print("peers  sigma    pair  formula     tree  formula   tree / pair")
    for row in rows:
        print(
            f"{row.num_peers:>5}  {row.sigma:>5g}  {row.pair:>6.2f}  {row.pair_formula:>7.2f}  {row.tree:>7.2f}  "
            f"{row.tree_formula:>7.2f}  {row.ratio:>12.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
