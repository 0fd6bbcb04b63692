from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from harness.identities import identity_of
from harness.patience import PATIENCE_S

from noloco_p2p.cli import checks
from noloco_p2p.cli.app import run
from noloco_p2p.doctor import Check, machine, swarm, versions
from noloco_p2p.doctor.swarm import clock, model, needs, reachability, stages
from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import FetchWant, StateManifest, WantManifest
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.dial_back import DialBack
from noloco_p2p.trainer.needs import Counts
from noloco_p2p.trainer.stage_choice import StageNeeds

PEER = "12D3KooWaaaaaa"
PEER_ID = identity_of("a").peer_id


def settings(folder: Path, **changes: str) -> PeerSettings:
    return PeerSettings.load({"state_dir": folder, "listen": "127.0.0.1:0", **changes})


FINE, ODD, BAD = Check("a", "ok", "x"), Check("b", "warning", "y", "do"), Check("c", "failed", "z", "mend")


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([FINE], 0, "found nothing that would prevent training"),
        ([FINE, ODD], 0, "found nothing that would prevent training (1 warning)"),
        ([FINE, ODD, BAD, BAD], 1, "2 problems would prevent training; see the advice next to the arrows above"),
    ],
)
def test_a_failure_makes_the_exit_code_1_and_a_warning_does_not(
    found: list[Check],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def examine(*_: Any) -> AsyncIterator[Check]:
        for check in found:
            yield check

    monkeypatch.setattr(checks, "_examine", examine)
    assert run(["doctor", "--state-dir", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert said in out.splitlines()
    assert ("-> mend" in out) == bool(code)
    assert run(["doctor", "--json", "--state-dir", str(tmp_path)]) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["healthy"], len(report["checks"])) == (code == 0, len(found))
    assert report["checks"][0] == {"name": "a", "level": "ok", "found": "x", "fix": ""}


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    own = settings(tmp_path)
    for check in (versions(), machine.ports(own), machine.disk(own), machine.memory(), machine.codec_speed()):
        assert check.level in ("ok", "warning"), check
        assert bool(check.fix) == (check.level != "ok")


def test_the_doctor_says_what_auto_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    check = machine.accelerator()
    assert (check.level, "auto selects cpu and fp32" in check.found) == ("warning", True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2 Max", raising=False)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 << 30)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    check = machine.accelerator()
    assert check.level == "ok"
    assert check.found == "Apple M2 Max; 10.0 GiB of 10.0 GiB free on the first GPU; auto selects mps and fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(machine, "free_and_total_bytes", lambda _: (1 << 30, 2 << 30))
    monkeypatch.setattr(machine.Compute, "is_bf16", lambda *_: True)
    assert (
        machine.accelerator().found
        == "card 0, card 1; 1.0 GiB of 2.0 GiB free on the first GPU; auto selects cuda and bf16"
    )


def test_a_port_in_use_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = machine.ports(settings(tmp_path, listen=f"127.0.0.1:{min(port, 65_534)}"))
    assert check.level == "failed"
    assert "--listen" in check.fix


def test_a_wrong_clock_is_a_failure_and_a_closed_port_a_warning_with_a_way_out() -> None:
    assert clock(PEER, Offset(0.4, 0.1)).level == "ok"
    assert clock(PEER, Offset(-45.0, 0.1)).level == "failed"
    assert reachability(DialBack("192.0.2.9", {31337: "", 31338: ""}), PEER).level == "ok"
    closed = reachability(DialBack("192.0.2.9", {31337: "no answer within 4 s", 31338: ""}), PEER)
    assert closed.level == "warning"
    assert "forward TCP ports 31337 and 31338" in closed.fix
    assert "--announce 192.0.2.9" in closed.fix


class BusyAtFirst:
    """Serves the manifest of a state without chunks, after it has refused two requests with this code."""

    def __init__(self, code: str) -> None:
        self._refusals = iter([Refused("I am saving a newer state", code=code)] * 2)

    async def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncIterator[StateManifest]:
        if refusal := next(self._refusals, None):
            raise refusal
        if isinstance(want, WantManifest):
            yield StateManifest("", 0, 0.0, 0, ())


@pytest.mark.parametrize(("code", "is_measured"), [("BUSY", True), ("NO_STATE", False)])
def test_a_peer_that_is_busy_is_asked_again(code: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "LEAST_RETRY_S", 0.0)
    manifest, _, check = asyncio.run(swarm._download([Candidate(PEER, "")], cast(Any, BusyAtFirst(code))))
    assert (manifest is not None) == is_measured
    assert (check.level == "skipped") != is_measured


def test_a_model_that_is_too_large_is_a_failure(tmp_path: Path) -> None:
    tokens, found = model(PRESETS["tiny"], settings(tmp_path))
    assert tokens.found.startswith("each peer reads 61.4M in its schedule, 62 per parameter; ")
    assert found.found.startswith("model: 992k trainable parameters\nneeds: ")
    assert needs(TrainerSpec(name="r"), Counts(1_000_000), settings(tmp_path)).level == "ok"
    assert needs(TrainerSpec(name="r"), Counts(10**13), settings(tmp_path)).level == "failed"


def test_what_fits_which_gpu_is_said_of_a_model_with_adapters(tmp_path: Path) -> None:
    adapted = PRESETS["tiny"].with_changes({"model.lora.rank": 4})
    assert [check.name for check in model(adapted, settings(tmp_path))] == ["tokens", "the model", "GPUs"]
    assert model(adapted, settings(tmp_path))[2].found.count("(from 8 GB)") == 8


def test_each_stage_is_examined_and_what_the_link_carries(tmp_path: Path) -> None:
    spec = StageNeeds.of(PRESETS["tiny"], 3).spec
    tokens, *checks = model(spec, settings(tmp_path))
    assert tokens.found.startswith("each head reads ")
    assert [(check.name, check.level) for check in checks] == [
        *((f"stage {stage}", "ok") for stage in range(3)),
        ("link", "ok"),
    ]
    assert "4.5 MiB of memory" in checks[0].found
    assert "can be a head" in checks[0].found
    assert "can be a head" not in checks[1].found
    assert checks[-1].found == "100 Mbit/s each way (not measured) is enough for 38.1k tokens/s"
    assert stages(spec, settings(tmp_path), download_bytes_per_s=2.5e6)[-1].found.startswith("20 Mbit/s each way (meas")
    capped = stages(spec, settings(tmp_path, max_upload="10mbit"), download_bytes_per_s=2.5e6)
    assert capped[-1].found == "10 Mbit/s each way (--max-upload) is enough for 3.81k tokens/s"


def test_a_stage_that_does_not_fit_is_a_failure_only_where_none_does(tmp_path: Path) -> None:
    spec = StageNeeds.of(PRESETS["tiny"], 3).spec
    _, *small = model(spec, settings(tmp_path, max_memory="4MiB"))
    assert [check.level for check in small] == ["warning", "ok", "ok", "ok"]
    assert small[0].fix == "hold another stage, or use a machine with more memory"
    none = model(spec, settings(tmp_path, max_memory="1MB"))
    assert [check.level for check in none] == ["ok"] + ["failed"] * 3 + ["ok"]
    _, *unbound = model(spec.with_changes({"data.source": "mine"}), settings(tmp_path))
    assert (unbound[0].level, "--data mine=GLOB" in unbound[0].found) == ("warning", True)
    assert unbound[0].fix == "hold another stage, or provide the data with --data"


def test_a_spec_that_was_not_cut_is_a_failure_with_a_way_out(tmp_path: Path) -> None:
    changes = {"pipeline.stages": 3, "model.parameter_seeds": True}
    _, check = model(PRESETS["tiny"].with_changes(changes), settings(tmp_path))
    assert (check.level, "noloco init --stages" in check.fix) == ("failed", True)


@pytest.mark.parametrize(
    ("changes", "data", "failed"),
    [
        ({"data.source": "mine"}, "", {"data": "not bound to files on this machine"}),
        ({"data.source": "mine"}, "mine=nothing/*.txt", {"data": "matches no files"}),
        ({"run_key": PEER_ID}, "", {"run key": "is private"}),
    ],
)
def test_missing_data_and_a_missing_run_key_would_prevent_training(
    changes: dict[str, str],
    data: str,
    failed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def starts() -> Check:
        return FINE

    monkeypatch.setattr(machine, "p2pd", starts)
    file = tmp_path / "run.toml"
    file.write_text(render(PRESETS["tiny"].with_changes(changes)))
    flags = ["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path), *(["--data", data] if data else [])]
    assert run(["doctor", str(file), "--json", *flags]) == 1
    found = json.loads(capsys.readouterr().out)["checks"]
    told = {check["name"]: check["found"] for check in found if check["level"] == "failed"}
    assert told.keys() == failed.keys()
    assert all(failed[name] in told[name] for name in failed)


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("torch", "hivemind")))  # an import of them is a ModuleNotFoundError
from noloco_p2p import doctor
known = doctor.version
def version(name):
    if name in ("torch", "hivemind"):
        raise doctor.PackageNotFoundError(name)
    return known(name)
doctor.version = version
from noloco_p2p.cli.app import run
sys.exit(run(["doctor", "--listen", "127.0.0.1:0"]))
"""


def test_what_is_not_installed_is_told(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 1
    assert "pip install torch hivemind" in found.stdout
    assert "Traceback" not in found.stderr
