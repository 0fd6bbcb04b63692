"""Imports follow the order of the packages, and pure packages stay pure."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "noloco_p2p"

# From left to right: a package may import itself and packages further right, but no neighbour and none further left.
ORDER = [
    {"__main__"},
    {"cli"},
    {"demo", "doctor", "simulate"},
    {"integrations", "monitor", "trainer", "testing"},
    {"peer"},
    {"net", "outer", "swarm"},
    {"transfer"},
    {"gossip", "flow"},
    {"optim", "codec", "data"},
    {"devices"},
    {"bans", "control", "presets", "settings", "ticket"},
    {"invitation", "peer_name"},
    {"identity"},
    {"spec"},
    {"telemetry"},
    {"dial_guard", "tcp"},
    {"hosts", "rates", "atomic_file", "errors", "forks", "_version"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
PURE = [
    "optim",
    "codec",
    "flow/frames.py",
    "flow/limits.py",
    "flow/neighbours.py",
    "flow/steps.py",
    "gossip/coder.py",
    "gossip/frames.py",
    "gossip/pairing.py",
    "gossip/units.py",
]
TOPS = ("noloco_p2p", "benchmarks", "docs")  # folders of the files that comments name
OWN_FILE = re.compile(r"(?<![\w/.-])(?!hivemind/)(?:[a-z_]+/)*[a-z_]+\.(?:py|md)\b")
IMPURE = {"asyncio", "grpc", "hivemind", "time", "socket", "threading"}


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, including imports within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "wire" not in path.parts and path.name != "__init__.py"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_right(path: Path) -> None:
    here = room_of(path)
    for name in imports(path):
        if match := re.fullmatch(r"noloco_p2p\.(\w+).*", name):
            there = match.group(1)
            if there in RANK and there != here:
                assert RANK[there] > RANK[here], f"{path}: {here} -> {there}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions and for type checking count too."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files()}
    uses = {name: {used for used in imports(path) if used in names} for name, path in names.items()}
    while free := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in free:
            del uses[name]
    assert not uses, f"these import each other: {sorted(uses)}"


HIVEMIND = PACKAGE / "swarm" / "kademlia"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_package_alone_depends_on_hivemind(path: Path) -> None:
    """A new release of hivemind affects that package only; apart from node.py, others use what its `__init__.py`
    exports."""
    if HIVEMIND in path.parents:
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "hivemind"]
    inside = {name for name in imports(path) if name.startswith("noloco_p2p.swarm.kademlia.")}
    assert not inside or path == PACKAGE / "swarm" / "node.py", inside


def test_peer_ids_are_parsed_in_two_places_which_check_their_length_first() -> None:
    """Both directions of base58 take quadratic time."""
    parses = re.compile(r"\bPeerID\(|\bfrom_base58\(|\bb58(?:de|en)code\(|\(PeerID\)")
    places = {path for path in files() if parses.search(path.read_text(encoding="utf-8"))}
    assert places == {PACKAGE / "identity.py", HIVEMIND / "client.py"}


@pytest.mark.parametrize("place", PURE)
def test_pure_rooms_know_no_clock_and_no_network(place: str) -> None:
    paths = [PACKAGE / place] if place.endswith(".py") else list((PACKAGE / place).rglob("*.py"))
    assert paths
    for path in paths:
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE, path


def test_only_the_adapters_know_what_a_transformers_model_gives() -> None:
    """All other code takes any module, with a function for its loss or logits."""
    adapters = {PACKAGE / "trainer" / name for name in ("chunked_loss.py", "model.py", "stage.py", "weights.py")}
    for path in PACKAGE.rglob("*.py"):
        if path not in adapters:
            found = re.findall(r"input_ids=|\)\.loss\b|\)\.logits\b|model\.config\b", path.read_text(encoding="utf-8"))
            assert not found, f"{path}: {found}"


def test_gossip_is_made_in_one_place() -> None:
    """Doubles, simulations and benchmarks therefore measure what a peer runs."""
    paths = [path for top in ("noloco_p2p", "benchmarks") for path in (PACKAGE.parent / top).rglob("*.py")]
    makers = {path.name for path in paths if re.search(r"\bGossip\(", path.read_text(encoding="utf-8"))}
    assert makers == {"service.py"}


def test_every_folder_has_three_files() -> None:
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert len(list(folder.rglob("*.py"))) >= 3, folder


def test_no_drawers_for_everything() -> None:
    names = {path.name for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils.py", "helpers.py", "common.py", "manager.py", "misc.py"}


def test_files_that_the_sources_speak_of_are_there() -> None:
    """A file that moves must take along the comments that name it."""
    root = PACKAGE.parent
    names = [f"/{path.relative_to(root)}" for top in TOPS for path in (root / top).rglob("*.*")]
    for path in PACKAGE.rglob("*.py"):
        if path.parent.parent.name == "wire":  # generated
            continue
        for named in OWN_FILE.findall(path.read_text(encoding="utf-8")):
            assert any(name.endswith(f"/{named}") for name in names), f"{path} speaks of {named}"
