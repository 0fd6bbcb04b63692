"""A user's mistake ends in one sentence and the exit code that design.md names, never in a traceback."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_p2p.cli.app import run
from noloco_p2p.control import hold
from noloco_p2p.ticket import Ticket

TICKET = Ticket("tiny", "0" * 64).encode()


WRONG_SETTINGS = [
    (["--listen", "nowhere"], "listen 'nowhere' must have the form HOST:PORT"),
    (["--listen", "localhost:0"], "must begin with an IP address of this machine"),
    (["--listen", "127.0.0.1:65535"], "leaves no port for libp2p, which uses PORT+1"),
    (["--listen", "203.0.113.5:4000"], "203.0.113.5 is not an address of this machine"),
    (["--announce", "host:abc"], "announce 'host:abc' must have the form HOST:PORT"),
    (["--device", "tpu"], "device 'tpu' is not a known device; use auto, cpu, cuda:N (NVIDIA, AMD) or mps (Apple)"),
    (["--device", "cuda:97"], "--device cuda:97: torch found"),
    (["--threads", "-1"], "threads must be greater than or equal to 0; it is -1"),
    (["--max-steps", "0"], "max_steps must be greater than 0; it is 0"),
    (["--max-upload", "40mb"], "max_upload '40mb' is not a rate in bits or bytes, such as 2500kbit, 40mbit"),
    (["--max-download", "1mbit"], "max_download '1mbit' is too low: the minimum is 2mbit (250kB/s)"),
    (["--data", "c4"], "data 'c4' must have the form NAME=VALUE, for example c4='/data"),
    (["--bootstrap", "somewhere"], "bootstrap 'somewhere' is not a peer address such as /ip4/"),
    (["--state-dir", "/proc/nothing"], "cannot be used as the state folder"),
]


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ignore the settings of the user who runs the tests, and restore the signal handlers."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    assert run(["init", str(path)]) == 0
    return path


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Run a command; return its exit code and the last line of standard error."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return code, error.strip().splitlines()[-1] if error.strip() else ""


@pytest.mark.parametrize("verb", ["join", "service"])
@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        (["--set", "data.source=mine"], "", "trains on data named 'mine', which is not bound to files"),
        (["--set", "data.source=mine"], "mine=nothing/*.txt", "--data mine=nothing/*.txt matches no files"),
        (["--private"], "", "the run tiny is private: join with a ticket, or with --run-key FILE"),
    ],
)
def test_missing_data_and_a_missing_run_key_are_3(
    verb: str,
    changes: list[str],
    flags: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["init", "run.toml", *changes]) == 0
    if flags:
        monkeypatch.setenv("NOLOCO_DATA", flags)
    flag = ["--listen", "127.0.0.1:0"] if verb == "join" else ["--print"]
    found, line = complaint(capsys, verb, "run.toml", *flag)
    assert (found, said in line) == (3, True), line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("beta = 1.0", "beta = 2.5", "outer.gamma must be < 2 (1 - alpha^2) = 2"),
        ("inner_steps = 50", 'inner_steps = "few"', "outer.inner_steps"),
        ("alpha = 0.0", "alfa = 0.5", "outer.alfa is not a known field; did you mean outer.alpha?"),
        ('name = "tiny"', 'name = "my run"', "name 'my run' is not a valid name of the run: letters, digits, '.'"),
        ("[outer]", "[outer", "; if it contains a ticket, write @"),
        ('source = "stdlib"', 'source = "/etc/passwd"', "a spec cannot contain a path"),
    ],
)
def test_a_wrong_spec_is_3_and_names_the_field(
    old: str, new: str, said: str, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = spec.read_text()
    assert old in text
    spec.write_text(text.replace(old, new, 1))
    code, line = complaint(capsys, "join", spec)
    assert (code, said in line) == (3, True), line


def _server_after_free_ports(num_free: int) -> socket.socket:
    """Take a port that has `num_free` free ports before it; other programs may use the neighbours of a random port."""
    for _ in range(100):
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        try:
            for before in range(1, num_free + 1):
                socket.create_server(("127.0.0.1", port - before)).close()
        except OSError:
            taken.close()
        else:
            return taken
    raise AssertionError("every port that was tried has a neighbour in use")


@pytest.mark.parametrize(("verb", "offset"), [("join", 0), ("join", 1), ("bootstrap", 1)])
def test_a_port_in_use_is_3_be_it_grpc_or_libp2p(
    verb: str, offset: int, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _server_after_free_ports(offset) as taken:
        port = taken.getsockname()[1]
        target = [spec] if verb == "join" else []
        code, line = complaint(capsys, verb, *target, "--listen", f"127.0.0.1:{port - offset}")
    assert (code, f"port {port} on 127.0.0.1 is already in use" in line) == (3, True), line


@pytest.mark.parametrize("verb", ["join", "bootstrap"])
def test_a_second_peer_in_one_state_folder_is_3(
    verb: str, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = hold(tmp_path / "peer")
    target = [spec] if verb == "join" else []
    code, line = complaint(capsys, verb, *target, "--state-dir", tmp_path / "peer")
    lock.close()
    assert (code, "another peer is running in" in line) == (3, True), line


def test_settings_in_the_environment_and_in_the_file_name_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOLOCO_THREADS", "-3")
    assert complaint(capsys, "status")[1].startswith("noloco: environment NOLOCO_*: threads must be ")
    monkeypatch.delenv("NOLOCO_THREADS")
    file = tmp_path / "config" / "noloco" / "settings.toml"
    file.parent.mkdir(parents=True)
    file.write_text("thread = 1\n")
    code, line = complaint(capsys, "status")
    assert (code, line) == (3, f"noloco: {file}: thread is not a known field; did you mean threads?")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["init", "run.toml"], 3, "run.toml already exists; choose another name, or overwrite it with --force"),
        (["init", "--preset", "huge", "other.toml"], 3, "choose one of tiny, small, medium, large, paper, finetune"),
        (["init", "nowhere/run.toml"], 3, "cannot be written"),
        (["monitor", "run.toml"], 3, "a run spec, not a ticket"),
        (["evaluate", "nothing"], 1, "nothing does not exist"),
        (["evaluate", "exported"], 1, "exported is an exported model; this command reads a checkpoint"),
        (["export", TICKET, "out"], 3, "--merge requires a ticket"),
        (["export", "--merge", "checkpoint", "out"], 3, "--merge requires a ticket"),
        (["export", "nothing", "out"], 1, "nothing does not exist"),
        (["export", ".", "."], 3, "files are never overwritten"),
        (["fork", "run.toml", "run.toml"], 3, "run.toml already exists"),
        (["fork", "run.toml", "new.toml", "--set", "outer.alpha"], 3, "is not of the form KEY=VALUE"),
        (["fork", "run.toml", "new.toml", "--set", "outer.alfa=1"], 3, "did you mean outer.alpha?"),
        (["init", "other.toml", "--set", "learning_rate=1"], 3, "did you mean train.learning_rate?"),
        (["init", "other.toml", "--set", "banana=1"], 3, "banana is not a field of a run spec"),
        (["leave"], 1, ""),
        (["status"], 1, ""),
        (["fork", "run.toml", "new.toml", "--set", "model.seed=1"], 3, "the model cannot change"),
        (["fork", "run.toml", "new.toml"], 1, "this machine has no checkpoint of run tiny"),
        (["demo", "--json", "nowhere/report.json"], 3, "nowhere/report.json is not writable"),
        (["demo", "--keep", "."], 3, "is not empty"),
        ([], 2, ""),
        (["dance"], 2, "No such command 'dance'"),
        (["join"], 2, "Missing argument 'SPEC.toml|TICKET'"),
        (["init", "--prest", "tiny"], 2, "--prest"),
        (["join", "run.toml", "--threads", "many"], 2, "'--threads'"),
        (["demo", "--peers", "0"], 2, "'--peers'"),
        (["join", "nothing.toml"], 3, "does not exist; run `noloco init nothing.toml` to create it"),
        (["join", TICKET[7:]], 3, "..' is neither a file nor a ticket; tickets begin with noloco1: copy all of it"),
        (["join", ""], 3, "is a folder, and neither a spec nor a ticket"),
        (["join", TICKET[:-9]], 3, "the ticket is damaged: a part is missing or mistyped"),
        (["join", "noloco2" + TICKET[7:]], 3, "install a newer noloco_p2p"),
        *((["join", "run.toml", *flags], 3, said) for flags, said in WRONG_SETTINGS),
    ],
)
@pytest.mark.usefixtures("spec")
def test_a_mistake_is_one_sentence(
    arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")
    found, line = complaint(capsys, *arguments)
    assert (found, said in line) == (code, True), line
