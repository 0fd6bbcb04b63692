"""Compare the loss in chunks of tokens with the model's own loss: peak memory and time of a forward and backward pass.

    python benchmarks/chunked_loss.py [--quick] [--json FILE]

The model is a small Llama with the vocabulary of Llama 3 (128,256), so nearly all memory and time belong to the head.
It is fp32, on one thread of the CPU. Each measurement is a process of its own, and its memory is the peak of this
process beyond what it has before the first pass, which includes the gradients. Time is the best of some passes.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from claims import Claim, run

from noloco_p2p.spec import LoraSpec, ModelSpec
from noloco_p2p.trainer import chunked_loss
from noloco_p2p.trainer.model import build_model, causal_lm_loss

VOCABULARY, HIDDEN = 128_256, 256
MIB, CHUNKS_MIB = 1 << 20, (16, 64, 256, 512)
ALL_WEIGHTS, ADAPTERS = LoraSpec(), LoraSpec(rank=8)


def measure(lora: LoraSpec, num_tokens: int, chunk_mib: int | None, passes: int) -> tuple[float, float]:
    """Return the peak in MiB and the seconds of a pass. Without a size of a chunk, the loss is the model's own."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_layers": 1, "num_heads": 4, "mlp_size": 2 * HIDDEN}
    model = build_model(ModelSpec.model_validate({**sizes, "lora": lora}), sequence_length=num_tokens)
    chunked_loss.LOGITS_BYTES = (chunk_mib or 1 << 20) * MIB
    tokens = torch.randint(0, VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    causal_lm_loss(model, tokens[:, :2]).backward()  # loads libraries
    model.zero_grad()
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[float]()
    for _ in range(passes):
        began_s = time.perf_counter()
        causal_lm_loss(model, tokens).backward()
        seconds.append(time.perf_counter() - began_s)
        model.zero_grad()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, min(seconds)


def alone(*given: object) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *given).result()  # pyright: ignore[reportArgumentType]


def claims(quick: bool) -> list[Claim]:
    num_tokens, passes = (512, 1) if quick else (2048, 3)
    found = [Claim("tokens, with a vocabulary of 128,256", num_tokens, "tokens")]
    found.append(Claim("their logits", 4 * num_tokens * VOCABULARY / MIB, "MiB"))
    for what, lora in (("all weights", ALL_WEIGHTS), ("adapters", ADAPTERS)):
        own = alone(lora, num_tokens, None, passes)
        found += [Claim(f"{what}: the model's own loss", own[0], "MiB"), Claim(f"{what}: the same", own[1], "s")]
        for chunk_mib in CHUNKS_MIB:
            memory, seconds = alone(lora, num_tokens, chunk_mib, passes)
            is_default = chunk_mib * MIB == chunked_loss.LOGITS_BYTES
            name = f"{what}: chunks of {chunk_mib} MiB{', the default' if is_default else ''}"
            found += [
                Claim(name, memory, "MiB"),
                Claim(f"{name}, time", seconds, "s"),
                Claim(f"{name}, relative time", seconds / own[1], ""),
            ]
    return found


if __name__ == "__main__":
    run(claims, doc=__doc__)
