"""Fine-tune a model together that is too large to swap. Peers exchange only their LoRA adapters.

    python examples/lora.py MODEL                       # start the first peer, which prints a ticket
    python examples/lora.py MODEL --ticket noloco1...   # start another peer, on any machine with the same MODEL

MODEL is a folder or a name on the hub. `noloco join` does the same if the run spec sets `rank = 16` in `[model.lora]`.
The script also needs the package peft, which `make install` and the extra `lora` install.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from noloco_p2p import NoLoCo, Peer, RunSpec


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--ticket", help="the ticket of a peer that runs this script")
    parser.add_argument("--state-dir", type=Path, default=Path("example-peer"))
    parser.add_argument("--listen", default="0.0.0.0:0")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save", type=Path, help="the folder to write the adapters to")
    args = parser.parse_args(arguments)

    base = AutoModelForCausalLM.from_pretrained(args.model)
    torch.manual_seed(0)  # peers that start separately need the same adapters
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    model.print_trainable_parameters()

    spec = RunSpec(name="lora-example")
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {args.model} --ticket {peer.ticket}", flush=True)
        outer = NoLoCo(model, optimizer, peer)  # frozen weights are compared, but never sent
        torch.seed()  # from here on, each peer draws different data
        for _ in range(outer.num_steps, args.steps):
            start = torch.randint(3, 200, (16, 1))  # rows of numbers that count up; use your text instead
            batch = start + torch.arange(16)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if outer.num_steps % 100 == 0:
                print(f"step {outer.num_steps}: loss {loss.item():.4f}, {peer.metrics.swaps} swaps", flush=True)
            if peer.leave_requested.is_set():
                break
        outer.save()
        if args.save:
            model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
