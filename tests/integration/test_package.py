"""The wheel that `pip install` downloads has exactly the files of the package, and runs where it is installed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools writes its own arguments there
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheel and sdist in a copy, as setuptools leaves files in the source folder; return their folder."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("no git checkout")
    for name in filter(None, tracked.stdout.decode().split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD, out], cwd=copy, check=True, capture_output=True)
    return out


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "noloco_p2p").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted


def test_the_source_distribution_can_be_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "noloco_p2p/py.typed"} <= names


def test_the_wheel_runs_from_where_it_is_unpacked(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = "import noloco_p2p; from noloco_p2p.cli import main; print(noloco_p2p.__file__); main()"
    told = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    path, version = told.stdout.split("\n")[:2]
    assert path.startswith(str(tmp_path))
    assert version.strip()


def test_uvx_and_pipx_find_a_command_under_either_spelling_of_the_name(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        listed = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
        entry_points = ConfigParser()
        entry_points.read_string(wheel.read(listed).decode())
    scripts = dict(entry_points["console_scripts"])
    assert scripts == dict.fromkeys(("noloco", "noloco_p2p", "noloco-p2p"), "noloco_p2p.cli:main")
