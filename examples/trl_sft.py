"""Fine-tune a language model together with TRL's `SFTTrainer`. Peers swap only LoRA adapters; data stay at home.

    python examples/trl_sft.py MODEL DATA.jsonl                       # start the first peer, which prints a ticket
    python examples/trl_sft.py MODEL DATA.jsonl --ticket noloco1...   # start another peer, with the same MODEL

MODEL is a folder or a name on the hub. DATA.jsonl is this peer's own file, in a format that TRL knows: `messages`,
`prompt` and `completion`, or `text`. The script also needs the packages trl and peft: pip install trl peft
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from noloco_p2p import Peer, RunSpec
from noloco_p2p.integrations.huggingface import NoLoCoCallback


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--ticket", help="the ticket of a peer that runs this script")
    parser.add_argument("--state-dir", type=Path, default=Path("example-peer"))
    parser.add_argument("--listen", default="0.0.0.0:0")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args(arguments)

    base = AutoModelForCausalLM.from_pretrained(args.model)
    torch.manual_seed(0)  # peers that start separately need the same adapters
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    spec = RunSpec(name="trl-sft", total_steps=args.steps)
    with Peer.join(args.ticket or spec, state_dir=args.state_dir, listen=args.listen) as peer:
        print(f"others join with: python {__file__} {args.model} DATA.jsonl --ticket {peer.ticket}", flush=True)
        settings = SFTConfig(
            output_dir=str(args.state_dir / "trainer"),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=2e-4,
            bf16=torch.cuda.is_available(),
            logging_steps=10,  # the log also shows the swaps, and how far apart the peers are
            disable_tqdm=True,
            report_to=[],
        )
        data, tokenizer = Dataset.from_json(args.data), AutoTokenizer.from_pretrained(args.model)
        callbacks = [NoLoCoCallback(peer)]
        SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, callbacks=callbacks).train()


if __name__ == "__main__":
    main()
