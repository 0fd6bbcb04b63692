"""Light commands start fast, as they load no heavy module."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S

HEAVY = ["torch", "hivemind", "transformers", "datasets", "grpc", "google.protobuf", "numpy", "rich"]
LOOK = f"""
import json, sys
from noloco_p2p.cli.app import run
code = run(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def loaded_by(*arguments: str) -> tuple[int, list[str]]:
    """Run a command in a fresh interpreter; return its exit code and the heavy modules that it loaded."""
    command = [sys.executable, "-c", LOOK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("verb", "exit_code"),
    [
        ("--help", 0),
        ("join --help", 0),
        ("init {}/run.toml", 0),
        ("id {}", 0),
        ("status {}", 1),
        ("ticket {}", 1),
        ("leave {}", 1),
        ("pause {}", 1),
    ],
)
def test_light_verbs_load_nothing_heavy(verb: str, exit_code: int, tmp_path: Path) -> None:
    place = str(tmp_path) if verb.startswith("init") else f"--state-dir={tmp_path}"
    assert loaded_by(*verb.format(place).split()) == (exit_code, [])


def test_what_cannot_work_is_told_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    join = ("join", str(spec), f"--state-dir={tmp_path}")
    spec.write_text('name = "x"\n[outer]\nalfa = 1\n')
    assert loaded_by(*join) == (3, []), "a mistyped spec"
    spec.write_text('name = "x"\n[data]\nsource = "mine"\n')
    assert loaded_by(*join) == (3, ["numpy"]), "data that was not bound"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert loaded_by(*join, "--listen", f"127.0.0.1:{taken.getsockname()[1]}") == (3, []), "a taken port"
