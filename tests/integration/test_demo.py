"""`noloco demo` as users run it: its output and files, and that no process remains."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness.patience import SLOW_TEST_S
from harness.processes import TICKET_LINE, Command, PeerProcess, until
from transformers import AutoModelForCausalLM

from noloco_p2p.swarm.addresses import routable_host
from noloco_p2p.telemetry.events import read_events

REPORT_KEYS = {"peers", "merged_loss", "spread", "export_dir", "wall_s"}
PEER_KEYS = {"peer_id", "stage", "step", "swaps", "failed", "loss_start", "loss_end", "bytes_sent", "bytes_received"}
SMALL = ("--set", "data.sequence_length=32", "--set", "evaluate.num_sequences=16")

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a demo, and wait afterwards until no process uses it."""
    folder = tmp_path / "kept"
    yield folder
    until(lambda: not processes_in(folder), what=lambda: f"the end of {processes_in(folder)}")


def processes_in(folder: Path) -> list[psutil.Process]:
    """Find the peers, which hold a lock in their folders, and their p2pd processes, whose key is in such a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "open_files"]):
        paths = [*(process.info["cmdline"] or ()), *(file.path for file in process.info["open_files"] or ())]
        if any(f"{folder}/peer-" in path and not path.endswith("log.txt") for path in paths):
            found.append(process)
    return found


def holds_lock(process: psutil.Process, folder: Path) -> bool:
    return any(file.path == f"{folder}/lock" for file in process.open_files())


def has_trained(folder: Path, peer: str) -> bool:
    files = (folder / peer).glob("runs/*/events.jsonl")
    return any(event["event"] == "evaluated" for file in files for event in read_events(file))


def not_now() -> str:
    """Return hours in the future, as a volunteer may set them for real runs; the demo ignores them."""
    return "-".join(time.strftime("%H:%M", time.localtime(time.time() + 3600 * hours)) for hours in (3, 4))


@pytest.mark.skipif(routable_host("0.0.0.0") == "127.0.0.1", reason="this machine has no network")
def test_another_machine_joins_a_shared_demo_with_one_command_and_is_on_its_page(folder: Path, tmp_path: Path) -> None:
    flags = ("--share", "--peers", "2", "--steps", "4000", *SMALL, "--keep", folder)
    with Command("demo", *flags, log=tmp_path / "log.txt") as demo:
        page = demo.wait_for("sees the swarm at http://").split()[-1]
        ticket = demo.wait_for(TICKET_LINE).split()[-1]
        with PeerProcess(ticket, tmp_path / "guest", "--name", "Guest") as guest:
            guest.report_where(lambda event: event["swaps"] > 0)

            def is_shown() -> bool:
                with urllib.request.urlopen(f"{page}api/status") as answer:
                    return {"Guest", "peer 0", "peer 1"} == {peer["name"] for peer in json.load(answer)["peers"]}

            until(is_shown, what="the guest on the page")
            demo.send(signal.SIGINT)
            assert demo.wait() == 130


def test_a_killed_peer_is_named_and_the_others_come_to_their_end(folder: Path, tmp_path: Path) -> None:
    flags = ("--peers", "3", "--steps", "240", *SMALL, "--keep", folder, "--json", tmp_path / "report.json")
    with Command("demo", *flags, log=tmp_path / "log.txt", NOLOCO_WHEN=not_now()) as demo:
        until(lambda: has_trained(folder, "peer-2"), what=lambda: demo.text)
        victim = next(process for process in processes_in(folder) if holds_lock(process, folder / "peer-2"))
        victim.kill()
        assert demo.wait(SLOW_TEST_S) == 1
    assert "Traceback" not in demo.text
    assert "peer 2 was killed (signal 9)" in demo.text
    assert "\x1b" not in demo.text  # no live drawing without a terminal
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert all(peer.keys() >= PEER_KEYS for peer in report["peers"])
    assert [peer["exit_code"] for peer in report["peers"]] == [0, 0, -9]
    assert report["merged_peers"] == 2
    first, second, _ = report["peers"]
    assert min(first["step"], second["step"]) > 0
    assert min(first["swaps"], second["swaps"]) >= 1
    assert first["loss_end"] < first["loss_start"]
    assert report["merged_loss"] < first["loss_start"]
    assert (Path(report["export_dir"]) / "model.safetensors").exists()


def test_stages_train_to_their_end_and_make_one_model(folder: Path, tmp_path: Path) -> None:
    flags = ("--stages", "3", "--steps", "20", *SMALL, "--keep", folder, "--json", tmp_path / "report.json")
    with Command("demo", *flags, log=tmp_path / "log.txt") as demo:
        assert demo.wait(SLOW_TEST_S) == 0
    assert "Traceback" not in demo.text
    assert "6 peers, each with one of the 3 stages of a model, on this machine" in demo.text
    logs = "".join((folder / f"peer-{index}" / "log.txt").read_text() for index in range(6))
    assert "banned" not in logs
    report = json.loads((tmp_path / "report.json").read_text())
    peers = report["peers"]
    assert [peer["stage"] for peer in peers] == [0, 1, 2, 0, 1, 2]
    assert all(peer["swaps"] for peer in peers), "with the other peer of its stage"
    for peer in peers:
        assert (peer["loss_end"] is None) == (peer["loss_start"] is None) == (peer["stage"] > 0)
    assert peers[0]["loss_end"] < peers[0]["loss_start"] - 1
    assert report["merged_peers"] == 6
    assert report["merged_loss"] == pytest.approx(peers[0]["loss_end"], abs=0.2)
    model = AutoModelForCausalLM.from_pretrained(report["export_dir"])
    assert len(model.model.layers) == 3


def test_ctrl_c_ends_all_peers(folder: Path, tmp_path: Path) -> None:
    with Command("demo", "--peers", "2", "--steps", "10000", "--keep", folder, log=tmp_path / "log.txt") as demo:
        until(lambda: has_trained(folder, "peer-1"), what=lambda: demo.text)
        assert len(processes_in(folder)) == 4
        demo.send(signal.SIGINT)
        assert demo.wait() == 130
    assert demo.text.splitlines()[-1] == "interrupted: asking the peers to leave"
    assert "Traceback" not in demo.text
