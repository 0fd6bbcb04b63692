"""A live swarm of three peers in every view of it: terminal, page, metrics, status and doctor.

A headless Chromium drives the page; its test is skipped where none is installed. .ci/run installs one. With
NOLOCO_SCREENSHOTS=DIR the tests write the pictures of docs/ there.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyte
import pytest
from harness.patience import PATIENCE_S
from harness.processes import Command, PeerProcess, small_spec, until, write_spec

from noloco_p2p.cli.app import run
from noloco_p2p.swarm.records import TTL_S

LOSS = re.compile(r" training +[\d.]+ % +([\d.]+) ")  # a row of the table: state, done, loss
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NUM_PEERS = 3
PICTURES = os.environ.get("NOLOCO_SCREENSHOTS")
# By the number of the peer; the others have no name.
NAMES = {1: "Ada", 2: "Grace & Co."} if PICTURES else {1: "<b>Ada</b> & Co.", 2: "東京"}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Swarm:
    peers: list[PeerProcess]
    folder: Path

    @property
    def ticket(self) -> str:
        return self.peers[0].ticket


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("monitoring")
    spec = small_spec("watched")
    with ExitStack() as stack:
        first = stack.enter_context(
            PeerProcess(write_spec(spec, folder), folder / "peer-0", "--metrics", "127.0.0.1:0")
        )
        ticket = first.ticket
        others = [
            stack.enter_context(PeerProcess(ticket, folder / f"peer-{n}", "--name", NAMES.get(n, "")))
            for n in range(1, NUM_PEERS)
        ]
        peers = [first, *others]
        for peer in peers:
            peer.give_way()
        for peer in peers:
            peer.report_where(lambda event: event["swaps"] > 0)
        yield Swarm(peers, folder)


class Terminal:
    """A command in a pseudo-terminal of a given size, and the content of its screen."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24) -> None:
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self.resize(width, height, tell=False)
        environment = {**os.environ, "TERM": "xterm-256color"} | {"COLUMNS": "", "LINES": ""}
        environment = {name: value for name, value in environment.items() if value and name != "NO_COLOR"}
        command = [sys.executable, "-m", "noloco_p2p", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def resize(self, width: int, height: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(height, width)
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def lines(self) -> list[str]:
        """Return the current lines of the screen."""
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                data = os.read(self._master, 65_536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self._stream.feed(data)
        return [line.rstrip() for line in self.screen.display]

    def wait_for(self, *words: str) -> list[str]:
        def found() -> list[str] | None:
            lines = self.lines()
            return lines if all(any(word in line for line in lines) for word in words) else None

        return until(found, what=lambda: f"{words} in\n" + "\n".join(self.lines()))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._master)


def peer_lines(terminal: Terminal) -> list[str]:
    return [line for line in terminal.lines() if line.startswith("..")]


def names(swarm: Swarm) -> list[str]:
    return [f"..{peer.peer_id[-6:]}" for peer in swarm.peers]


def test_the_terminal_view_lives_resizes_and_goes_in_order(swarm: Swarm) -> None:
    terminal = Terminal("monitor", swarm.ticket, "--watch", "--interval", "0.5", "--sort", "loss")
    try:
        lines = terminal.wait_for("run watched | peers alive 3", "tokens/s", *names(swarm))
        until(lambda: all(map(LOSS.search, peer_lines(terminal))), what="losses")
        lines = terminal.lines()
        header = next(line for line in lines if line.startswith("peer"))
        assert {"state", "done", "loss", "tokens/s", "heard"} <= set(header.split())
        losses = [found[1] for line in lines if line.startswith("..") and (found := LOSS.search(line))]
        assert losses == sorted(losses)
        assert "trained on stdlib" in "".join(lines), "what is trained on what"
        terminal.resize(240, 30)
        wide = terminal.wait_for("version", "reach", "heard  failed")
        assert len(next(line for line in wide if line.startswith("peer"))) > 100
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(PATIENCE_S) == 0
        assert any("run watched | peers alive 3" in line for line in terminal.lines()), (
            "the last word stays on the screen"
        )
    finally:
        terminal.end()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command in this process, which has imported torch: (exit code, output)."""

    def say(*arguments: str | Path) -> tuple[int, str]:
        code = run([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return say


def test_plain_lines_and_json_show_what_swaps_measure(swarm: Swarm, say: Callable[..., tuple[int, str]]) -> None:
    code, plain = say("monitor", swarm.ticket, "--filter", names(swarm)[1][2:])
    assert code == 0
    assert "\x1b" not in plain
    shown = {line.split()[0] for line in plain.splitlines() if line.startswith("..")}
    assert names(swarm)[1] in shown, "and those whose last partner it was"

    def measured() -> dict[str, Any] | None:
        code, answer = say("monitor", swarm.ticket, "--json")
        assert code == 0
        seen = json.loads(answer)
        apart = [peer["apart"] for peer in seen["peers"]]  # a mean, which begins with that of newcomers
        return seen if all(each is not None and each < 1 for each in apart) else None

    seen = until(measured, what="a small distance in the record of each peer")
    assert {peer["peer_id"] for peer in seen["peers"]} == {peer.peer_id for peer in swarm.peers}
    totals = seen["totals"]
    assert 0 < totals["apart_lowest"] <= totals["apart"] <= totals["apart_highest"] < 1
    assert 0 < totals["link_use"] <= 1
    assert totals["swaps_per_min"] > 0
    assert totals["age_steps"] >= 0
    assert any(peer["reachability"] == "direct" for peer in seen["peers"])


def test_a_peer_serves_prometheus_and_tells_where_its_settings_came_from(
    swarm: Swarm, say: Callable[..., tuple[int, str]]
) -> None:
    url = swarm.peers[0].wait_for("metrics at http").split()[-1]
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        page = answer.read().decode()
    assert "noloco_swaps_total" in page
    assert f'peer_id="{swarm.peers[0].peer_id}"' in page
    status = json.loads(say("status", "--json", "--state-dir", swarm.peers[0].folder)[1])
    assert status["settings"]["metrics"] == {"value": "127.0.0.1:0", "origin": "flag"}
    assert status["settings"]["save_every_s"]["origin"] == "default"
    assert status["running_since_s"] > 0
    text = say("status", "--state-dir", swarm.peers[0].folder)[1]
    assert "settings  " in text
    assert "127.0.0.1:0  (flag)" in text
    assert "have their default values (shown by --json)" in text
    assert "save_every_s" not in text
    swaps = r"^swaps     \d+ \([\d.]+/min, [\d.]+ % of the link, [\d.e-]+ s each\), last with \.\."
    assert re.search(swaps, text, re.MULTILINE), text


def test_the_doctor_is_dialled_back_and_says_what_is_wrong(swarm: Swarm, say: Callable[..., tuple[int, str]]) -> None:
    state = ("--state-dir", swarm.folder / "doctor")
    code, found = say("doctor", swarm.ticket, "--json", "--listen", "127.0.0.1:0", *state)
    checks = {check["name"]: check for check in json.loads(found)["checks"]}
    assert code == 0, checks
    for name in ("versions", "ports", "p2pd", "way in", "peers run", "ways", "clock", "reached", "the model"):
        assert checks[name]["level"] == "ok", checks[name]
    assert "sees this machine as 127.0.0.1" in checks["reached"]["found"]
    assert all(check["fix"] for check in checks.values() if check["level"] in ("warning", "failed"))


@pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM: the page was not driven; apt-get install chromium")
def test_the_page_shows_the_swarm_keeps_its_curves_and_tells_of_a_killed_peer(swarm: Swarm) -> None:
    from playwright.sync_api import sync_playwright

    web = ("monitor", swarm.ticket, "--web", "--listen", "127.0.0.1:0")
    complaints: list[str] = []
    with ExitStack() as stack:
        monitor = stack.enter_context(Command(*web, log=swarm.folder / "web.txt"))
        url = monitor.wait_for("the page is at http").split()[4]
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        stack.callback(browser.close)
        context = browser.new_context(viewport={"width": 1280, "height": 1000})
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else complaints.append(asked.url))
        page.goto(url)

        def told(code: str) -> Any:
            return page.evaluate(code)

        def wait(code: str) -> None:
            until(lambda: told(code), what=lambda: f"{code}; {complaints}")

        wait(f"document.querySelectorAll('#rows tr').length === {NUM_PEERS}")
        wait("[...document.querySelectorAll('#rows tr')].every((row) => row.dataset.health === 'alive')")
        # Curves: two samples, ten seconds apart, of every peer and of the swarm. The graph shows swaps.
        wait("state.history !== null && state.history.time_s.length > 1")
        wait(f"Object.values(state.history.losses).filter((c) => c.at(-1) !== null).length === {NUM_PEERS}")
        wait("charts.loss.plot !== undefined && state.told.meetings.length > 0")
        assert told("charts.loss.plot.series.length") == NUM_PEERS + 1
        assert "alive" in page.inner_text("#tiles").lower()
        if PICTURES:
            wait("state.history.time_s.length >= 6")
            _take_pictures(browser, url, Path(PICTURES))
        victim = swarm.peers[-1]
        victim_id = victim.peer_id
        victim.send(signal.SIGKILL)
        killed_s = time.monotonic()
        for peer, words in ((2, NAMES[2]), (1, NAMES[1][:6].lower())):
            page.fill("#search", words)
            rows = "[...$('rows').rows]"  # of the peer, and of those that it has met last
            wait(f"{rows}.length && {rows}.every(row => row.textContent.includes({json.dumps(NAMES[peer])}))")
        assert page.locator("#rows b").count() == 0, "a name is text, whatever it looks like"
        page.fill("#search", "")
        wait(f"document.querySelectorAll('#rows tr').length === {NUM_PEERS}")
        page.click("#head button:text-is('loss')")
        wait("document.querySelector('#head th[aria-sort]')?.textContent === 'loss'")

        # The curves survive a reload of the page.
        before = told("state.history.time_s")
        page.reload()
        wait("state.history !== null && state.history.time_s.length > 0")
        assert told("state.history.time_s")[: len(before)] == before

        grey = told("getComputedStyle(document.documentElement).getPropertyValue('--faint').trim()")
        gone = f"document.querySelector('tr[data-peer=\"{victim_id}\"]')?.dataset.health === 'gone'"
        wait(gone)
        assert time.monotonic() - killed_s < TTL_S + 15.0
        assert "gone" in page.inner_text(f'tr[data-peer="{victim_id}"]')
        assert told(f"getComputedStyle(document.querySelector('tr[data-peer=\"{victim_id}\"] td')).color") == rgb(grey)
        assert f"..{victim_id[-6:]}" in page.inner_text("#notices")
        assert complaints == []

        for path in ("healthz", "metrics", "api/status"):
            with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
                body = answer.read().decode()
        status = json.loads(body)
        assert "addresses" not in status["peers"][0], "who trains where is not for the open web"
        assert swarm.ticket not in body
        monitor.send(signal.SIGINT)
        assert monitor.wait() == 0
        assert "Traceback" not in monitor.text
        assert "ERROR" not in monitor.text
        wait("document.getElementById('link').className === 'lost'")


def _take_pictures(browser: Any, url: str, folder: Path) -> None:
    for name, options in {
        "page-light": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"},
        "page-dark": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"},
        "page-phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
    }.items():
        context = browser.new_context(**options)
        page = context.new_page()
        page.goto(url)
        until(
            lambda page=page: page.evaluate("state.history !== null && state.told.meetings.length > 1"), what="curves"
        )
        page.screenshot(path=folder / f"{name}.png", full_page=name != "page-phone")
        context.close()


def rgb(hexadecimal: str) -> str:
    red, green, blue = bytes.fromhex(hexadecimal.removeprefix("#"))
    return f"rgb({red}, {green}, {blue})"
