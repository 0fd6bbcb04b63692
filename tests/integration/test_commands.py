"""The commands as users type them: real processes on loopback, one small swarm for all tests of this file.

    bootstrap    noloco bootstrap
    first        noloco join SPEC --bootstrap @FILE, which the bootstrap writes
    second       noloco join TICKET, once the first one has written a checkpoint that a newcomer can take

The tests are independent of each other.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness.patience import PATIENCE_S
from harness.processes import Command, PeerProcess, noloco, small_spec, until, write_spec

from noloco_p2p.cli.app import run
from noloco_p2p.data.stream import Corpus, TokenStream
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.records import TTL_S
from noloco_p2p.ticket import Ticket
from noloco_p2p.trainer.model import build_tokenizer

STATUS_KEYS = {
    "peer_id",
    "pid",
    "run",
    "state",
    "address",
    "ticket",
    "live_peers",
    "step",
    "swaps",
    "loss",
    "is_announced",
    "last_fault",
}
MAX_BOOTSTRAP_BYTES = 400e6 if torch.version.cuda is None else 1e9  # a CUDA build of torch maps as much again
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"  # nothing listens on port 9 here


@dataclass(frozen=True)
class Swarm:
    spec: TrainerSpec
    spec_file: Path
    bootstrap: Command
    bootstrap_address: str
    first: PeerProcess
    second: PeerProcess
    lost: Command  # `noloco monitor` with a ticket that leads nowhere, which keeps looking for a while


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("swarm")
    spec = small_spec("commands", evaluate__every_steps=200)
    spec_file = write_spec(spec, folder)
    entry = folder / "entry"
    flags = ("--state-dir", folder / "bootstrap", "--listen", "127.0.0.1:0", "--address-file", entry)
    nowhere = Ticket("commands", spec.digest(), (DEAD,)).encode()
    with (
        Command("bootstrap", *flags, log=folder / "bootstrap.txt") as bootstrap,
        Command("monitor", nowhere, log=folder / "lost.txt") as lost,
    ):
        address = bootstrap.wait_for("others can join with:").split()[-1]
        files = ("--bootstrap", f"@{entry}", "--ticket-file", str(folder / "ticket"))
        with PeerProcess(spec_file, folder / "first", *files, "--save-every-s", "2") as first:
            until(lambda: any(event["step"] > 200 for event in first.events("saved")), what="a trained checkpoint")
            limits = ("--max-upload", "1gbit", "--max-download", "1gbit")
            with PeerProcess(first.ticket, folder / "second", *limits) as second:
                second.swap_with(first)
                first.give_way()
                second.give_way()
                yield Swarm(spec, spec_file, bootstrap, address, first, second, lost)


def test_join_prints_a_ticket_where_it_starts_a_run_and_there_alone(swarm: Swarm) -> None:
    assert [peer.text.count("noloco1") for peer in (swarm.first, swarm.second)] == [1, 0]
    for peer in (swarm.first, swarm.second):
        ticket = Ticket.decode(peer.ticket)
        assert (ticket.run_name, ticket.spec_digest) == ("commands", swarm.spec.digest())
        assert ticket.addresses[0].endswith(peer.peer_id)
    assert swarm.bootstrap_address in Ticket.decode(swarm.first.ticket).addresses


def test_join_says_that_a_peer_relays_unless_its_upload_is_limited(swarm: Swarm) -> None:
    assert "it also relays up to 32 calls between other peers" in swarm.first.text
    assert "relays" not in swarm.second.text


def test_a_newcomer_starts_where_its_donor_stood(swarm: Swarm) -> None:
    start = swarm.second.events("evaluated")[0]
    assert start["step"] == 1
    assert start["validation_loss"] < swarm.first.events("evaluated")[0]["validation_loss"] - 1
    saved = [event["step"] / swarm.spec.train.total_steps for event in swarm.first.events("saved")]
    began = swarm.second.event("started")["progress"]
    assert any(began == pytest.approx(progress) for progress in saved)


def test_the_way_in_is_handed_on_in_files(swarm: Swarm, capsys: pytest.CaptureFixture[str]) -> None:
    folder = swarm.spec_file.parent
    assert (folder / "entry").read_text() == f"{swarm.bootstrap_address}\n"
    assert (folder / "ticket").read_text() == f"{swarm.first.ticket}\n"
    assert run(["monitor", f"@{folder / 'ticket'}"]) == 0
    assert "run commands | peers alive 2" in capsys.readouterr().out


def test_the_spec_that_came_from_a_peer_is_kept(swarm: Swarm) -> None:
    kept = swarm.second.folder / "runs" / swarm.spec.run_id / "spec.json"
    assert kept.read_bytes() == swarm.spec.canonical_json()


def test_status(swarm: Swarm) -> None:
    people = noloco("status", "--state-dir", swarm.second.folder)
    assert people.returncode == 0
    assert f"peer      {swarm.second.peer_id}" in people.stdout
    assert "1 other live peer;" in people.stdout
    assert "reach     " in people.stdout
    machines = json.loads(noloco("status", "--state-dir", swarm.second.folder, "--json").stdout)
    assert machines.keys() >= STATUS_KEYS
    assert machines["swaps"] >= 1
    assert machines["last_partner"] == swarm.first.peer_id
    doors = Ticket.decode(machines["ticket"]).addresses
    assert {door.rpartition("/")[2] for door in doors} >= {swarm.first.peer_id, swarm.second.peer_id}
    assert machines["reach"]["state"] == "direct"
    assert "peers that dialled back reached port" in machines["reach"]["sentence"]


def test_the_ticket_of_a_founder_holds_the_peers_that_came_later(swarm: Swarm) -> None:
    printed = noloco("ticket", "--state-dir", swarm.first.folder)
    doors = Ticket.decode(printed.stdout.strip()).addresses
    peers = [door.rpartition("/")[2] for door in doors]
    assert peers[0] == swarm.first.peer_id
    assert swarm.second.peer_id in peers
    assert swarm.bootstrap_address in doors


def test_status_of_a_bootstrap(swarm: Swarm) -> None:
    folder = swarm.bootstrap.log.parent / "bootstrap"
    reply = json.loads(noloco("status", "--state-dir", folder, "--json").stdout)
    assert (reply["state"], reply["addresses"]) == ("bootstrap", [swarm.bootstrap_address])
    assert "DHT nodes" in noloco("status", "--state-dir", folder).stdout


def test_a_bootstrap_is_small(swarm: Swarm) -> None:
    processes = [psutil.Process(swarm.bootstrap.process.pid), swarm.bootstrap.p2pd()]
    assert sum(process.memory_info().rss for process in processes) < MAX_BOOTSTRAP_BYTES


def test_a_paused_peer_keeps_its_place_and_goes_on(swarm: Swarm, capsys: pytest.CaptureFixture[str]) -> None:
    def say(verb: str) -> tuple[int, str]:
        code = run([verb, "--state-dir", str(swarm.second.folder)])
        return code, capsys.readouterr().out.strip()

    assert say("resume") == (0, "the peer is not paused: it is training")
    assert say("pause") == (0, "the peer is paused: it will neither train nor swap until you run `noloco resume`")
    try:
        assert say("pause") == (0, "the peer is already paused; run `noloco resume` to resume it")
        paused = swarm.second.event("paused")
        one, two = (swarm.first.report_where(lambda event: True) for _ in range(2))
        assert two["swaps"] == one["swaps"]
        assert two["step"] > one["step"], "nobody waits for a peer that is paused"
        assert say("status")[1].splitlines()[2].startswith("state     paused for ")
    finally:
        assert say("resume") == (0, "the peer is training again")
    resumed = swarm.second.event("resumed")
    assert resumed["step"] == paused["step"]
    swarm.second.swap_with(swarm.first)


def test_monitor_watches_until_ctrl_c(swarm: Swarm, tmp_path: Path) -> None:
    log = tmp_path / "watch.txt"
    with Command("monitor", swarm.first.ticket, "--watch", "--interval", "0.2", log=log) as watch:
        until(lambda: watch.text.count("run commands | ") >= 2, what="two looks")
        assert f"..{swarm.second.peer_id[-6:]}" in watch.wait_for(swarm.second.peer_id[-6:])
        watch.send(signal.SIGINT)
        assert watch.wait() == 130
        assert "Traceback" not in watch.text


@pytest.mark.parametrize("flags", [("--watch",), ("--watch", "--json")], ids=["lines", "json"])
def test_a_monitor_that_is_terminated_leaves_nothing_behind(
    swarm: Swarm, tmp_path: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Command("monitor", swarm.first.ticket, *flags, "--interval", "0.2", log=tmp_path / "watch.txt") as watch:
        watch.wait_for(swarm.second.peer_id[-6:])
        assert [*temporary.glob("noloco-reader-*/identity.key")]
        watch.send(signal.SIGTERM)
        assert watch.wait() == 130
        assert "Traceback" not in watch.text
    assert not [*temporary.iterdir()]


def test_the_mean_of_the_live_swarm_is_a_model_that_transformers_loads(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    until(lambda: swarm.second.events("saved") or None, what="a state to merge")
    assert run(["export", "--merge", swarm.first.ticket, str(tmp_path / "model")]) == 0
    assert "the mean of 2 peers of run commands" in capsys.readouterr().out
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == swarm.spec.model.num_parameters()
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("def")["input_ids"], skip_special_tokens=True) == "def"


def test_a_fork_goes_on_from_the_weights_of_a_live_peer(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, folder = tmp_path / "new.toml", tmp_path / "fork"
    assert run(["fork", swarm.first.ticket, str(new), "--set", "outer.alpha=0.3", "--state-dir", str(folder)]) == 0
    assert f"noloco join {new} --state-dir {folder}" in capsys.readouterr().out
    forked = TrainerSpec.load(new)
    assert (forked.name, forked.outer.alpha) == ("commands-fork", 0.3)
    with PeerProcess(new, folder, "--max-steps", "1") as peer:
        assert peer.wait() == 0
        begin = peer.events("evaluated")[0]
    assert begin["step"] == 1
    assert begin["validation_loss"] < swarm.first.events("evaluated")[0]["validation_loss"] - 1
    # export accepts the folder of a run in place of a checkpoint.
    assert run(["export", str(folder / "runs" / forked.run_id), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").exists()


def test_a_ticket_that_leads_nowhere_is_4(swarm: Swarm) -> None:
    assert swarm.lost.wait() == 4
    [line] = swarm.lost.text.splitlines()
    assert line.startswith("noloco: ask for a new ticket: no live peer of run commands was found within 10 s (")
    assert "Connection refused" in line


def test_monitor_enters_through_the_peer_on_this_machine(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Ticket("commands", swarm.spec.digest(), (DEAD,)).encode()
    for ticket in ((), (nowhere,)):
        assert run(["monitor", *ticket, "--state-dir", str(swarm.second.folder)]) == 0
        assert "run commands | peers alive 2" in capsys.readouterr().out
    assert run(["monitor", "--state-dir", str(tmp_path)]) == 3
    assert "pass a ticket" in capsys.readouterr().err


def hours(first_min: int, end_min: int, *, now: datetime) -> str:
    """Format hours that start and end at these offsets in minutes from the current minute."""
    times = (now + timedelta(minutes=minutes) for minutes in (first_min, end_min))
    return "-".join(time.strftime("%H:%M") for time in times)


def test_a_named_peer_waits_for_its_hours_and_says_so(
    swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = hours(120, 180, now=datetime.now())
    flags = ("--name", "  Night Owl", "--when", later, "--hide-contribution")
    with PeerProcess(swarm.first.ticket, tmp_path / "owl", *flags) as owl:

        def told(*arguments: str) -> str:
            assert run([*arguments]) == 0
            return capsys.readouterr().out.strip()

        def say(verb: str, *flags: str) -> str:
            return told(verb, "--state-dir", str(owl.folder), *flags)

        assert owl.event("paused")["paused_by"] == "hours"
        why = f"the current time is outside {later}; training will resume automatically"
        owl.wait_for(f"paused: {why}")
        lines = say("status").splitlines()
        assert lines[1] == "name      Night Owl"
        assert f"why       {why}" in lines
        assert say("resume") == f"the peer remains paused: {why}. To train now, restart it with --when always"
        assert say("pause").startswith("the peer is paused: it will neither train nor swap")
        assert json.loads(say("status", "--json"))["paused_by"] == "asked"
        assert say("resume") == f"the peer remains paused: {why}. To train now, restart it with --when always"

        def seen() -> list[dict[str, Any]]:
            peers = json.loads(told("monitor", swarm.first.ticket, "--json"))["peers"]
            return peers if any(peer["paused_by"] == "hours" for peer in peers) else []  # its last record says "asked"

        peers = until(seen, what="the reason of the pause in the monitor")
        [shown] = [peer for peer in peers if peer["peer_id"] == owl.peer_id]
        assert (shown["name"], shown["state"], shown["paused_by"]) == ("Night Owl", "paused", "hours")
        assert (shown["trained_s"], shown["tokens"]) == (None, None), "hidden"
        assert all(peer["tokens"] > 0 for peer in peers if peer["peer_id"] == swarm.first.peer_id)
        assert "the peer has left" in say("leave")
        assert owl.wait() == 0
        assert owl.event("stopped")["step"] == 0
        assert owl.text.splitlines()[-1] == "left; run the same command to resume"


@pytest.mark.slow
def test_a_peer_trains_once_its_hours_begin(tmp_path: Path) -> None:
    """The test follows the wall clock for at most 90 seconds. The peer has at least 30 of them to start."""
    now = datetime.now()
    flags = ("--when", hours(1 if now.second < 30 else 2, 180, now=now))
    with PeerProcess(write_spec(small_spec("hours"), tmp_path), tmp_path / "p", *flags) as peer:
        assert peer.event("paused")["paused_by"] == "hours"
        assert not peer.events("report")
        peer.event("resumed")
        peer.report_where(lambda event: event["step"] > 0)


def test_leaving_keeps_everything_and_the_same_command_resumes(swarm: Swarm, tmp_path: Path) -> None:
    """The peer exits with code 0, a last checkpoint and a final line; no process, socket or lock remains."""
    with PeerProcess(swarm.first.ticket, tmp_path / "guest", "--name", "Guest") as guest:
        guest.event("report")
        guest.give_way()
        p2pd = guest.p2pd()
        daemon_socket = Path(next(a for a in p2pd.cmdline() if a.startswith("-listen="))[len("-listen=/unix") :])
        assert daemon_socket.exists()
        swarm.first.report_where(lambda event: event["live_peers"] == 2)
        banned = noloco("ban", "Guest", "--state-dir", swarm.first.folder)
        assert banned.stdout.startswith(f"{guest.peer_id} Guest is banned here for another "), banned.stderr
        assert noloco("ban", "guest", "--lift", "--state-dir", swarm.first.folder).returncode == 0
        done = noloco("leave", "--state-dir", guest.folder)
        assert (done.returncode, "the peer has left" in done.stdout) == (0, True)
        assert guest.wait() == 0
        stopped = guest.event("stopped")
        assert guest.text.splitlines()[-1] == "left; run the same command to resume"
        # The farewell removes it: without one its record would live longer.
        until(lambda: swarm.first.events("report")[-1]["live_peers"] == 1, timeout_s=0.7 * TTL_S, what="one peer left")
    assert not psutil.pid_exists(p2pd.pid)
    assert not daemon_socket.exists()
    assert not (guest.folder / "control.sock").exists()
    assert json.loads(noloco("status", "--state-dir", guest.folder, "--json").stdout) == {"state": "not running"}

    checkpoint = Checkpoint(Path(guest.event("saved", step=stopped["step"])["folder"]))
    assert checkpoint.step == stopped["step"]
    with PeerProcess(swarm.first.ticket, guest.folder) as again:
        started = again.event("started")
        again.give_way()  # other peers yield too, and peers of one speed find each other at once
        again.report_where(lambda event: event["swaps"] > stopped["swaps"])
        again.send(signal.SIGTERM)
        assert again.wait() == 0
        end = again.event("stopped")
        after = Checkpoint(Path(again.event("saved", step=end["step"])["folder"]))
    assert (started["resumed_at"], started["peer_id"]) == (stopped["step"], guest.peer_id)
    assert started["address"] == guest.event("started")["address"]
    steps = end["step"] - stopped["step"]
    assert end["tokens"] - stopped["tokens"] == steps * swarm.spec.train.batch_size * swarm.spec.data.sequence_length
    assert end["trained_s"] > stopped["trained_s"] > 0, "what it gave before counts"
    assert after.meta["data"] == _batches_later(steps, swarm.spec, guest.peer_id, checkpoint.meta["data"])


def _batches_later(num_batches: int, spec: TrainerSpec, peer_id: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the token stream some batches later."""
    corpus = Corpus(spec.data, build_tokenizer(spec.data), {})
    stream = TokenStream(corpus, peer_id=peer_id, batch_size=spec.train.batch_size)
    stream.load_state_dict(state)
    for _ in range(num_batches):
        next(stream)
    return stream.state_dict()


