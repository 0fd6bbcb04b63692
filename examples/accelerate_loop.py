"""Use NoLoCo in a training loop of accelerate, whose batches accumulate gradients.

    python examples/accelerate_loop.py                # start the first peer, which prints a ticket
    python examples/accelerate_loop.py noloco1...     # start another peer, on any machine

Start the script with python, not with `accelerate launch`: every process with a GPU is a peer of its own. It also needs
the package accelerate, which `make install` and the extra `hf` install.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from accelerate import Accelerator
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
    torch.seed()  # from here on, each peer draws different data
    data = torch.utils.data.DataLoader(torch.randn(1_000_000, 8), batch_size=128, shuffle=True)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    spec = RunSpec(name="accelerate")
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {peer.ticket}", flush=True)
        outer = NoLoCo(model, optimizer, peer)  # two batches are one step
        for inputs in (inputs for _ in itertools.count() for inputs in data):
            with accelerator.accumulate(model):
                loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and outer.num_steps % 100 == 0:
                print(f"step {outer.num_steps}: loss {loss.item():.4f}, {peer.metrics.swaps} swaps", flush=True)
            if outer.num_steps >= args.steps or peer.leave_requested.is_set():
                break
        outer.save()


if __name__ == "__main__":
    main()
