"""Keep the slow weights and the outer momentum of one replica, and take its outer steps.

This module does not use the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from noloco_p2p.codec import CHUNK_ELEMENTS, chunk_bounds
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Correction, Received
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.optim.gates import LIMITS, GateLimits, GradientScales
from noloco_p2p.optim.mixing import CLOSING, Agreement, gradient_weight
from noloco_p2p.optim.noloco import outer_step
from noloco_p2p.outer.chunk_filter import UNSCALED, ChunkFilter, Clipped, FilterVerdict
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.staging import Staging, pin
from noloco_p2p.outer.state_checks import OUTER_MOMENTUM, SLOW_WEIGHTS, check_vectors
from noloco_p2p.spec import OuterSpec

SPREAD_CHUNKS = 16  # fewer than twice this many chunks are sampled to estimate the spread, which takes milliseconds


class OuterState:
    """The slow weights of one replica and, if alpha is above 0, its outer momentum, as flat fp32 vectors on the CPU.

    The model may be on any one device and have any floating-point dtype. Its weights become the initial slow weights.
    All steps work chunk by chunk, so they never allocate another vector of the model's size.
    """

    def __init__(self, model: nn.Module | FlatParameters, outer: OuterSpec, *, limits: GateLimits = LIMITS) -> None:
        self.parameters = model if isinstance(model, FlatParameters) else FlatParameters(model)
        self.layout = self.parameters.layout()
        self.num_elements = self.parameters.num_elements
        self.slow_weights = torch.empty(self.num_elements)
        self.outer_momentum = torch.zeros(self.num_elements) if outer.keeps_momentum else None
        self.spread: float | None = None  # distance to the last partner divided by 2^0.5, relative to this peer's norm
        self._outer = outer
        self._bounds = chunk_bounds(self.num_elements)
        self.gating = ChunkFilter([param.numel() for _, param in self.parameters.named], limits)
        for start, stop in self._bounds:
            self.slow_weights[start:stop] = self.parameters.read(start, stop)
        self.parameters.flush()
        self._staging = Staging(self.parameters.device)
        for vector in self.tensors().values():
            pin(vector, self.parameters.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return, without copying them, the vectors that a newcomer takes over with `take`."""
        momentum = {} if self.outer_momentum is None else {OUTER_MOMENTUM: self.outer_momentum}
        return {SLOW_WEIGHTS: self.slow_weights, **momentum}

    def sections(self) -> dict[SectionName, Tensor]:
        """Return the vectors that are sent during a round."""
        return {SectionName[name.upper()]: vector for name, vector in self.tensors().items()}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the vectors as `take_vectors` does, and set the model's weights to the slow weights."""
        self.take_vectors(tensors)
        for start, stop in self._bounds:
            self.parameters.write(start, self.slow_weights[start:stop])
        self.parameters.flush()

    def take_vectors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the slow weights and the momentum from `tensors`. Other entries are ignored.

        Raises CheckpointError, before anything changes, if the state belongs to another model or contains non-finite
        numbers.
        """
        check_vectors(tensors, {name: own.numel() for name, own in self.tensors().items()})
        for name, own in self.tensors().items():
            own.copy_(tensors[name])

    def outer_gradient(self) -> Iterator[Tensor]:
        """Yield fast - slow, chunk by chunk, on the model's device.

        Each chunk reuses the memory of the previous one.
        """
        gradient = torch.empty(CHUNK_ELEMENTS, device=self.parameters.device)
        for start, stop in self._bounds:
            yield self.parameters.minus(start, self.slow_weights[start:stop], out=gradient)
        self.parameters.flush()

    def judge(self, gradient: SectionPair | None, agreed: Agreement) -> FilterVerdict:
        """Judge whether a partner's outer gradient may be applied, and how to scale it. This changes nothing.

        `gradient` is None if it has not arrived. `agreed` holds the terms on which the partners mix.
        """
        return self.gating.judge(gradient, times_longer=agreed.partner_share / max(1e-6, 1 - agreed.partner_share))

    @torch.no_grad()
    def judge_swap(self, received: Received) -> FilterVerdict:
        """Judge everything that was received in a swap, as `judge` does.

        This changes only the history of the gates.
        """
        gradient = received.sections.get(SectionName.OUTER_GRADIENT)
        weights = received.sections.get(SectionName.SLOW_WEIGHTS)
        refusal = self.gating.judge_weights(received.partner, weights, gradient) if weights else ""
        return FilterVerdict(refusal) if refusal else self.judge(gradient, received.agreed)

    @torch.no_grad()
    def step(
        self, received: Received | None, *, scales: GradientScales = UNSCALED, is_closing: bool = False
    ) -> Clipped:
        """Take the outer step, and set the model's weights to the new slow weights. Returns the clipping statistics.

        If `received` is None, this is a solo step. Otherwise, half-differences are added to the peer's own exact
        vectors, so encoding errors cannot move the mean of a pair. `scales` are the factors for the outer gradients,
        which come from `judge`. The gates clip offsets before they are applied. If `is_closing` is true, nobody trains,
        and both partners move to the midpoint. On an accelerator, the next and the previous chunk are copied while the
        CPU works on the current one.
        """
        outer = CLOSING if is_closing else self._outer
        weight = received.agreed.weight if received else 1.0
        gradient_share = gradient_weight(outer, received.agreed) if received else 1.0
        gated = self.gating.open_step(received, scales)
        self._staging.begin()
        gradients_here = self._staging.chunks(self._gradient, [stop - start for start, stop in self._bounds])
        apart, length, sampled = 0.0, 0.0, max(1, len(self._bounds) // SPREAD_CHUNKS)
        for index, ((start, stop), gradient) in enumerate(zip(self._bounds, gradients_here, strict=True)):
            slow = self.slow_weights[start:stop]
            momentum = None if self.outer_momentum is None else self.outer_momentum[start:stop]
            gated.own_gradient(index, gradient)
            if (difference := gated.gradient(index)) is not None:
                gradient.add_(difference, alpha=gradient_share)
            if momentum is not None and (difference := gated.offset(SectionName.OUTER_MOMENTUM, index)) is not None:
                momentum.add_(difference, alpha=weight)
            offset = gated.offset(SectionName.SLOW_WEIGHTS, index)
            if offset is not None and index % sampled == 0:
                apart, length = apart + float(offset.square().sum()), length + float(slow.square().sum())
            outer_step(slow, momentum, gradient, offset, alpha=outer.alpha, beta=outer.beta, gamma=outer.gamma * weight)
            with self._staging.going_up():
                self.parameters.write(start, slow)
        self.parameters.flush()
        if length:
            # If replicas are at a distance s from their mean, two of them are 2^0.5 s apart. `offset` is half of that.
            self.spread = (2 * apart / length) ** 0.5
        return gated.close()

    @torch.no_grad()
    def correct(self, correction: Correction, *, scales: GradientScales = UNSCALED) -> None:
        """Apply a partner's outer gradient that arrived after the boundary.

        This adds `beta h` to the slow weights, the fast weights and the momentum.
        """
        beta = self._outer.beta * gradient_weight(self._outer, correction.agreed)
        vectors = [*self.tensors().values()]
        for start, late in self.gating.late_steps(correction.gradient, beta=beta, scales=scales):
            for vector in vectors:
                vector[start : start + len(late)].add_(late)
            self.parameters.add(start, late)
        self.parameters.flush()

    def _gradient(self, index: int, memory: Tensor) -> Tensor:
        start, stop = self._bounds[index]
        return self.parameters.minus(start, self.slow_weights[start:stop], out=memory)
