"""Plots the curves of simulations. It needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from noloco_p2p.simulate.result import Result

POINTS = 20  # of a curve, after the one at the start


def check(folder: Path) -> None:
    """Raise SettingsError if matplotlib is missing or the folder cannot be created."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot requires matplotlib: pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--plot {folder} cannot be created: {error.strerror}") from None


def draw(results: Sequence[Result], folder: Path) -> Path:
    """Plot validation loss over virtual time and over bytes, with a line per replica. Return the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, over_bytes = figure.subplots(1, 2, sharey=True)
    for index, result in enumerate(results):
        for number, replica in enumerate(sorted({point.replica for point in result.curve})):
            points = [point for point in result.curve if point.replica == replica]
            losses = [point.loss for point in points]
            style = {"color": f"C{index}", "alpha": 0.7, "label": None if number else result.rule}
            over_time.plot([point.virtual_s for point in points], losses, **style)
            over_bytes.plot([point.sent_bytes / (1 << 20) for point in points], losses, **style)
    over_time.set(xlabel="virtual seconds", ylabel="validation loss, nats per token")
    over_bytes.set_xlabel("MiB sent by a replica")
    if len(results) > 1 and any(result.sent_bytes for result in results):
        over_bytes.set_xscale("log")  # rules differ by orders of magnitude
    over_time.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path
