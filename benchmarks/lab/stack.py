"""Train many replicas of a small transformer as one batched model, on a CPU or a GPU.

All replicas have the same shape, so each weight matrix is a stack of shape (replicas, rows, columns), and each product
is a batched one. The parameters of the stack are one tensor of shape (replicas, parameters). A row is the flat vector
of a replica, which is what replicas swap.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

VOCABULARY = 256
BLOCK = ("attention_norm", "attention", "projection", "mlp_norm", "up", "down")  # the parameters of a layer
NUM_CHUNKS = 60  # of the flat vector; a slice is a number of consecutive chunks
# Coefficients of the polynomials of Muon's orthogonalization (Polar Express, arXiv 2505.16932).
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a replica's model, and of its batches."""

    hidden: int
    layers: int
    heads: int
    inner: int  # width of the MLP
    tokens: int  # length of a sequence
    batch: int  # sequences of an inner step

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter, in the order of the flat vector."""
        blocks = {
            f"{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in (
                ("attention", (self.hidden, 3 * self.hidden)),
                ("projection", (self.hidden, self.hidden)),
                ("up", (self.hidden, 2 * self.inner)),
                ("down", (self.inner, self.hidden)),
                ("attention_norm", (self.hidden,)),
                ("mlp_norm", (self.hidden,)),
            )
        }
        sizes = {"embedding": (VOCABULARY, self.hidden), **blocks, "norm": (self.hidden,)}
        return {**sizes, "padding": (-sum(map(math.prod, sizes.values())) % NUM_CHUNKS,)}  # all chunks have one length

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for size in self.sizes().values())


TOY = Shape(hidden=64, layers=2, heads=4, inner=172, tokens=64, batch=4)  # 0.12M parameters, as toy.toml
SMALL = Shape(hidden=128, layers=4, heads=4, inner=344, tokens=128, batch=8)  # 0.8M parameters
# 16M parameters. Eight replicas take 65,536 tokens a step, a little less than the critical batch of runs of 40M tokens
# and more (22.91 D ** 0.47, arXiv 2410.21676).
MIDDLE = Shape(hidden=384, layers=9, heads=6, inner=1024, tokens=512, batch=16)
SHAPES = {"toy": TOY, "small": SMALL, "16M": MIDDLE}


class Stack:
    """The parameters of all replicas, and the forward pass over any rows of them."""

    def __init__(self, shape: Shape, seeds: list[int], device: torch.device) -> None:
        """Initialize one replica per entry of `seeds`. Replicas with the same seed start with the same weights."""
        self.shape, self.sizes = shape, shape.sizes()
        self.lengths = [math.prod(size) for size in self.sizes.values()]
        rows = {seed: self._initial(seed) for seed in set(seeds)}
        self.flat = torch.stack([rows[seed] for seed in seeds]).to(device)
        position = torch.arange(shape.tokens, device=device)[:, None]
        width = shape.hidden // shape.heads
        angle = position / 10_000.0 ** (torch.arange(0, width, 2, device=device) / width)
        self.rotary = angle.cos(), angle.sin()
        self.block = _compiled_block() if device.type == "cuda" else _block

    def _initial(self, seed: int) -> Tensor:
        generator, parts = torch.Generator().manual_seed(seed), []
        for name, size in self.sizes.items():
            std = 0.02 / math.sqrt(2 * self.shape.layers) if name.endswith(("projection", "down")) else 0.02
            parts.append(torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * std)
        return torch.cat([part.flatten() for part in parts])

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in `flat` (replicas, parameters)."""
        views = flat.split(self.lengths, dim=1)
        return {name: part.view(-1, *size) for (name, size), part in zip(self.sizes.items(), views, strict=True)}

    def losses(self, flat: Tensor, text: Tensor) -> Tensor:
        """Return the mean loss of each replica. `text` has shape (replicas, batch, tokens + 1)."""
        shape, weights = self.shape, self.parts(flat)
        replicas, batch = text.shape[:2]
        inputs, targets = text[..., :-1].reshape(replicas, -1), text[..., 1:].reshape(replicas, -1)
        hidden = torch.gather(weights["embedding"], 1, inputs[..., None].expand(-1, -1, shape.hidden))
        for layer in range(shape.layers):
            own = {name: weights[f"{layer}.{name}"] for name in BLOCK}
            hidden = self.block(hidden, *self.rotary, batch=batch, heads=shape.heads, **own)
        logits = torch.bmm(_norm(hidden, weights["norm"]), weights["embedding"].transpose(1, 2))
        loss = cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none")
        return loss.view(replicas, -1).mean(1)


