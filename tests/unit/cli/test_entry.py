from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.cli.app import run
from noloco_p2p.cli.entry import check_writable, opened, write
from noloco_p2p.errors import SettingsError
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.ticket import MAX_FILE_BYTES, Ticket, contents


def test_a_secret_ticket_is_for_this_user_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0o022))
    for is_secret, mode in ((True, 0o600), (False, 0o666 & ~before)):
        file = tmp_path / f"ticket-{is_secret}"
        for text in ("noloco1abc", "noloco1def"):
            write(file, text, flag="--ticket-file", is_secret=is_secret)
        assert file.stat().st_mode & 0o777 == mode
        assert contents(f"@{file}", timeout_s=0) == "noloco1def"
    assert len([*tmp_path.iterdir()]) == 2
    assert contents("run.toml") == "run.toml"


def test_a_file_of_another_editor_may_begin_with_the_mark_of_utf8(tmp_path: Path) -> None:
    file, spec = tmp_path / "ticket", tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfnoloco1abc\r\n")
    assert contents(f"@{file}", timeout_s=0) == "noloco1abc"
    assert run(["init", str(spec)]) == 0
    expected = TrainerSpec.load(spec).digest()
    spec.write_bytes(b"\xef\xbb\xbf" + spec.read_bytes().replace(b"\n", b"\r\n"))
    assert TrainerSpec.load(spec).digest() == expected


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_without_the_streams_that_its_caller_has_closed(tmp_path: Path, closed: str) -> None:
    verb = f"-m noloco_p2p id --state-dir {tmp_path}"
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} {verb} {closed}"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "identity.key").exists()


def test_a_file_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.touch()  # it exists but is empty: the wait continues
    later = threading.Timer(0.3, write, (file, "noloco1abc"), {"flag": "--ticket-file"})
    later.start()
    assert contents(f"@{file}", timeout_s=PATIENCE_S) == "noloco1abc"
    later.join()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "was not written within 0 s"),
        ("a" * (MAX_FILE_BYTES + 1), "bytes"),
    ],
)
def test_what_is_no_entry_is_told(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text(content)
    with pytest.raises(SettingsError, match=said):
        contents(f"@{file}", timeout_s=0)


def test_a_place_that_cannot_be_written_is_told_early(tmp_path: Path) -> None:
    check_writable(None, flag="--ticket-file")
    check_writable(tmp_path / "ticket", flag="--ticket-file")
    for wrong in (tmp_path, tmp_path / "missing" / "ticket"):
        with pytest.raises(SettingsError, match="--ticket-file"):
            check_writable(wrong, flag="--ticket-file")
        with pytest.raises(SettingsError, match="cannot be written"):
            write(wrong, "noloco1abc", flag="--ticket-file")


def test_a_ticket_is_found_in_a_saved_mail(tmp_path: Path) -> None:
    ticket, file = Ticket("demo", "0" * 64), tmp_path / "mail.txt"
    file.write_text(f"Hi,\n> noloco join {ticket.encode()[:60]}\n> {ticket.encode()[60:]}.\nBye")
    assert opened(f"@{file}") == opened(f'"{ticket.encode()}"') == ticket


def test_a_spec_is_no_ticket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 3: the content of the file is not taken as another file to read."""
    file = tmp_path / "ticket"
    file.write_text(str(tmp_path / "run.toml"))
    assert run(["join", f"@{file}", "--state-dir", str(tmp_path)]) == 3
    assert "not a ticket" in capsys.readouterr().err


def test_a_missing_file_is_told_before_the_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match="was not written within"):
        contents(f"@{tmp_path / 'ticket'}", timeout_s=0.5)
    assert caplog.text.count(f"waiting up to 0 s for {tmp_path / 'ticket'} to be written") == 1
    with pytest.raises(SettingsError, match=r"the folder .* does not exist"):
        contents(f"@{tmp_path / 'no' / 'ticket'}", timeout_s=60)
