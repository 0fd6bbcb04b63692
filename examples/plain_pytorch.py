"""Use NoLoCo in your own training script, with any model, any data and your own loop.

    python examples/plain_pytorch.py --steps 500000              # start the first peer, which prints a ticket
    python examples/plain_pytorch.py noloco1... --steps 500000   # start another peer

On the same machine, start the other peer with `--state-dir other`. The script needs only two lines for NoLoCo, which
call `Peer.join` and `NoLoCo`. If you start it again with the same folder, it resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from noloco_p2p import NoLoCo, Peer, RunSpec


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ticket", nargs="?", help="the ticket of a peer that runs this script")
    parser.add_argument("--state-dir", type=Path, default=Path("example-peer"))
    parser.add_argument("--listen", default="0.0.0.0:0")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)  # peers that start separately need the same weights
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    spec = RunSpec(name="wave")
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {peer.ticket}", flush=True)
        outer = NoLoCo(model, optimizer, peer)
        torch.seed()  # from here on, each peer draws different data
        for _ in range(outer.num_steps, args.steps):
            inputs = torch.randn(256, 8)
            loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if outer.num_steps % 100 == 0:
                print(f"step {outer.num_steps}: loss {loss.item():.4f}, {peer.metrics.swaps} swaps", flush=True)
            if peer.leave_requested.is_set():  # requested by `noloco leave --state-dir ...`
                break
        outer.save()


if __name__ == "__main__":
    main()
