"""Write checkpoints outside the training thread. Their content is copied, so training continues during the write."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from noloco_p2p.devices import free_memory
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.checkpoint import Checkpoints

log = logging.getLogger(__name__)

USED_SHARE = 0.5  # share of free memory that the copy may use; if it needs more, training waits for the disk

Files = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint. Training changes the tensors in `live`, but not those in `fresh`."""

    fresh: Files
    live: Files
    meta: Mapping[str, Any]


class Saver:
    """A background writer of checkpoints, which writes at most one at a time.

    A request is refused while another checkpoint is being written, and training continues.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        checkpoints: Checkpoints,
        step: int,
        *,
        content: Callable[[], Content],
        done: Callable[[Path], None],
    ) -> bool:
        """Copy `content()`, and write it in the background.

        Returns False if the last checkpoint is unfinished. `done` is called with the folder, on the thread that wrote
        the checkpoint. A failure is logged, and the last good checkpoint is kept. If the program exits during a write,
        the process ends only after the write. If there is too little memory for a copy, this call blocks until the
        checkpoint is written.
        """
        if self.is_busy:
            log.warning("skipped the checkpoint of step %d because the previous one is still being written", step)
            return False
        found = content()
        num_bytes = sum(tensor.nbytes for tensors in found.live.values() for tensor in tensors.values())
        has_room = num_bytes < USED_SHARE * free_memory()
        live = found.live
        if has_room:
            live = {stem: _copied(tensors) for stem, tensors in live.items()}
        else:
            log.info("training is waiting for the checkpoint of step %d: not enough memory for a copy", step)

        def write() -> None:
            try:
                done(checkpoints.save(step, files={**found.fresh, **live}, meta=found.meta))
            except CheckpointError as error:
                log.error("%s", error)

        self._thread = threading.Thread(target=write, name="noloco-checkpoint")
        self._thread.start()
        if not has_room:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in tensors.items()}
