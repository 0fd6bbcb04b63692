"""Implement Muon (Jordan et al. 2024) for hidden matrices: `torch.optim.Muon` with faster orthogonalization.

An update is the momentum of a matrix after a Newton-Schulz iteration has moved all its singular values close to 1.
`torch.optim.Muon` computes this in bf16 on every device, one matrix after another, with five iterations. On a processor
without bf16 instructions, a matrix product in bf16 takes eight times as long as one in fp32. This class therefore
differs in three ways:

* It computes in fp32, except on an accelerator that supports bf16. All CPUs use fp32, so that two machines in a run, or
  a simulation of the run, get the same results.
* It combines matrices of the same shape into batched products.
* It needs only three iterations. It first scales the rows of a matrix so that its largest singular value is at most 1
  (almost-orthogonal layers, Prach and Lampert 2022, as in Turbo-Muon, arXiv 2512.04632). Each iteration then uses the
  coefficients that are optimal after the previous iteration (Polar Express, arXiv 2505.16932). On
  the toy, its loss is 0.1 to 0.3 % lower than that of torch's fp32 version, which is within the noise of three seeds.

The hyperparameters, the state and the checkpoints are the same as for `torch.optim.Muon`.
"""

# This file uses `torch._foreach_*`, as torch's own optimizers do. The stubs of torch do not export these functions.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from noloco_p2p.devices import has_fast_bf16

# Each row maps x to a x + b x^3 + c x^5. These odd polynomials are closest to 1 (minimax) on the interval to which the
# previous rows map [0.01, 1]. Together they map [0.01, 1] into [0.73, 1.27] and raise smaller values by a factor of 78.
COEFFICIENTS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
MARGIN = 1.02  # keeps rounding from moving a singular value above 1, where the first quintic is steep
LONG = 1.5  # ratio of the longer side to the shorter one above which iterating on Gram matrices is faster
BATCH_ELEMENTS = 1 << 24  # largest total size of the matrices in one product, because they are copied a few times


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, Nesterov momentum and faster orthogonalization.

    The step is scaled to the size of an AdamW step, which is 0.2 sqrt(longer side) (arXiv 2502.16982). Sharded
    parameters (DTensor) are gathered on every rank for the product.
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
        """Take one step for parameters that have the same shape."""
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
    """Map matrices U S V^T to approximately U V^T, with singular values near 1.

    `matrices` has shape (num, rows, cols). The result has the same shape and dtype.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    gram = torch.bmm(matrices.mT, matrices) if is_tall else torch.bmm(matrices, matrices.mT)  # of the shorter side
    # Dividing the rows by the roots of these sums makes all singular values at most 1 (Prach and Lampert 2022).
    scale = gram.abs().sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).rsqrt_().div_(MARGIN)
    matrices = matrices * (scale.mT if is_tall else scale)
    gram.mul_(scale).mul_(scale.mT)
    is_long = matrices[0].numel() > LONG * gram[0].numel()
    if is_long and matrices.dtype is torch.float32:
        factor = _whole_factor(gram)
        return torch.bmm(matrices, factor) if is_tall else torch.bmm(factor, matrices)
    polynomial, spare = torch.empty_like(gram), torch.empty_like(matrices)  # allocating these for each product is slow
    for iteration, (a, b, c) in enumerate(COEFFICIENTS):
        if iteration:
            torch.bmm(*((matrices.mT, matrices) if is_tall else (matrices, matrices.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        factors = (matrices, polynomial) if is_tall else (polynomial, matrices)
        torch.baddbmm(matrices, *factors, beta=a, out=spare)
        matrices, spare = spare, matrices
    return matrices


def _whole_factor(gram: Tensor) -> Tensor:
    """Return the matrix that applies all iterations at once. The Gram matrices in `gram` are overwritten.

    All products are square, with the length of the shorter side, and they commute. If one side is 2.7 times as long as
    the other, this saves a quarter of the work of separate iterations. It is not used in bf16, where the rounding
    errors of a Gram matrix would grow.
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


def flops(rows: int, cols: int) -> float:
    """Return the number of flops of the products with which a step orthogonalizes a matrix."""
    short, long = sorted((rows, cols))
    if long > LONG * short:  # the products of `_whole_factor` are square, and two are not
        return 4.0 * short**2 * long + 18.0 * short**3
    return len(COEFFICIENTS) * (4.0 * short**2 * long + 2.0 * short**3)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 for an accelerator that computes in bf16, and fp32 for all other devices, including all CPUs."""
    return torch.bfloat16 if device.type == "cuda" and has_fast_bf16(device) else torch.float32


def _batches(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of parameters with the same shape and device, each small enough for one product."""
    alike: defaultdict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
    for param in params:
        alike[param.shape, param.device].append(param)
    for same in alike.values():
        at_once = max(1, BATCH_ELEMENTS // same[0].numel())
        yield from (same[first : first + at_once] for first in range(0, len(same), at_once))


def _whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def _placed_as(param: Tensor, values: Tensor) -> Tensor:
    """Return `values`, or only this rank's part of them if `param` is sharded. All ranks have the same `values`."""
    if not isinstance(param, DTensor):
        return values
    return distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
