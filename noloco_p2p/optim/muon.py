"""Muon (Jordan et al. 2024) for hidden matrices: `torch.optim.Muon` with faster orthogonalization.

An update is the momentum of a matrix with all of its singular values moved close to 1, by a Newton-Schulz iteration.
`torch.optim.Muon` computes that in bf16 on every device, one matrix after another and in five iterations. A processor
without bf16 instructions takes eight times as long for such a product as in fp32. This class therefore

* computes in fp32, and in bf16 only on an accelerator that supports it: all CPUs follow one rule, so that two machines
  of a run and a simulation agree;
* computes matrices of one shape in one batched product;
* needs three iterations. The rows of a matrix are first scaled so that its largest singular value is at most 1
  (almost-orthogonal layers, Prach and Lampert 2022, as in Turbo-Muon, arXiv 2512.04632), and each iteration has the
  optimal coefficients given the one before (Polar Express, arXiv 2505.16932). benchmarks/study has the losses.

Hyperparameters, state and checkpoints are those of `torch.optim.Muon`.
"""

# torch's own optimizers step by `torch._foreach_*`, which its stubs do not export.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from noloco_p2p.devices import has_fast_bf16

# x -> a x + b x^3 + c x^5, three times: the odd polynomials nearest to 1 (minimax) on the image of [0.01, 1] under the
# previous ones. Together they move that interval into [0.73, 1.27], and raise smaller singular values 78 times.
COEFFICIENTS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
MARGIN = 1.02  # rounding must not take a singular value beyond 1, where the first quintic is steep
LONG = 1.5  # ratio of the longer side to the shorter one from which iterating on Gram matrices pays
BATCH_ELEMENTS = 1 << 24  # of the matrices in one product, which is copied a few times


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` and Nesterov momentum; see the module.

    The step is scaled to the size of an AdamW step, 0.2 sqrt(longer side) (arXiv 2502.16982). Sharded parameters
    (DTensor) are gathered for the product, on every rank.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in _batches([param for param in group["params"] if param.grad is not None]):
                self._step_batch(batch, lr=float(group["lr"]), decay=group["weight_decay"], momentum=group["momentum"])
        return loss

    def _step_batch(self, params: list[Tensor], *, lr: float, decay: float, momentum: float) -> None:
        """Take one step of parameters that have one shape."""
        gradients = [param.grad for param in params if param.grad is not None]
        for param, gradient in zip(params, gradients, strict=True):
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        dtype = product_dtype(params[0].device)
        orthogonal = orthogonalize(torch.stack([_whole(update).to(dtype) for update in updates]))
        if decay:
            torch._foreach_mul_(params, 1 - lr * decay)
        scale = lr * 0.2 * math.sqrt(max(params[0].shape))
        own = [_placed_as(param, each) for param, each in zip(params, orthogonal, strict=True)]
        torch._foreach_sub_(params, own, alpha=scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Map matrices U S V^T, (num, rows, cols), to approximately U V^T, with singular values near 1, in their dtype."""
    is_tall = matrices.size(-2) > matrices.size(-1)
    gram = torch.bmm(matrices.mT, matrices) if is_tall else torch.bmm(matrices, matrices.mT)  # of the shorter side
    # With the rows divided by the roots of these sums, no singular value is above 1 (Prach and Lampert 2022).
    scale = gram.abs().sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).rsqrt_().div_(MARGIN)
    matrices = matrices * (scale.mT if is_tall else scale)
    gram.mul_(scale).mul_(scale.mT)
    is_long = matrices[0].numel() > LONG * gram[0].numel()
    if is_long and matrices.dtype is torch.float32:
        factor = _whole_factor(gram)
        return torch.bmm(matrices, factor) if is_tall else torch.bmm(factor, matrices)
    polynomial, spare = torch.empty_like(gram), torch.empty_like(matrices)  # new memory for each product is slow
    for iteration, (a, b, c) in enumerate(COEFFICIENTS):
        if iteration:
            torch.bmm(*((matrices.mT, matrices) if is_tall else (matrices, matrices.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        factors = (matrices, polynomial) if is_tall else (polynomial, matrices)
        torch.baddbmm(matrices, *factors, beta=a, out=spare)
        matrices, spare = spare, matrices
    return matrices


def _whole_factor(gram: Tensor) -> Tensor:
    """The matrix by which all iterations together multiply, from the Gram matrices, which are overwritten.

    All products have the size of the shorter side, and commute: a quarter less work if one side is 2.7 times as long.
    In bf16 the rounding errors of a Gram matrix would grow.
    """
    polynomial, product = torch.empty_like(gram), torch.empty_like(gram)
    factor: Tensor | None = None
    for iteration, (a, b, c) in enumerate(COEFFICIENTS):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        if factor is None:
            factor = polynomial.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = torch.baddbmm(factor, polynomial, factor, beta=a)
        if iteration < len(COEFFICIENTS) - 1:
            torch.baddbmm(gram, polynomial, gram, beta=a, out=product)
            torch.baddbmm(product, polynomial, product, beta=a, out=gram)
    assert factor is not None
    return factor


def product_dtype(device: torch.device) -> torch.dtype:
    """bf16 if the accelerator computes in it, and fp32 elsewhere, including all CPUs."""
    return torch.bfloat16 if device.type == "cuda" and has_fast_bf16(device) else torch.float32


def _batches(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one shape and device, as many as go through a product together."""
    alike: defaultdict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
    for param in params:
        alike[param.shape, param.device].append(param)
    for same in alike.values():
        at_once = max(1, BATCH_ELEMENTS // same[0].numel())
        yield from (same[first : first + at_once] for first in range(0, len(same), at_once))


def _whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def _placed_as(param: Tensor, values: Tensor) -> Tensor:
    """This rank's part of `values`, which all ranks have, if `param` is sharded."""
    if not isinstance(param, DTensor):
        return values
    return distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
