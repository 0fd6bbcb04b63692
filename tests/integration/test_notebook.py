"""The notebook runs from top to bottom on the CPU, in a real kernel with real peers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from harness.patience import SLOW_TEST_S
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "colab.ipynb"


def read() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_it_is_kept_without_what_it_printed() -> None:
    assert all(not cell.outputs and cell.execution_count is None for cell in read().cells if cell.cell_type == "code")


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NOLOCO_DEVICE", "cpu")
    monkeypatch.setenv("NOLOCO_REPORT_EVERY_S", "2")
    notebook = read()
    NotebookClient(
        notebook, timeout=int(SLOW_TEST_S), kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    said = {cell.id: printed(cell) for cell in notebook.cells}
    assert said["watch"].count("% apart") >= 3
    assert "peer" in said["status"]
    assert said["generate"].startswith("def main(")
    assert (tmp_path / "model" / "config.json").exists()
