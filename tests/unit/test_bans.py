from __future__ import annotations

from pathlib import Path

import pytest
from harness.identities import identity_of

from noloco_p2p.bans import STRIKE_HALF_LIFE_S, STRIKES, STRUCK_OUT_S, BanList
from noloco_p2p.cli.app import run
from noloco_p2p.errors import SettingsError

A, B = (identity_of(name).peer_id for name in "ab")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bans(tmp_path: Path, clock: Clock) -> BanList:
    return BanList(tmp_path / "bans.json", clock=clock)


def test_a_ban_says_why_and_ends_by_itself(bans: BanList, clock: Clock) -> None:
    bans.ban(A, "sends noise", for_s=3600)
    assert bans.why(A) == "banned here for another 1 h 0 min: sends noise"
    bans.ban(B, "sends noise", for_s=7 * 86_400.0)
    assert bans.why(B) == "banned here for another 7 d 0 h: sends noise"
    bans.lift(B)
    assert not bans.why(B)
    clock.now_s += 3601
    assert not bans.why(A)


def test_a_running_peer_takes_up_what_another_program_writes(bans: BanList, tmp_path: Path, clock: Clock) -> None:
    assert not bans.why(A)
    other = BanList(tmp_path / "bans.json", clock=clock)
    other.ban(A, "x", for_s=3600)
    clock.now_s += 2
    assert bans.why(A)
    assert other.lift(A)
    assert not other.lift(A)
    clock.now_s += 2
    assert not bans.why(A)


def test_a_banned_peer_is_found_by_the_name_that_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BanList(tmp_path / "bans.json").ban(A, "sends noise", for_s=3600, name="Bob")
    assert run(["ban", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{A} Bob is banned here for another 1 h")
    assert run(["ban", "bob", "--lift", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{A} is no longer banned\n"
    assert not BanList(tmp_path / "bans.json").all()


def test_three_faults_within_minutes_are_out_for_an_hour(bans: BanList, clock: Clock) -> None:
    for number in range(int(STRIKES)):
        assert not bans.why(A), number
        bans.strike(A, "chunk 3 is damaged")
        clock.now_s += 30
    assert "chunk 3 is damaged" in bans.why(A)
    clock.now_s += STRUCK_OUT_S
    assert not bans.why(A)


def test_bans_of_strangers_end_no_ban_of_the_owner(bans: BanList, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_p2p.bans.MAX_BANS", 2)
    bans.ban(A, "spams", for_s=7 * 86_400.0)
    for name in ("x", "y", "z"):
        bans.ban(identity_of(name).peer_id, "sends noise", for_s=3600.0)
    assert bans.why(A)
    assert len(bans.all()) == 2


def test_faults_fade(bans: BanList, clock: Clock) -> None:
    for _ in range(50):
        bans.strike(A, "chunk 3 is damaged")
        assert not bans.why(A)
        clock.now_s += 2 * STRIKE_HALF_LIFE_S


def test_what_is_no_peer_id_and_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not a peer id"):
        BanList(tmp_path / "bans.json").ban("somebody", "x", for_s=60)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        BanList(tmp_path / "file" / "bans.json").ban(A, "x", for_s=60)


def test_a_damaged_file_bans_nobody_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "bans.json").write_text('{"a": 3}')
    assert not BanList(tmp_path / "bans.json").why(A)


def test_a_list_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "bans.json"
    file.write_text(damaged := '{"a": 3}')
    with pytest.raises(SettingsError, match="repair the file, or move it away"):
        BanList(file).ban(A, "sends noise", for_s=60)
    assert file.read_text() == damaged
    file.unlink()
    bans = BanList(file)
    bans.ban(A, "sends noise", for_s=60)
    assert bans.why(A)


def test_a_clock_that_was_ahead_once_hides_no_ban(bans: BanList, tmp_path: Path, clock: Clock) -> None:
    clock.now_s += 365 * 86400.0
    assert not bans.why(A)
    bans.strike(B, "sent noise")
    clock.now_s -= 365 * 86400.0
    BanList(tmp_path / "bans.json", clock=clock).ban(A, "sends noise", for_s=3600)
    assert bans.why(A)
    bans.strike(B, "sent noise")
    assert not bans.why(B)
