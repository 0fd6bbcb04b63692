"""Use NoLoCo in a Hugging Face `Trainer`. Add one callback, and leave the rest of your script as it is.

    python examples/hf_trainer.py                # start the first peer, which prints a ticket
    python examples/hf_trainer.py noloco1...     # start another peer, on any machine

The script also needs the package accelerate, which `make install` and the extra `hf` install.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from noloco_p2p import Peer, RunSpec
from noloco_p2p.integrations.huggingface import NoLoCoCallback


class Counting(torch.utils.data.Dataset):
    """A data set with rows of numbers that count up. Replace it with your own."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = index % 200 + torch.arange(16)
        return {"input_ids": ids, "labels": ids}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ticket", nargs="?", help="the ticket of a peer that runs this script")
    parser.add_argument("--state-dir", type=Path, default=Path("example-peer"))
    parser.add_argument("--listen", default="0.0.0.0:0")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)  # peers that start separately need the same weights
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    spec = RunSpec(name="hf-trainer", total_steps=args.steps)
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {peer.ticket}", flush=True)
        settings = TrainingArguments(
            output_dir=str(args.state_dir / "trainer"),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            seed=zlib.crc32(peer.peer_id.encode()),  # each peer has its own order of the data
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=20,  # the log also shows the swaps, and how far apart the peers are
        )
        Trainer(model, settings, train_dataset=Counting(), callbacks=[NoLoCoCallback(peer)]).train()


if __name__ == "__main__":
    main()
