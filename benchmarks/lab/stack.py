"""Train many replicas of a Llama as one batched model, on a CPU or a GPU.

A row of the stack is the flat vector of a replica, in the order of the trainer's own model. So production code swaps
slices of rows, and the first weights, the text and the held-out sequences are those of `Material`. Each weight matrix
is a view of shape (replicas, rows, columns), and each product is a batched one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention, silu
from torch.optim.adamw import adamw

from noloco_p2p.optim.inner import learning_rate
from noloco_p2p.optim.muon import orthogonalize, product_dtype
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.spec import TrainSpec
from noloco_p2p.trainer.model import hidden_matrices
from noloco_p2p.trainer.swarm_evaluation import spread

# The parameters of a block that are used together. Those of a group follow each other in the flat vector.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
NORMS = (("input_layernorm",), ("post_attention_layernorm",))
ROWS_AT_ONCE = 1 << 26  # logits of one pass of an evaluation
MUON_SCALE = 0.2  # as in `noloco_p2p.optim.muon.Muon`


class Stack:
    """The weights of `num` replicas with equal first weights, and the forward pass over any rows of them."""

    def __init__(self, material: Material, num: int) -> None:
        spec = self.spec = material.spec.model
        if (
            spec.pretrained
            or spec.lora.rank
            or not spec.tied_embeddings
            or spec.num_kv_heads not in (None, spec.num_heads)
        ):
            raise ValueError("the lab trains only plain Llamas with tied embeddings, and no adapters")
        model = material.model()
        parameters = FlatParameters(model)
        self.named = [(name, param.shape) for name, param in parameters.named]
        self.flat = parameters.read(0, parameters.num_elements).repeat(num, 1)
        self.num_parameters = parameters.num_elements
        chosen = {id(matrix) for matrix in hidden_matrices(model)}
        self.is_matrix = [id(param) in chosen for _, param in parameters.named]
        self.device = self.flat.device
        self._has_bf16 = products_of(self.device) == "bf16"
        self._epsilon = float(model.config.rms_norm_eps)
        length = material.spec.data.sequence_length
        frequencies = model.get_submodule("model.rotary_emb").inv_freq
        assert isinstance(frequencies, Tensor)
        angles = torch.outer(torch.arange(length, device=self.device), frequencies.to(self.device))
        self._cosine, self._sine = angles.cos(), angles.sin()
        places = [group for _ in range(spec.num_layers) for group in (*GROUPS, *NORMS)]
        self._sizes, names = list[int](), iter(self.named)
        for group in (("embed_tokens",), *places, ("norm",)):
            taken = [next(names) for _ in group]
            assert all(part in name for part, (name, _) in zip(group, taken, strict=True)), taken
            self._sizes.append(sum(math.prod(shape) for _, shape in taken))

    def module(self, row: int) -> nn.Module:
        """Return a module whose parameters are views of a row, for production code that reads and writes weights."""
        module, offset = nn.Module(), 0
        for name, shape in self.named:
            size = math.prod(shape)
            view = self.flat[row, offset : offset + size].view(shape)
            module.register_parameter(name.replace(".", "/"), nn.Parameter(view))
            offset += size
        return module

    def losses(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean loss of each of `rows` (replicas, parameters) on `tokens` (replicas, sequences, tokens)."""
        num, batch, length = tokens.shape
        width, heads = self.spec.hidden_size, self.spec.num_heads
        first, *parts, last = rows.split(self._sizes, dim=1)
        table = first.view(num, -1, width)
        offsets = torch.arange(num, device=rows.device).view(-1, 1, 1) * table.shape[1]
        hidden = embedding(tokens + offsets, table.reshape(-1, width)).view(num, -1, width)
        cosine, sine = self._cosine[:length], self._sine[:length]
        for start in range(0, len(parts), len(GROUPS) + len(NORMS)):
            attention, output, gate_up, down, before, between = parts[start : start + 6]
            qkv = _product(self._norm(hidden, before), attention).view(num * batch, length, 3, heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
            if self.device.type == "cpu":  # whose attention is slower in bf16
                query, key, value = query.float(), key.float(), value.float()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + _product(mixed.transpose(1, 2).reshape(num, -1, width), output)
            gate, up = _product(self._norm(hidden, between), gate_up).chunk(2, -1)
            hidden = hidden + _product(silu(gate) * up, down)
        hidden = self._norm(hidden, last).view(num, batch, length, width)[:, :, :-1].reshape(num, -1, width)
        logits = _product(hidden, first)
        losses = cross_entropy(logits.flatten(0, 1).float(), tokens[:, :, 1:].flatten(), reduction="none")
        return losses.view(num, -1).mean(1)

    def gradients(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the gradients of `rows`, with the same shape."""
        rows = rows.detach().requires_grad_()
        with self._products():
            (gradients,) = torch.autograd.grad(self.losses(rows, tokens.to(self.device)).sum(), rows)
        return gradients

    @torch.no_grad()
    def evaluate(self, rows: Tensor, batches: Sequence[Tensor]) -> list[float]:
        """Return the loss of each of `rows` on held-out sequences. Each token counts once."""
        total, num_tokens = torch.zeros(len(rows), device=self.device), 0
        with self._products():
            for batch in batches:
                at_once = max(1, ROWS_AT_ONCE // (batch.numel() * self.spec.vocab_size))
                parts = [
                    self.losses(some, batch.to(self.device).expand(len(some), -1, -1)) for some in rows.split(at_once)
                ]
                total += torch.cat(parts) * batch[:, 1:].numel()
                num_tokens += batch[:, 1:].numel()
        return (total / num_tokens).tolist()

    def judge(self, rows: Tensor, batches: Sequence[Tensor]) -> dict[str, Any]:
        """Compute the same fields of a result as `noloco_p2p.simulate.result.judge`."""
        mean, losses = rows.mean(0), self.evaluate(rows, batches)
        return {
            "num_replicas": len(rows),
            "num_parameters": self.num_parameters,
            "loss": sum(losses) / len(losses),
            "worst_loss": max(losses),
            "merged_loss": self.evaluate(mean[None], batches)[0],
            "spread": spread(list(rows), mean),
        }

    def _products(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._has_bf16)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self._epsilon) * weight[:, None, :]


def products_of(device: torch.device) -> str:
    """Return the dtype of products of matrices: bf16 where that is faster. Weights and everything else are fp32."""
    return "bf16" if device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() else "fp32"


def _product(hidden: Tensor, weights: Tensor) -> Tensor:
    """Apply a linear layer of each replica. `weights` has shape (replicas, outputs * inputs)."""
    return torch.bmm(hidden, weights.view(len(hidden), -1, hidden.shape[-1]).mT)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class StackOptimizer:
    """The inner optimizer of `train`, as `InnerStep` takes its steps, for all replicas of a stack."""

    def __init__(self, stack: Stack, train: TrainSpec) -> None:
        self._train = train
        self._first, self._second = torch.zeros_like(stack.flat), torch.zeros_like(stack.flat)
        self._steps = [torch.zeros((), device=stack.device) for _ in stack.flat]
        self._for_adamw, self._for_muon, offset = list[slice](), defaultdict[torch.Size, list[slice]](list), 0
        for (_, shape), is_matrix in zip(stack.named, stack.is_matrix, strict=True):
            place = slice(offset, offset := offset + math.prod(shape))
            if is_matrix and train.inner_optimizer == "muon":
                self._for_muon[shape].append(place)
            elif self._for_adamw and self._for_adamw[-1].stop == place.start:
                self._for_adamw[-1] = slice(self._for_adamw[-1].start, place.stop)
            else:
                self._for_adamw.append(place)
        assert not train.weight_decay, "the lab has no weight decay, like the paper"

    def forget(self, number: int) -> None:
        """Drop the moments of a replica, which a newcomer does not fetch."""
        for state in (self._first[number], self._second[number], self._steps[number]):
            state.zero_()

    @torch.no_grad()
    def step(self, rows: Tensor, numbers: Sequence[int], gradients: Tensor, progress: Iterable[float]) -> None:
        """Take an inner step in place of `rows`, copies of the replicas `numbers`, each at its own progress."""
        train = self._train
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients = gradients * (train.clip_norm / (norms + 1e-6)).clamp_max(1.0)
        rates = [learning_rate(train, each) for each in progress]
        for row, number, gradient, rate in zip(rows, numbers, gradients, rates, strict=True):
            first, second = self._first[number], self._second[number]
            adamw(
                [row[place] for place in self._for_adamw],
                [gradient[place] for place in self._for_adamw],
                [first[place] for place in self._for_adamw],
                [second[place] for place in self._for_adamw],
                [],
                [self._steps[number].clone() for _ in self._for_adamw],
                fused=True,
                amsgrad=False,
                beta1=train.adam_beta1,
                beta2=train.adam_beta2,
                lr=rate,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )
            self._steps[number] += 1
        self._step_matrices(rows, numbers, gradients, torch.tensor(rates, device=rows.device).view(-1, 1, 1))

    def _step_matrices(self, rows: Tensor, numbers: Sequence[int], gradients: Tensor, rates: Tensor) -> None:
        momentum, chosen = self._train.muon_momentum, list(numbers)
        for shape, places in self._for_muon.items():
            own = torch.cat([gradients[:, place] for place in places]).view(-1, *shape)
            buffers = torch.cat([self._first[chosen, place] for place in places]).view(-1, *shape)
            buffers.lerp_(own, 1 - momentum)
            updates = orthogonalize(own.lerp_(buffers, momentum).to(product_dtype(rows.device)))
            updates = updates.to(rows.dtype).mul_(MUON_SCALE * math.sqrt(max(shape)))
            for place, update, buffer in zip(
                places, updates.chunk(len(places)), buffers.chunk(len(places)), strict=True
            ):
                rows[:, place] -= (update * rates).flatten(1)
                self._first[chosen, place] = buffer.flatten(1)
