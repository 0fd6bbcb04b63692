"""What others cannot tell a peer, it says itself: that it cannot announce itself, and that its key is in use twice."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.processes import PeerProcess, noloco, small_spec, until, write_spec
from torch import nn

from noloco_p2p import NoLoCo, Peer, RunSpec
from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm import directory

pytestmark = pytest.mark.slow

FAULT = "not been able to announce itself"


async def refuse(*args: object, **kwargs: object) -> None:
    raise DirectoryError("no node accepts the record")


def test_a_peer_that_cannot_announce_itself_says_so_in_status_and_in_the_monitor_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory, "SILENT_S", 1.0)
    with ExitStack() as stack:
        target, peers = RunSpec(name="unseen"), list[Peer]()
        for name in ("seen", "unseen"):
            peer = stack.enter_context(Peer.join(target, state_dir=tmp_path / name, listen="127.0.0.1:0"))
            NoLoCo(nn.Linear(2, 2), None, peer)
            peers, target = [*peers, peer], peer.ticket
        seen, unseen = peers
        unseen._network.directory.node.store = refuse
        until(lambda: FAULT in caplog.text, what="the warning")
        assert FAULT in noloco("status", "--state-dir", unseen.settings.state_dir).stdout
        for folder, is_told in ((unseen.settings.state_dir, True), (seen.settings.state_dir, False)):
            shown = noloco("monitor", seen.ticket, "--state-dir", folder, "--json")
            notices = [notice["text"] for notice in json.loads(shown.stdout)["notices"] if notice["level"] == "bad"]
            assert any(FAULT in text for text in notices) == (FAULT in shown.stderr) == is_told, shown


def test_both_peers_are_told_that_a_state_folder_was_copied(tmp_path: Path) -> None:
    with (
        PeerProcess(write_spec(small_spec("copied"), tmp_path), tmp_path / "hub") as hub,
        PeerProcess(hub.ticket, tmp_path / "first") as first,
    ):
        first.event("started")
        (tmp_path / "second").mkdir()
        shutil.copy(tmp_path / "first" / "identity.key", tmp_path / "second")
        with PeerProcess(hub.ticket, tmp_path / "second") as second:
            assert first.wait() != 0
            for peer, what in ((first, "started later, so this peer is stopping"), (second, "started earlier")):
                line = peer.wait_for("the key of this peer is also in use at 127.0.0.1:")
                assert what in line
                assert f"move {peer.folder}/identity.key away" in line
            second.report_where(lambda event: event["swaps"] > 0)
