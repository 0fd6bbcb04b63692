"""One replica's slow weights and outer momentum, and what a round does to them and to the model. Knows no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from noloco_p2p.codec import CHUNK_ELEMENTS, Scratch, chunk_bounds
from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Correction, Received
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.optim.noloco import outer_step
from noloco_p2p.spec import RunSpec
from noloco_p2p.train.flat import FlatParameters

SLOW_WEIGHTS, OUTER_MOMENTUM = "slow_weights", "outer_momentum"
SPREAD_CHUNKS = 16  # of the slow weights, or twice as many: an estimate takes milliseconds, and all of them would not


class OuterState:
    """`slow_weights`, `outer_momentum`: flat fp32 vectors on the CPU, 8 bytes a parameter.

    The model may be on any one device and of any floating dtype; its weights are the slow weights at the start. All
    steps go chunk by chunk: there is never a second vector of the model's size.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = FlatParameters(model)
        self.layout = self.parameters.layout()
        self.num_elements = self.parameters.num_elements
        self.slow_weights = torch.empty(self.num_elements)
        self.outer_momentum = torch.zeros(self.num_elements)
        self.spread: float | None = None  # distance to the last partner over 2^0.5, as a share of the own norm
        self._bounds = chunk_bounds(self.num_elements)
        for start, stop in self._bounds:
            self.slow_weights[start:stop] = self.parameters.read(start, stop)

    def tensors(self) -> dict[str, Tensor]:
        """What a newcomer takes (`take`): the vectors themselves, not copies."""
        return {SLOW_WEIGHTS: self.slow_weights, OUTER_MOMENTUM: self.outer_momentum}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Slow weights and momentum become those of `tensors`; the model's weights become the slow weights.

        Raises CheckpointError, before anything is changed, for another model's state or numbers that are not finite.
        """
        for name, own in self.tensors().items():
            if name not in tensors or tensors[name].shape != own.shape:
                raise CheckpointError(f"a state without {name} of {own.numel()} numbers: it is of another model")
            if not bool(torch.isfinite(tensors[name]).all()):
                raise CheckpointError(f"a state whose {name} is not finite")
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
        for start, stop in self._bounds:
            self.parameters.write(start, self.slow_weights[start:stop])

    def outer_gradient(self) -> Iterator[Tensor]:
        """fast - slow, chunk by chunk, where the model lies; each in the memory of the one before."""
        gradient = torch.empty(CHUNK_ELEMENTS, device=self.parameters.device)
        for start, stop in self._bounds:
            yield self.parameters.minus(start, self.slow_weights[start:stop], out=gradient)

    @torch.no_grad()
    def step(
        self, received: Received | None, *, alpha: float, beta: float, gamma: float, gradient_weight: float = 1.0
    ) -> None:
        """The outer step; None = alone. The model's weights become the new slow weights.

        Own exact vectors plus half-differences, so that coding errors cannot move a pair's mean; `gradient_weight` is
        of that of the outer gradients, the others have the weight that the swap agreed on.
        """
        weight = received.agreed.weight if received else 1.0
        sections = received.sections if received else {}
        gradients = sections.get(SectionName.OUTER_GRADIENT)
        momenta = sections.get(SectionName.OUTER_MOMENTUM)
        weights = sections.get(SectionName.SLOW_WEIGHTS)
        scratch, difference = Scratch(), torch.empty(CHUNK_ELEMENTS, device=self.parameters.device)
        apart, length, sampled = 0.0, 0.0, max(1, len(self._bounds) // SPREAD_CHUNKS)
        for index, (start, stop) in enumerate(self._bounds):
            slow, momentum = self.slow_weights[start:stop], self.outer_momentum[start:stop]
            gradient = self.parameters.minus(start, slow, out=difference).cpu()
            if gradients:
                gradient.add_(gradients.half_difference(index, scratch=scratch), alpha=gradient_weight)
            if momenta:
                momentum.add_(momenta.half_difference(index, scratch=scratch), alpha=weight)
            offset = weights.half_difference(index, scratch=scratch) if weights else None
            if offset is not None and index % sampled == 0:
                apart, length = apart + float(offset.square().sum()), length + float(slow.square().sum())
            outer_step(slow, momentum, gradient, offset, alpha=alpha, beta=beta, gamma=gamma * weight)
            self.parameters.write(start, slow)
        if weights:
            # With replicas scattered by s around their mean, two of them are 2^0.5 s apart, and `offset` is half that.
            self.spread = (2 * apart / max(length, 1e-30)) ** 0.5

    @torch.no_grad()
    def correct(self, correction: Correction, *, beta: float) -> None:
        """The partner's gradient came after the boundary: `beta h` goes into slow, fast weights and momentum."""
        for start, late in late_steps(correction.gradient, beta=beta):
            for vector in (self.slow_weights, self.outer_momentum):
                vector[start : start + len(late)].add_(late)
            self.parameters.add(start, late)


def late_steps(gradient: SectionPair, *, beta: float) -> Iterator[tuple[int, Tensor]]:
    """(place of its first element, `beta h`) of each chunk of a partner's gradient that came after the boundary.

    fp32 on the CPU, each in the memory of the one before.
    """
    scratch = Scratch()
    for index, (start, _) in enumerate(chunk_bounds(gradient.coding.plan.num_elements)):
        yield start, gradient.half_difference(index, scratch=scratch).mul_(beta)


def progress_after(progress: float, received: Received, *, inner_steps: int, spec: RunSpec) -> float:
    """Where a peer stands on the schedule after a swap.

    progress: own, at the end of a round of `inner_steps`. The two move as far as each other: by at most one round of
    the length that both agreed on, and less where the partner's vectors have less weight. What a partner told is
    bounded by the spec.
    """
    outer, total = spec.outer, spec.train.total_steps
    agreed = min(received.agreed.inner_steps, outer.max_inner_steps) if outer.is_auto else inner_steps
    at_most = received.agreed.weight * agreed / total
    return met_progress(progress, received.partner_progress, round_progress=inner_steps / total, at_most=at_most)


def met_progress(progress: float, partner_progress: float, *, round_progress: float, at_most: float) -> float:
    """Partners move towards each other.

    progress: own, at the end of a round of `round_progress`; partner_progress: the partner's, when it opened its round.
    """
    apart = (partner_progress - (progress - round_progress)) / 2
    return progress + max(-at_most, min(at_most, apart))
