"""Plots the curves of a simulation. It needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

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


def draw(result: Result, folder: Path) -> Path:
    """Plot validation loss over virtual time, with a line per replica. Return the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for replica in {point.replica for point in result.curve}:
        points = [(point.virtual_s, point.loss) for point in result.curve if point.replica == replica]
        axes.plot(*zip(*points, strict=True), color="C0", alpha=0.7)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("validation loss, nats per token")
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path
