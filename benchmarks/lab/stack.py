"""Train many replicas of a small transformer as one batched model, on a CPU or a GPU.

All replicas have the same shape, so each weight matrix is a stack of shape (replicas, rows, columns), and each product
is a batched one. The parameters of the stack are one tensor of shape (replicas, parameters). A row is the flat vector
of a replica, which is what replicas swap.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

VOCABULARY = 256
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
        replicas, batch, tokens = text.shape[0], text.shape[1], text.shape[2] - 1
        inputs, targets = text[..., :-1].reshape(replicas, -1), text[..., 1:].reshape(replicas, -1)
        hidden = torch.gather(weights["embedding"], 1, inputs[..., None].expand(-1, -1, shape.hidden))
        for layer in range(shape.layers):
            qkv = torch.bmm(_norm(hidden, weights[f"{layer}.attention_norm"]), weights[f"{layer}.attention"])
            query, key, value = qkv.view(replicas * batch, tokens, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(self._rotated(query), self._rotated(key), value, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(replicas, batch * tokens, shape.hidden)
            hidden = hidden + torch.bmm(mixed, weights[f"{layer}.projection"])
            gate, up = torch.bmm(_norm(hidden, weights[f"{layer}.mlp_norm"]), weights[f"{layer}.up"]).chunk(2, -1)
            hidden = hidden + torch.bmm(silu(gate) * up, weights[f"{layer}.down"])
        logits = torch.bmm(_norm(hidden, weights["norm"]), weights["embedding"].transpose(1, 2))
        loss = cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none")
        return loss.view(replicas, -1).mean(1)

    def _rotated(self, heads: Tensor) -> Tensor:
        cosine, sine = self.rotary
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
def corpus(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bytes of Python's standard library as (training text, held-out text). Every 50th file is held out."""
    root, parts = Path(sysconfig.get_paths()["stdlib"]), ([], [])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            name = hashlib.sha256(str(path.relative_to(root)).encode()).hexdigest()
            parts[int(name, 16) % 50 == 0].append(path.read_bytes())
    training, held_out = (torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in parts)
    return training.to(device), held_out.to(device)
