from __future__ import annotations

from pathlib import Path

import pytest

from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import GROUPS, PeerSettings, parse_hours, parse_rate, split_address
from noloco_p2p.spec import TrainerSpec

BOOTSTRAP = "/ip4/203.0.113.5/tcp/4001/p2p/12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "noloco" / "settings.toml"
    file.parent.mkdir()
    return file


def test_flags_beat_the_environment_and_that_beats_the_file(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file.write_text('threads = 1\ndevice = "cpu"\nlisten = "127.0.0.1:1000"\n')
    monkeypatch.setenv("NOLOCO_DEVICE", "auto")
    monkeypatch.setenv("NOLOCO_LISTEN", "127.0.0.1:2000")
    settings = PeerSettings.load({"listen": "127.0.0.1:3000", "device": None})
    assert (settings.threads, settings.device, settings.listen) == (1, "auto", "127.0.0.1:3000")


def test_lists_and_bindings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOLOCO_BOOTSTRAP", f"{BOOTSTRAP},{BOOTSTRAP}")
    monkeypatch.setenv("NOLOCO_DATA", "c4=/data/*.gz,other=/x=y.txt")
    settings = PeerSettings.load()
    assert settings.bootstrap == (BOOTSTRAP, BOOTSTRAP)
    assert settings.data == {"c4": "/data/*.gz", "other": "/x=y.txt"}


def test_folders_are_absolute_and_need_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = PeerSettings.load({"state_dir": "here", "models": {"llama": "llama"}})
    assert (settings.state_dir, settings.models) == (tmp_path / "here", {"llama": str(tmp_path / "llama")})


@pytest.mark.parametrize(
    ("listen", "ports"),
    [("0.0.0.0:31337", (31337, 31338)), ("31337", (31337, 31338)), ("127.0.0.1:0", (0, 0)), ("[::]:9", (9, 10))],
)
def test_libp2p_takes_the_port_beside(listen: str, ports: tuple[int, int]) -> None:
    settings = PeerSettings.load({"listen": listen})
    assert (settings.listen_port, settings.libp2p_port) == ports


@pytest.mark.parametrize(
    ("announce", "announced"),
    [
        ("", ("", 0)),
        ("peer.example", ("peer.example", 0)),
        ("h:99", ("h", 99)),
        ("::1", ("::1", 0)),
        ("[::1]:99", ("[::1]", 99)),
    ],
)
def test_what_is_announced(announce: str, announced: tuple[str, int]) -> None:
    assert PeerSettings.load({"announce": announce}).announced == announced


@pytest.mark.parametrize(
    ("when", "hours"),
    [("always", None), ("idle", None), ("22:00-07:30", (1320, 450)), ("00:00-23:59", (0, 1439))],
)
def test_when_to_train(when: str, hours: tuple[int, int] | None) -> None:
    assert parse_hours(PeerSettings.load({"when": when}).when) == hours


@pytest.mark.parametrize("when", ["", "never", "7:00-9:00", "22-7", "24:00-07:00", "10:60-11:00", "08:00-08:00"])
def test_other_times_are_refused_with_the_forms(when: str) -> None:
    with pytest.raises(
        SettingsError, match=f"when '{when}' is not valid; use always, idle, or two different times such as"
    ):
        PeerSettings.load({"when": when})


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"),
    [
        *(("40mbit", 5e6), ("40 Mbit/s", 5e6), ("2.5mbit", 312_500), ("8000kbit", 1e6), ("1Gbit", 125e6)),
        *(("5MB/s", 5e6), ("500kB/s", 5e5), ("1.5 GB/s", 1.5e9), (" 40mbit ", 5e6)),
    ],
)
def test_rates_are_in_bits_or_in_bytes(rate: str, bytes_per_s: float) -> None:
    assert parse_rate(rate) == bytes_per_s


@pytest.mark.parametrize(
    "rate",
    ["40", "40mb", "5mb/s", "5MB", "5mB/s", "40 mbits", "-5mbit", "inf", "nanmbit", "1e3mbit", "mbit", "5 5mbit"],
)
def test_a_rate_that_could_be_either_is_refused_with_the_forms(rate: str) -> None:
    with pytest.raises(ValueError, match="2500kbit, 40mbit, 1gbit, 500kB/s or 5MB/s"):
        parse_rate(rate)


def test_caps_come_from_every_source_and_are_off_at_first(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PeerSettings.load()
    assert (settings.upload_bytes_per_s, settings.download_bytes_per_s) == (None, None)
    user_file.write_text('max_upload = "40mbit"\n')
    monkeypatch.setenv("NOLOCO_MAX_DOWNLOAD", "12MB/s")
    settings = PeerSettings.load()
    assert (settings.upload_bytes_per_s, settings.download_bytes_per_s) == (5e6, 12e6)
    assert PeerSettings.load({"max_upload": "8mbit"}).upload_bytes_per_s == 1e6
    monkeypatch.setenv("NOLOCO_MAX_DOWNLOAD", "fast")
    with pytest.raises(SettingsError, match=r"environment NOLOCO_\*: max_download 'fast' is not a rate"):
        PeerSettings.load()


def test_every_setting_is_in_one_group_of_the_help() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(PeerSettings.model_fields)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1"])
def test_split_address_refuses(address: str) -> None:
    with pytest.raises(ValueError, match="must have the form HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("NOLOCO_DEVCIE", "did you mean NOLOCO_DEVICE?"),
        ("noloco_device", "did you mean NOLOCO_DEVICE?"),
        ("NOLOCO_MODEL", "did you mean NOLOCO_MODELS?"),
        ("NOLOCO_STATEDIR", "did you mean NOLOCO_STATE_DIR?"),
        ("NOLOCO_XYZZY", "docs/reference.md lists all settings"),
        ("NOLOCO_IMAGE", ""),
        ("NOLOCO_DEVICE", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_told(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "cpu")
    PeerSettings.load()
    assert [record.message.partition("setting: ")[2] for record in caplog.records] == [said] * bool(said)


def test_names_on_the_command_line_that_the_spec_does_not_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TrainerSpec.from_dict({"name": "r", "data": {"source": "chats"}}, origin="run.toml")
    monkeypatch.setenv("NOLOCO_DATA", "other=/x")
    PeerSettings.load().check_names(spec)  # it may be for another run
    PeerSettings.load({"data": ["chats=/x", "chats.validation=/y"]}).check_names(spec)
    with pytest.raises(SettingsError, match="the spec names no data set 'c4'; it reads 'chats'"):
        PeerSettings.load({"data": ["chats=/x", "c4=/y"]}).check_names(spec)
    with pytest.raises(SettingsError, match="the spec names no model 'm'; it uses none"):
        PeerSettings.load({"models": ["m=/x"]}).check_names(spec)
    adapted = spec.with_changes({"model.pretrained": "m", "data.tokenizer": "t"})
    PeerSettings.load({"models": ["m=/x", "t=/y"]}).check_names(adapted)
