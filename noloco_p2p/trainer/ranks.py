"""The processes of one peer, one a GPU: rank 0 leads, the others follow its orders.

Rank 0 owns network, data, outer step and checkpoints. Whatever all ranks must do together it first announces as an
order; the others (`trainer/follower.py`) do nothing else. The environment that `torchrun` makes tells who is who.

A rank that dies closes its connections, which the others notice at once; one that hangs is noticed by the deadline of
what they do together. Both are a RankError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from noloco_p2p.errors import RankError

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger(__name__)

WORK_TIMEOUT_S = 300.0  # for what all ranks do together: a micro-batch, the move of a window
ORDER_TIMEOUT_S = 7 * 24 * 3600.0  # rank 0 may fetch a state for hours; that it died is noticed at once all the same
HEADER = 6  # verb, three numbers, rows and columns of the payload


class Verb(IntEnum):
    STOP = 0
    BUILD = 1  # payload: the run spec
    FIT = 2  # payload: a batch
    BACKWARD = 3  # payload: a batch; a seed
    UPDATE = 4  # progress
    FORGET = 5
    FORWARD = 6  # payload: a batch
    READ = 7  # number of the vector, first and last element
    WRITE = 8
    RESTORE = 9  # payload: what the optimizers hold


@dataclass(frozen=True, slots=True)
class Order:
    verb: Verb
    numbers: tuple[float, float, float]
    payload: Tensor | None  # int64, 2-D


class Ranks:
    """This process among those of its peer. `device`: the one of this rank."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Meets the others; returns when all are there. Raises RankError."""
        self.rank = rank
        self.size = size
        self.device = device
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        with told():
            if device.type != "cpu":
                torch.get_device_module(device).set_device(device)
            distributed.init_process_group(
                backend, rank=rank, world_size=size, timeout=timedelta(seconds=WORK_TIMEOUT_S)
            )
            orders = distributed.new_group(backend="gloo", timeout=timedelta(seconds=ORDER_TIMEOUT_S))
        assert isinstance(orders, distributed.ProcessGroup)
        self._orders = orders
        self._is_over = False

    def order(self, verb: Verb, *numbers: float, payload: Tensor | None = None) -> None:
        """For rank 0: what all do next."""
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[0] = verb
        header[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        if payload is not None:
            header[4:] = torch.tensor(payload.shape)
        distributed.broadcast(header, 0, group=self._orders)
        if payload is not None:
            distributed.broadcast(payload.cpu().contiguous(), 0, group=self._orders)

    def receive(self) -> Order:
        """For the other ranks: waits for the next order."""
        header = torch.zeros(HEADER, dtype=torch.float64)
        distributed.broadcast(header, 0, group=self._orders)
        verb, *numbers, rows, columns = header.tolist()
        payload = None
        if rows:
            payload = torch.empty(int(rows), int(columns), dtype=torch.int64)
            distributed.broadcast(payload, 0, group=self._orders)
        return Order(Verb(int(verb)), (numbers[0], numbers[1], numbers[2]), payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Rank 0 tells the others to end; all others just end. Safe to call twice, and when some are gone."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self.rank == 0:
                self.order(Verb.STOP)
            distributed.destroy_process_group()
        except RuntimeError as error:
            log.debug("the ranks could not end in order: %s", error)


def text_payload(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)[None]


def payload_text(payload: Tensor) -> bytes:
    return payload[0].to(torch.uint8).numpy().tobytes()


@contextmanager
def told() -> Iterator[None]:
    """What torch raises when another rank is gone or hangs becomes a RankError in words."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or "gloo" in str(error).lower()):
            raise
        raise RankError(
            "another process of this peer has ended, or has not done its part in time; its own error stands above. "
            f"The same command resumes from the last checkpoint ({str(error).splitlines()[0][:200]})"
        ) from error
