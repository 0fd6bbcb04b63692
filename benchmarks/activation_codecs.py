"""Measure activation codecs: speed on one core, and errors on synthetic tensors and on tensors of a small Llama.

    python benchmarks/activation_codecs.py [--quick] [--json FILE]

Speed is the number of bytes of fp32 values that are encoded or decoded per second of processor time, for 512 tokens of
4,096 channels. The best of many calls counts; copying the same tensor is the baseline. (At every call, the kernel
allocates a result of more than 32 MiB anew, which takes longer than the codec.) Set ATEN_CPU_CAPABILITY=avx2,
ONEDNN_MAX_CPU_ISA=AVX2 and MKL_ENABLE_INSTRUCTIONS=AVX2 to measure without AVX-512. Errors are Euclidean norms,
relative to the exact tensor.

The Llama is initialized from a seed and trained on the text of this project's documentation. Its activations and
gradients are those after the second of four blocks. "A weight gradient" is activations^T times gradients; its error
compares encoded gradients with exact ones. Stochastic rounding is measured as well, with the blocks and scales of
int8.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from claims import Claim, run
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from noloco_p2p.codec.activations import ACTIVATION_CODEC_NAMES, BLOCK_CHANNELS, get_activation_codec
from noloco_p2p.codec.blocks import MAX_CODE

TARGETS_GB_S = {"int8": 1.0}
DOCS = Path(__file__).resolve().parents[1] / "docs"
BATCH, SEQUENCE, HIDDEN = 8, 256, 512


def coded(name: str, values: Tensor) -> Tensor:
    codec = get_activation_codec(name)
    return codec.decode(codec.encode(values), shape=values.shape, dtype=torch.float32)


def relative(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm())


def best_gb_s(action: Callable[[], object], *, num_bytes: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began_s = time.thread_time()  # torch has one thread here, and other programs may share its core
        action()
        times.append(time.thread_time() - began_s)
    return num_bytes / min(times) / 1e9


def speeds(quick: bool) -> list[Claim]:
    values = torch.randn(1, 512, 4096)
    num_bytes, repeats = 4 * values.numel(), 100 if quick else 300
    isa = torch.backends.cpu.get_cpu_capability()
    copy = best_gb_s(values.clone, num_bytes=num_bytes, repeats=repeats)
    claims = [Claim(f"a copy, one core, {isa}", copy, "GB/s of fp32")]
    for name in ACTIVATION_CODEC_NAMES:
        codec = get_activation_codec(name)
        payload = codec.encode(values)
        ways: dict[str, Callable[[], object]] = {
            "encode": lambda codec=codec: codec.encode(values),
            "decode": lambda codec=codec, payload=payload: codec.decode(
                payload, shape=values.shape, dtype=torch.float32
            ),
        }
        claims.append(Claim(f"{name}: bytes for a token of 4096 channels", codec.num_bytes((4096,)), "bytes"))
        for way, action in ways.items():
            speed = best_gb_s(action, num_bytes=num_bytes, repeats=repeats)
            claim = Claim(f"{name}: {way}, one core, {isa}", speed, "GB/s of fp32")
            if target := TARGETS_GB_S.get(name):
                claim = replace(claim, target=f">= {target:g}", met=speed >= target)
            claims.append(claim)
            claims.append(Claim(f"{name}: {way} / a copy", speed / copy, "ratio"))
    return claims


def synthetic_errors() -> list[Claim]:
    normal = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    large = torch.arange(4096) % 100 == 7  # 1 % of the channels
    outliers = torch.where(large, 1000 * normal, normal)
    claims = []
    for name in ACTIVATION_CODEC_NAMES:
        error = coded(name, outliers) - outliers
        claims += [
            Claim(f"{name}: error, Gaussian", relative(coded(name, normal) - normal, normal), "of the norm"),
            Claim(f"{name}: error, 1 % of the channels x 1000", relative(error, outliers), "of the norm"),
            Claim(
                f"{name}: the same, of the other channels", relative(error[:, ~large], normal[:, ~large]), "of theirs"
            ),
        ]
    return claims


def llama_tensors(num_steps: int) -> tuple[Tensor, Tensor, float]:
    """Return activations and their gradients (BATCH, SEQUENCE, HIDDEN) after `num_steps` of training, and the loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        kept[:] = [output]

    model.model.layers[1].register_forward_hook(keep)
    loss = torch.tensor(math.nan)
    for _ in range(num_steps + 1):
        starts = torch.randint(len(data) - SEQUENCE, (BATCH,)).tolist()
        batch = torch.stack([data[start : start + SEQUENCE] for start in starts])
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
    (activations,) = kept
    assert activations.grad is not None
    return activations.detach(), activations.grad, loss.item()


def stochastic(values: Tensor) -> Tensor:
    """Encode and decode `values` (tokens, hidden) as int8 would if it picked one of the two nearest codes at random.

    The mean of many draws is exact.
    """
    blocks = values.unflatten(1, (-1, BLOCK_CHANNELS))
    scales = (blocks.abs().amax(dim=2, keepdim=True) / MAX_CODE).clamp_min(1e-30)  # a block may be all 0
    return ((blocks / scales + torch.rand_like(blocks)).floor() * scales).flatten(1)


def llama_errors(num_steps: int) -> list[Claim]:
    """Measure the error of each codec on the tensors of one batch."""
    activations, gradients, loss = llama_tensors(num_steps)
    claims = [Claim(f"a Llama of 4 blocks after {num_steps} steps: loss", loss, "nats a byte")]
    x, g = activations.flatten(0, 1), gradients.flatten(0, 1)
    exact = x.T @ g

    def of_weights(rounded: Tensor) -> float:
        return relative(x.T @ rounded - exact, exact)

    for name in ACTIVATION_CODEC_NAMES:
        claims += [
            Claim(f"{name}: error, activations of the Llama", relative(coded(name, x) - x, x), "of the norm"),
            Claim(f"{name}: error, gradients of the Llama", relative(coded(name, g) - g, g), "of the norm"),
            Claim(f"{name}: error, a weight gradient", of_weights(coded(name, g)), "of the norm"),
        ]
    what = "int8, if it rounded stochastically: error, a weight gradient"
    return [*claims, Claim(what, of_weights(stochastic(g)), "of the norm")]


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    return speeds(quick) + synthetic_errors() + llama_errors(5 if quick else 60)


if __name__ == "__main__":
    run(measure, doc=__doc__)
