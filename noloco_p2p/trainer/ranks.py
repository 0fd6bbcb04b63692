"""Run one peer as several processes, one per GPU. All processes hold the same objects and repeat the calls of rank 0.

Rank 0 owns the network, the data, the outer step and the checkpoints. Every method that works on the sharded model
begins with `tell`, which broadcasts the call from rank 0 to the other ranks. The environment that `torchrun` sets
identifies each rank.

If a rank dies, its connections close, and the other ranks notice that at once. If a rank hangs, the others notice it
when a collective operation misses its deadline. Both cases raise a RankError.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from noloco_p2p.errors import RankError

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger(__name__)

WORK_TIMEOUT_S = 300.0  # for one collective operation, such as a micro-batch or the transfer of a parameter
CALL_TIMEOUT_S = 7 * 24 * 3600.0  # rank 0 may fetch a state for hours; its death is still noticed at once


class Ranks:
    """One of the processes that form a peer. `device` is the device of this rank."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Connect to the other ranks, and return when all are connected. Raises RankError if that fails."""
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
            calls = distributed.new_group(backend="gloo", timeout=timedelta(seconds=CALL_TIMEOUT_S))
        assert isinstance(calls, distributed.ProcessGroup)
        self._calls = calls
        self._is_over = False

    def share(self, value: object = None) -> Any:
        """Return rank 0's value on every rank. The other ranks wait for it, and get None if rank 0 has ended.

        The value may contain only CPU tensors and JSON values, so that deserializing it runs no code.
        """
        size, content = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            torch.save(value, written := io.BytesIO())
            content = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
            size[0] = len(content)
        distributed.broadcast(size, 0, group=self._calls)
        if self.rank:
            content = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(content, 0, group=self._calls)
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True) if self.rank else value

    def tell(self, method: str, *args: object, **kwargs: object) -> None:
        """On rank 0, make the others call this method of the object that they `follow`. On other ranks, do nothing."""
        if self.rank == 0:
            self.share((method, args, kwargs))

    def follow(self, target: object) -> None:
        """On the other ranks, repeat the calls of rank 0 until it ends."""
        while (call := self.share()) is not None:
            method, args, kwargs = call
            getattr(target, method)(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """On rank 0, let the other ranks end. It is safe to call this twice, or after some ranks have already ended."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self.rank == 0:
                self.share(None)
            distributed.destroy_process_group()
        except RuntimeError as error:
            log.debug("the ranks could not shut down cleanly: %s", error)


@contextmanager
def told() -> Iterator[None]:
    """Convert torch's error about a rank that has exited or hangs to a RankError with a clear message."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or "gloo" in str(error).lower()):
            raise
        raise RankError(
            "another process of this peer has ended or missed a deadline; its own error is above. "
            f"Run the same command again to resume from the last checkpoint ({str(error).splitlines()[0][:200]})"
        ) from error
