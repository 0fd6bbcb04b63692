"""Buffers: running statistics and the like. They are each peer's own, and do not travel.

Partners whose running statistics differ a little swap without harm, as training does not read them. A newcomer begins
with the model's own. After a merge take them anew from data (`torch.optim.swa_utils.update_bn`): a mean of statistics
is not the statistics of a mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that `state_dict` holds, by name, once each: the tensors themselves, not copies."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def restore_buffers(buffers: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy over. Raises CheckpointError when names or shapes are others."""
    for name, buffer in buffers.items():
        if name not in saved or saved[name].shape != buffer.shape:
            raise CheckpointError(f"the checkpoint has no buffer {name} {tuple(buffer.shape)}: it is of another model")
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(saved[name])
