"""Rank 0's inner step, which all ranks take together, and what the other ranks do when they are told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.optimizer_state import flatten_optimizers, restore_optimizers
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.trainer.compute import Compute, switch_on
from noloco_p2p.trainer.evaluate import evaluating
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, causal_lm_logits
from noloco_p2p.trainer.ranks import Order, Ranks, Verb, payload_text, text_payload
from noloco_p2p.trainer.sharded import WINDOW_ELEMENTS, LedVector, ShardedVector, shard
from noloco_p2p.trainer.start import load_start

NO_SEED = -1


class LeadingStep(InnerStep):
    """The inner step of rank 0 over a sharded model: each part of it is an order to the others first.

    A batch is that of all ranks; each takes its rows. State goes through whole vectors, so that a checkpoint does not
    know by how many ranks it was written.
    """

    def __init__(self, model: nn.Module, train: TrainSpec, compute: Compute, ranks: Ranks) -> None:
        super().__init__(model, train, compute)
        self._ranks = ranks

    def fit(self, batch: Tensor) -> int:
        self._ranks.order(Verb.FIT, payload=batch)
        return super().fit(batch)

    def backward(self, batch: Tensor, *, seed: int | None = None) -> Tensor:
        self._ranks.order(Verb.BACKWARD, NO_SEED if seed is None else seed, payload=batch)
        return super().backward(batch, seed=seed)

    def update(self, *, progress: float) -> None:
        self._ranks.order(Verb.UPDATE, progress)
        super().update(progress=progress)

    def forget(self) -> None:
        self._ranks.order(Verb.FORGET)
        super().forget()

    @contextmanager
    def together(self) -> Iterator[None]:
        def announce(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._ranks.order(Verb.FORWARD, payload=kwargs["input_ids"])

        hook = self.model.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU, in new memory."""
        flat = super().state()
        whole = {key: value for key, value in flat.items() if not isinstance(value, DTensor)}
        for number, (field, names) in enumerate(sharded_fields(self), start=1):
            vector = self._vector(number)
            values = torch.empty(vector.num_elements)
            window = torch.empty(min(WINDOW_ELEMENTS, vector.num_elements), device=self.device)
            for start in range(0, vector.num_elements, WINDOW_ELEMENTS):
                stop = min(start + WINDOW_ELEMENTS, vector.num_elements)
                values[start:stop] = vector.read(start, window[: stop - start])
            parts = values.split([self.trainable[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                whole[f"{field}/{name}"] = part.view(self.trainable[name].shape)
        return whole

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            name = key.partition("/")[2]
            if name not in self.trainable or (tensor.ndim and tensor.shape != self.trainable[name].shape):
                raise CheckpointError(f"optimizer state {key} {tuple(tensor.shape)} belongs to no parameter")
        held = {key: None if tensor.ndim else float(tensor) for key, tensor in tensors.items()}
        self._ranks.order(Verb.RESTORE, payload=text_payload(json.dumps(held).encode()))
        make_room(self, held)
        for number, (field, names) in enumerate(sharded_fields(self), start=1):
            vector, start = self._vector(number), 0
            for name in names:
                for part in tensors[f"{field}/{name}"].reshape(-1).split(WINDOW_ELEMENTS):
                    vector.write(start, part)
                    start += part.numel()

    def _vector(self, number: int) -> LedVector:
        return LedVector(vector_of(self, self._ranks, number), self._ranks, number=number)


def follow(ranks: Ranks, settings: PeerSettings) -> None:
    """The life of every rank but the first: does what it is told until it is told to stop."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    inner: InnerStep | None = None
    while (order := ranks.receive()).verb is not Verb.STOP:
        if order.verb is Verb.BUILD:
            assert order.payload is not None
            inner = build_follower(json.loads(payload_text(order.payload)), ranks, settings)
        else:
            assert inner is not None, order.verb
            _obey(order, inner, ranks)


def build_follower(spec: dict[str, Any], ranks: Ranks, settings: PeerSettings) -> InnerStep:
    run = TrainerSpec.from_dict(spec, origin="rank 0")
    model = build_model(run.model, sequence_length=run.data.sequence_length, folders=settings.models)
    load_start(model, run.model.start, state_dir=settings.state_dir)
    compute = Compute.of(settings, rank=ranks.rank, num_ranks=ranks.size)
    switch_on(model, compute)
    shard(model, ranks, compute)
    return InnerStep(model, run.train, compute)


def _obey(order: Order, inner: InnerStep, ranks: Ranks) -> None:
    number, payload = order.numbers[0], order.payload
    match order.verb:
        case Verb.FIT if payload is not None:
            inner.fit(payload)
        case Verb.BACKWARD if payload is not None:
            inner.backward(payload, seed=None if number == NO_SEED else int(number))
        case Verb.UPDATE:
            inner.update(progress=number)
        case Verb.FORGET:
            inner.forget()
        case Verb.FORWARD if payload is not None:
            with evaluating(inner.model), torch.no_grad():
                causal_lm_logits(inner.model, payload.to(ranks.device))
        case Verb.READ:
            vector_of(inner, ranks, int(number)).send(int(order.numbers[1]), int(order.numbers[2]))
        case Verb.WRITE:
            vector_of(inner, ranks, int(number)).receive(int(order.numbers[1]), int(order.numbers[2]))
        case Verb.RESTORE if payload is not None:
            make_room(inner, json.loads(payload_text(payload)))
        case _:
            raise AssertionError(order)


def sharded_fields(inner: InnerStep) -> list[tuple[str, list[str]]]:
    """What the optimizers keep of each parameter that is as large as it, and of which ones, the same on every rank."""
    fields: dict[str, list[str]] = {}
    for key, value in flatten_optimizers(inner.optimizers, inner.trainable).items():
        field, _, name = key.partition("/")
        if isinstance(value, DTensor):
            fields.setdefault(field, []).append(name)
    return sorted(fields.items())


def vector_of(inner: InnerStep, ranks: Ranks, number: int) -> ShardedVector:
    """0: the trainable parameters; from 1 on the `sharded_fields`."""
    if number == 0:
        return ShardedVector(list(inner.trainable.values()), ranks)
    field, names = sharded_fields(inner)[number - 1]
    flat = flatten_optimizers(inner.optimizers, inner.trainable)
    return ShardedVector([flat[f"{field}/{name}"] for name in names], ranks)


def make_room(inner: InnerStep, held: Mapping[str, float | None]) -> None:
    """Optimizer state with the numbers of `held`, and zeros where it has None: a tensor that comes by itself."""
    tensors = {
        key: torch.zeros_like(inner.trainable[key.partition("/")[2]]) if value is None else torch.tensor(value)
        for key, value in held.items()
    }
    restore_optimizers(inner.optimizers, inner.trainable, tensors)
