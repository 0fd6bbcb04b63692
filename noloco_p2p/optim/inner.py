"""Create the inner optimizer of the fast weights: AdamW, or Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

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
    if train.inner_optimizer == "adamw":
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
    is trainable.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: requires_grad is False for all of them")
    return torch.optim.AdamW(
        _groups(trainable, weight_decay=train.weight_decay),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        fused=all(parameter.device.type in FUSED_DEVICES for parameter in trainable) or None,
    )


def _groups(parameters: list[Parameter], *, weight_decay: float) -> list[dict[str, object]]:
    """Return one group of parameters, or two if matrices have weight decay and vectors do not."""
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, object]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
