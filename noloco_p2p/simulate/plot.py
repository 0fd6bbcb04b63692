"""Plots the curves of a simulation. It needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from noloco_p2p.errors import SettingsError
from noloco_p2p.simulate.result import Result


def check(folder: Path) -> None:
    """Raise SettingsError if matplotlib is missing or the folder cannot be created."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot requires matplotlib: pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--plot {folder} cannot be created: {error.strerror}") from None


def draw(results: Sequence[Result], folder: Path) -> Path:
    """Plot validation loss over virtual time, with a colour per rule and a line per replica. Return the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, result in enumerate(results):
        for replica in dict.fromkeys(point.replica for point in result.curve):
            points = [point for point in result.curve if point.replica == replica]
            axes.plot(
                [point.virtual_s for point in points],
                [point.loss for point in points],
                color=f"C{index}",
                alpha=0.7,
                label=result.rule if replica == result.curve[0].replica else None,
            )
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path
