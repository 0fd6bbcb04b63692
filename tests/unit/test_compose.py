"""The compose files confine peers as docker/README.md says, and start them with arguments that the program accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from noloco_p2p.cli.app import app
from noloco_p2p.settings import ENVIRONMENT_PREFIX, PeerSettings

FOLDER = Path(__file__).resolve().parents[2] / "docker"
LOCKS = {
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}


def services() -> list[Any]:
    """Return the services that this project builds."""
    return [
        pytest.param(service, id=f"{name} {each}")
        for name in ("compose.yaml", "compose.gpu.yaml")
        for each, service in yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["services"].items()
        if "build" in service
    ]


@pytest.mark.parametrize("service", services())
def test_a_service_is_locked_up_and_starts_what_the_program_takes(service: dict[str, Any]) -> None:
    assert {key: service.get(key) for key in LOCKS} == LOCKS
    group: Any = get_command(app)
    verb, *words = service["command"]
    group.commands[verb].make_context(verb, words)
    variables = {name for name in service.get("environment", {}) if name.startswith(ENVIRONMENT_PREFIX)}
    assert variables <= {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in PeerSettings.model_fields}
    stages = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    target = service["build"]["target"]
    assert target == "${NOLOCO_TARGET:-cpu}" or f"FROM system AS {target}\n" in stages


def test_the_gpu_file_asks_for_the_gpus_that_the_peer_takes() -> None:
    peers = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    [device] = peers["nvidia"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["count"] == peers["nvidia"]["environment"]["NOLOCO_GPUS"]
    assert "/dev/kfd" in peers["amd"]["devices"]
