"""Use NoLoCo in the `Trainer` of Lightning. Add one callback, and leave the rest of your script as it is.

    python examples/lightning_trainer.py                # start the first peer, which prints a ticket
    python examples/lightning_trainer.py noloco1...     # start another peer, on any machine

The script also needs the package lightning, which `make install` and the extra `lightning` install.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer

from noloco_p2p import Peer, RunSpec
from noloco_p2p.integrations.lightning import NoLoCoCallback


class Wave(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.net(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ticket", nargs="?", help="the ticket of a peer that runs this script")
    parser.add_argument("--state-dir", default="example-peer")
    parser.add_argument("--listen", default="0.0.0.0:0")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)  # peers that start separately need the same weights
    module, spec = Wave(), RunSpec(name="lightning")
    torch.seed()  # each peer draws different data
    data = torch.utils.data.DataLoader(torch.randn(100_000, 8), batch_size=256, shuffle=True)
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {peer.ticket}", flush=True)
        Trainer(max_steps=args.steps, devices=1, callbacks=[NoLoCoCallback(peer)]).fit(module, data)


if __name__ == "__main__":
    main()
