"""The inner optimizer's momentum as a section of a swap: one flat vector, averaged with the partner's.

It is the first moment of each parameter: Muon and SGD call it momentum_buffer, Adam and AdamW exp_avg. It travels as it
was when the round began, and half of the distance to the partner's is added to the one of now, which has gone on since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_p2p.codec import Scratch, chunk_bounds
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.outer.chunk_filter import ChunkFilter
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.optimizer_state import InnerState
from noloco_p2p.outer.staging import pin

FIELDS = frozenset({"momentum_buffer", "exp_avg"})


class InnerMomentum:
    """`vector`: the momentum as `copy` found it, flat and fp32 on the CPU, in the layout of the parameters; 0 where a
    parameter has none. 4 bytes a parameter."""

    def __init__(self, inner: InnerState, parameters: FlatParameters) -> None:
        self.vector = torch.zeros(parameters.num_elements)
        self._inner = inner
        self._parameters = parameters
        pin(self.vector, parameters.device)

    @torch.no_grad()
    def copy(self) -> None:
        """`vector` becomes the momentum of now."""
        moments = self._moments()
        for name, place in self._parameters.by_name(self.vector).items():
            if name in moments:
                place.copy_(moments[name])
            else:
                place.zero_()

    @torch.no_grad()
    def mix(self, pair: SectionPair, gating: ChunkFilter, *, weight: float) -> None:
        """Add `weight` times the half-difference of the two to the optimizer's own momentum; uses `vector` up.

        Where one side has no momentum yet, as before its first step, neither side changes: the longer of the two is
        shortened to the other first.
        """
        scratch = Scratch()
        for index, (start, stop) in enumerate(chunk_bounds(len(self.vector))):
            self.vector[start:stop] = gating.half_momentum(pair, index, scratch=scratch)
        moments = self._moments()
        for name, half in self._parameters.by_name(self.vector).items():
            if name in moments:
                moments[name].add_(half.to(moments[name].device), alpha=weight)

    def _moments(self) -> dict[str, Tensor]:
        """By the name of the parameter; the optimizer's own memory."""
        keyed = ((key.partition("/"), moment) for key, moment in self._inner.state().items())
        return {name: moment for (field, _, name), moment in keyed if field in FIELDS}