ON_A_TERMINAL = """
import os, pty, sys
status = pty.spawn(["/bin/sh", "-c", 'stty cols 40; exec "$0" -m noloco_p2p "$@"', sys.executable, *sys.argv[1:]])
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_on_a_terminal_the_ticket_is_one_line_and_ctrl_c_is_polite(swarm: Swarm, tmp_path: Path) -> None:
    join = ("join", str(swarm.spec_file), "--bootstrap", swarm.bootstrap_address, "--state-dir", str(tmp_path / "p"))
    command = [sys.executable, "-c", ON_A_TERMINAL, *join, "--listen", "127.0.0.1:0", "--threads", "1"]
    log = tmp_path / "terminal.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, start_new_session=True) as process,
    ):
        assert process.stdin is not None
        try:
            until(lambda: "tokens/s |" in log.read_text(), what=log.read_text)
            process.stdin.write(b"\x03")  # the byte of Ctrl-C: the terminal sends SIGINT to the whole group
            process.stdin.flush()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    text = log.read_text()
    tickets = [line for line in text.splitlines() if "noloco1" in line]
    assert len(tickets) == 1
    assert Ticket.decode(tickets[0].removeprefix("noloco join ")).run_name == "commands"
    assert "\x1b" not in tickets[0]  # only a progress bar may have colours, where there is time to draw one
    assert "press Ctrl-C again to exit immediately" in text
    assert text.splitlines()[-1] == "left; run the same command to resume"


def test_a_peer_that_is_starting_is_found(swarm: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "state"
    flags = ("--state-dir", folder, "--listen", "127.0.0.1:0")
    with Command("join", swarm.spec_file, *flags, log=tmp_path / "log.txt") as early:
        early.wait_for("starting (")
        assert run(["status", "--state-dir", str(folder)]) == 0
        assert run(["leave", "--state-dir", str(folder)]) == 1
    assert capsys.readouterr().out.count(f"the peer in {folder} is still starting") == 2


def test_a_bootstrap_leaves_in_order(tmp_path: Path) -> None:
    flags = ("--state-dir", tmp_path / "state", "--listen", "127.0.0.1:0")
    with Command("bootstrap", *flags, log=tmp_path / "log.txt") as bootstrap:
        bootstrap.wait_for("others can join with:")
        p2pd = bootstrap.p2pd()
        bootstrap.send(signal.SIGINT)
        assert bootstrap.wait() == 0
    assert not psutil.pid_exists(p2pd.pid)
    assert bootstrap.text.splitlines()[-1] == "left"
