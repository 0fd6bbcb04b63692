"""Create the inner optimizer: AdamW, or Muon for matrices and AdamW for the rest. Compute its learning rate.

AdamW with moments of 8 bits (arXiv 2110.02861) is that of bitsandbytes (extra `lowmem`).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from noloco_p2p.errors import ModelError
from noloco_p2p.optim.muon import Muon
from noloco_p2p.spec import TrainSpec

# For 1.3M parameters on a CPU, a fused step takes 1.1 ms, a plain one 3.2 ms and a foreach one 4.5 ms.
FUSED_DEVICES = frozenset({"cpu", "cuda"})


def make_inner_optimizers(
    parameters: Iterable[Parameter], train: TrainSpec, *, matrices: Collection[Tensor]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers for `train.inner_optimizer`. Each parameter belongs to exactly one of them.

    `matrices` are the parameters that Muon may train. They are 2-D and exclude the embedding and the head (see
    `trainer.model.hidden_matrices`). Muon's step is scaled to the size of an AdamW step (0.2 sqrt(longer side), arXiv
    2502.16982), so that one learning rate suits both. Everything else is the same as in `make_inner_optimizer`.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if train.inner_optimizer != "muon":
        return [make_inner_optimizer(trainable, train)]
    chosen = {id(matrix) for matrix in matrices}
    for_muon = [parameter for parameter in trainable if id(parameter) in chosen]
    rest = [parameter for parameter in trainable if id(parameter) not in chosen]
    if not for_muon:
        raise ValueError(
            "train.inner_optimizer is 'muon', but the model has no matrix that Muon can train; use 'adamw'"
        )
    muon = Muon(
        for_muon,
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        momentum=train.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, make_inner_optimizer(rest, train)] if rest else [muon]


def make_inner_optimizer(parameters: Iterable[Parameter], train: TrainSpec) -> torch.optim.Optimizer:
    """Return an AdamW optimizer for the trainable `parameters`. Vectors (norms and biases) have no weight decay.

    The learning rate is the peak of the schedule until the caller sets `group["lr"]` to `learning_rate(train,
    progress)`, which it must do before every step. The caller also clips gradients. Raises ValueError if no parameter
    is trainable, and ModelError if the optimizer needs a package that is missing.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: requires_grad is False for all of them")
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2 or not train.weight_decay]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2 and train.weight_decay]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (train.adam_beta1, train.adam_beta2)
    if train.inner_optimizer == "adamw8bit":
        library = bitsandbytes("train.inner_optimizer 'adamw8bit'")
        return library.optim.AdamW8bit(groups, lr=train.learning_rate, betas=betas)
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=betas,
        fused=all(parameter.device.type in FUSED_DEVICES for parameter in trainable) or None,
    )


def bitsandbytes(what: str) -> Any:
    """Import bitsandbytes, or raise ModelError, which says that `what` requires it."""
    sys.modules.setdefault("kernels", None)  # pyright: ignore[reportArgumentType] - with it, code of the hub would run
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # otherwise it tells that there is no `kernels`
    try:
        import bitsandbytes
    except ImportError:
        raise ModelError(f"{what} requires the package bitsandbytes: pip install bitsandbytes") from None
    finally:
        log.setLevel(level)
    return bitsandbytes


def learning_rate(train: TrainSpec, progress: float) -> float:
    """Return the learning rate of the inner step that starts at `progress`, a fraction of the run's schedule.

    The first step has progress 0, and the schedule ends at 1. After that, the learning rate stays at the minimum. The
    warm-up covers warmup_steps / total_steps of the schedule, and its first step gets 1 / warmup_steps of the peak
    rather than 0. Raises ValueError if `progress` is negative or NaN.
    """
    if not progress >= 0:
        raise ValueError(f"progress, as a fraction of the schedule, must be at least 0, but it is {progress}")
    warmup = train.warmup_steps / train.total_steps
    if progress < warmup:
        return train.learning_rate * min(1.0, progress / warmup + 1 / train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
    return train.learning_rate * (train.min_learning_rate + (1 - train.min_learning_rate) * cosine)
