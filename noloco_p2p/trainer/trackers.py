"""Send the metrics of a run to TensorBoard or Weights & Biases (extras `tensorboard` and `wandb`).

The names of the metrics are defined in `telemetry/metrics.py`. A tracker that fails is dropped with one error message,
and training continues. Metrics are also written to a JSONL file, with or without trackers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.peer_name import named
from noloco_p2p.telemetry.metrics import numbers

log = logging.getLogger(__name__)

# Logs metrics by name at an inner step, and closes the tracker. Both may raise any error of the tracker's library.
Tracker = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]


class Trackers:
    """The trackers that the user has requested. Errors after the start are logged, not raised."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @classmethod
    def of(cls, names: Sequence[str], *, folder: Path, run: str, peer_id: str, config: Mapping[str, Any]) -> Trackers:
        """Start the trackers, which display `config` with the run. Raises SettingsError if a tracker cannot start."""
        made: dict[str, Tracker] = {}
        for name in names:
            try:
                if name == "tensorboard":
                    made[name] = _tensorboard(folder / "tensorboard")
                else:
                    made[name] = _wandb(folder, run=run, peer_id=peer_id, config=config)
            except ImportError:
                raise SettingsError(
                    f"--tracker {name} requires a package that is not installed: pip install {name}"
                ) from None
            except Exception as error:  # no login, no network, no space: whatever its library raises
                raise SettingsError(f"--tracker {name} cannot be started: {error}") from error
        return cls(made)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Send `metrics`, the result of `Metrics.as_dict()`, to all trackers.

        Values that are still unknown or are not numbers are left out.
        """
        values = numbers(metrics)
        for name, (log_values, _) in list(self._trackers.items()):
            try:
                log_values(values, int(metrics["step"]))
            except Exception as error:  # noqa: BLE001 - network, disk, service: a tracker must not stop training
                log.error("%s failed and will not receive further metrics of this run: %s", name, error)
                del self._trackers[name]

    def close(self) -> None:
        for name, (_, close) in self._trackers.items():
            try:
                close()
            except Exception as error:  # noqa: BLE001 - as above
                log.error("%s could not be closed: %s", name, error)
        self._trackers.clear()


def _tensorboard(folder: Path) -> Tracker:
    """Write event files to `folder`, where a resumed run appends to them."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log_values(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log_values, writer.close


def _wandb(folder: Path, *, run: str, peer_id: str, config: Mapping[str, Any]) -> Tracker:
    """Start a W&B run of this peer. All peers of a run share a group.

    Environment variables such as WANDB_PROJECT and WANDB_MODE apply.
    """
    wandb = importlib.import_module("wandb")
    started = wandb.init(
        dir=str(folder),
        id=f"{run}-{peer_id[-12:]}",
        name=f"{run} {named(peer_id)}",
        group=run,
        config=dict(config),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )
    return started.log, started.finish
