"""Read and pack batches in a thread, so that training does not have to wait for the disk or the tokenizer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from noloco_p2p.data.stream import Position, TokenStream

MIN_AHEAD = 4  # batches
AHEAD_TOKENS = 1 << 19  # 4 MB; a block is made while the previous one is used
POLL_S = 0.2
JOIN_S = 5.0


class Prefetcher:
    """An iterator over the batches of a TokenStream. A thread reads ahead, from `begin` or the first batch on.

    `state_dict` returns the position after the last batch that was returned, no matter how far the thread has read. If
    the stream cannot read a batch, its error is raised in place of that batch. `close` ends the thread, even if it is
    waiting for the network.

    torch's DataLoader cannot save and restore its state. torchdata's `nodes.Prefetcher` can, but its `next` has no
    timeout, and a peer must be able to leave at any time.
    """

    def __init__(self, stream: TokenStream, *, pin_memory: bool = False) -> None:
        self._stream = stream
        self._pin_memory = pin_memory
        num_ahead = max(MIN_AHEAD, AHEAD_TOKENS // (stream.batch_size * stream.sequence_length))
        self._ready: queue.Queue[tuple[Tensor, Position] | BaseException] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._position = stream.position
        self.waited_s = 0.0  # in total, for batches that were not ready

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Tensor:
        """Return the next batch. Raises StopIteration after `close`."""
        batch = self.get()
        if batch is None:
            raise StopIteration
        return batch

    def get(self, *, until: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Return the next batch, or None if `close` is called or `until` becomes true before the batch is ready."""
        self.begin()
        began_s = time.monotonic()
        while not self._closed.is_set():
            try:
                item = self._ready.get(timeout=POLL_S)
            except queue.Empty:
                if until():
                    return None
                continue
            self.waited_s += time.monotonic() - began_s
            if isinstance(item, BaseException):
                raise item
            batch, self._position = item
            return batch
        return None

    def begin(self) -> None:
        """Begin to read ahead. After this, the position can no longer be changed."""
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._main, name="noloco-data", daemon=True)
            self._thread.start()

    def state_dict(self) -> dict[str, Any]:
        return self._position.as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`. Call this only before the first batch."""
        assert self._thread is None, "the position of a stream cannot be changed while it is being read"
        self._stream.load_state_dict(state)
        self._position = self._stream.position

    def close(self) -> None:
        """End the thread. This can be called more than once, and from any thread."""
        self._closed.set()
        self._stream.stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _main(self) -> None:
        try:
            for batch in self._stream:
                self._put((batch.pin_memory() if self._pin_memory else batch, self._stream.position))
                if self._closed.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised again by the training thread
            self._put(error)

    def _put(self, item: tuple[Tensor, Position] | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return