def _block(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    batch: int,
    heads: int,
    attention_norm: Tensor,
    attention: Tensor,
    projection: Tensor,
    mlp_norm: Tensor,
    up: Tensor,
    down: Tensor,
) -> Tensor:
    """Apply one layer of each replica to `hidden` (replicas, batch * tokens, width)."""
    replicas, width = hidden.shape[0], hidden.shape[2]
    qkv = torch.bmm(_norm(hidden, attention_norm), attention)
    query, key, value = qkv.view(replicas * batch, len(cosine), 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + torch.bmm(mixed.transpose(1, 2).reshape(replicas, -1, width), projection)
    gate, inner = torch.bmm(_norm(hidden, mlp_norm), up).chunk(2, -1)
    return hidden + torch.bmm(silu(gate) * inner, down)


@cache
def _compiled_block() -> Callable[..., Tensor]:
    return torch.compile(_block, dynamic=False)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight[:, None, :]


class Optimizer:
    """Muon for the matrices and AdamW for the rest, or AdamW for all, each with gradients clipped to a norm of 1."""

    def __init__(self, stack: Stack, *, muon: bool) -> None:
        self.stack, self.muon = stack, muon
        self.first, self.second = torch.zeros_like(stack.flat), torch.zeros_like(stack.flat)
        self.steps = torch.zeros(len(stack.flat), 1, device=stack.flat.device)

    @torch.no_grad()
    def step(self, rows: Tensor, gradients: Tensor, learning_rate: float) -> None:
        """Take an inner step of the replicas `rows`, whose `gradients` have shape (rows, parameters)."""
        gradients = gradients / gradients.norm(dim=1, keepdim=True).clamp_min(1.0)
        first, second, flat = self.first[rows], self.second[rows], self.stack.flat[rows]
        self.steps[rows] += 1
        first_bias, second_bias = 1 - 0.9 ** self.steps[rows], 1 - 0.95 ** self.steps[rows]
        offset = 0
        for (name, size), length in zip(self.stack.sizes.items(), self.stack.lengths, strict=True):
            place = slice(offset, offset := offset + length)
            part, moment, gradient = flat[:, place], first[:, place], gradients[:, place]
            if self.muon and len(size) == 2 and name != "embedding":
                moment.lerp_(gradient, 0.05)
                update = _orthogonalized((gradient * 0.05 + moment * 0.95).view(-1, *size))
                scale = max(1.0, size[1] / size[0]) ** 0.5  # `size` is (inputs, outputs)
                part.mul_(1 - learning_rate * 0.1).add_(update.flatten(1), alpha=-learning_rate * scale)
            else:
                moment.lerp_(gradient, 0.1)
                second[:, place].lerp_(gradient.square(), 0.05)
                denominator = (second[:, place] / second_bias).sqrt_().add_(1e-8)
                rate = learning_rate * (0.25 if self.muon else 1.0)
                part.sub_(moment / first_bias / denominator, alpha=rate)
        self.first[rows], self.second[rows], self.stack.flat[rows] = first, second, flat


def _orthogonalized(matrices: Tensor) -> Tensor:
    transposed = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if transposed else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


@cache
def corpus(device: torch.device, path: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the bytes of (training text, held-out text).

    They are in the file that `corpus.py` has written to `path`. Without a file, they are those of Python's standard
    library, with every 50th file held out.
    """
    if path:
        text = memoryview(lzma.decompress(path.read_bytes()))
        num_held_out = int.from_bytes(text[:8], "little")
        contents = text[8 + num_held_out :], text[8 : 8 + num_held_out]
    else:
        contents = _standard_library()
    training, held_out = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents)
    return training.to(device), held_out.to(device)


def _standard_library() -> tuple[bytes, bytes]:
    root, training, held_out = Path(sysconfig.get_paths()["stdlib"]), list[bytes](), list[bytes]()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            name = hashlib.sha256(str(path.relative_to(root)).encode()).hexdigest()
            (training if int(name, 16) % 50 else held_out).append(path.read_bytes())
    return b"".join(training), b"".join(held_out)
