"""The ports that a peer reuses at its next start, and that the doctor tests while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_p2p.errors import SettingsError
from noloco_p2p.peer.peer import resolve
from noloco_p2p.peer.run_folder import Ports, remembered_ports
from noloco_p2p.settings import PeerSettings


def test_the_ports_of_a_running_peer_are_known_from_its_folder(tmp_path: Path) -> None:
    assert remembered_ports(tmp_path) == {}
    Ports(PeerSettings(listen="127.0.0.1:0", state_dir=tmp_path)).remember(grpc=41001, libp2p=41002)
    assert remembered_ports(tmp_path) == {"grpc": 41001, "libp2p": 41002}


def test_a_missing_target_is_named() -> None:
    with pytest.raises(SettingsError, match="a spec, the path of a spec file, or a ticket"):
        resolve(None)
