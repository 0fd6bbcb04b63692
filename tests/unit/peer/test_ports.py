"""The ports that a peer reuses at its next start, and that the doctor tests while it runs."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from harness.identities import identity_of

from noloco_p2p.errors import SettingsError
from noloco_p2p.peer.peer import Peer, resolve
from noloco_p2p.peer.run_folder import (
    Ports,
    find_invitation,
    first_number,
    folder_of,
    remembered_ports,
    warn_if_edited,
    write_run,
)
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings


def test_the_ports_of_a_running_peer_are_known_from_its_folder(tmp_path: Path) -> None:
    assert remembered_ports(tmp_path) == {}
    Ports(PeerSettings(listen="127.0.0.1:0", state_dir=tmp_path)).remember(grpc=41001, libp2p=41002)
    assert remembered_ports(tmp_path) == {"grpc": 41001, "libp2p": 41002}


@pytest.mark.parametrize("target", [None, ""])
def test_a_missing_target_is_named(target: str | None) -> None:
    with pytest.raises(SettingsError, match=f"a spec, the path of a spec file, or a ticket; it got {target!r}"):
        resolve(target)


def test_an_edited_spec_is_told_with_what_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = PRESETS["tiny"]
    edited = spec.with_changes({"outer.alpha": 0.25})
    fork = spec.with_changes({"outer.alpha": 0.25, "model.start": f"blake3:{'0' * 64}"})
    warn_if_edited(spec, tmp_path)
    write_run(spec, None, folder_of(tmp_path, spec.run_id))
    for other in (spec, fork, spec.with_changes({"name": f"{spec.name}-2"})):
        warn_if_edited(other, tmp_path)
    assert not caplog.text
    warn_if_edited(edited, tmp_path)
    assert "outer.alpha was" in caplog.text
    assert "noloco fork" in caplog.text
    write_run(edited, None, folder_of(tmp_path, edited.run_id))
    caplog.clear()
    warn_if_edited(edited, tmp_path)
    assert not caplog.text, "it is told once"


def test_a_state_that_others_would_refuse_is_not_announced() -> None:
    with pytest.raises(SettingsError, match="the states are done, leaving, paused, training"):
        Peer.announce(cast(Peer, None), "evaluating")


def test_numbers_of_microbatches_increase_though_the_clock_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for now_s in (1_800_000_000.0, 1_800_000_100.0, 1_900_000_000.0, 1_800_000_200.0, 1_800_000_300.0):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        numbers.append(first_number(tmp_path))
    assert numbers[:3] == [1_800_000_000_000, 1_800_000_100_000, 1_900_000_000_000]
    assert all(later - earlier >= 100_000 for earlier, later in pairwise(numbers))


@pytest.mark.parametrize(("exists", "said"), [(False, "join with a ticket"), (True, "cannot be read: Is a directory")])
def test_an_invitation_that_cannot_be_read_is_not_taken_for_a_missing_one(
    exists: bool, said: str, tmp_path: Path
) -> None:
    spec = PRESETS["tiny"].with_changes({"run_key": identity_of("operator").peer_id})
    if exists:
        (folder_of(tmp_path, spec.run_id) / "invitation").mkdir(parents=True)
    with pytest.raises(SettingsError, match=said):
        find_invitation(spec, PeerSettings(state_dir=tmp_path))
