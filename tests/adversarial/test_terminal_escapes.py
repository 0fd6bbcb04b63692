"""Nothing that a stranger writes reaches a terminal as a control character, from any field of any document."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from harness.identities import identity_of
from harness.processes import noloco
from rich.live import Live

from noloco_p2p.cli.app import configure_logging, run
from noloco_p2p.errors import ModelError, PeerError, Refused, SpecError, Unreachable, printable
from noloco_p2p.gossip.frames import SpecJson
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.spec import Spec, TrainerSpec
from noloco_p2p.telemetry.console import PrintableStream, terminal
from noloco_p2p.transfer.fetch import fetch_spec

TEXTS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J",
    "c1": "\x9b2J",
    "c1 title": "\x9d0;owned\x9c",
    "right to left": "\u202egnp.exe",
    "isolate": "\u2066owned",
    "return": "\rnoloco: all is well",
    "line": "x\nnoloco: all is well",
    "delete": "\x7f\x08",
    "invisible": "\u200b\U000e0041",
    "surrogate": "\ud83d",
}


def is_harmless(text: str) -> bool:
    return all(char.isprintable() for char in text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda text: {text: 1},
        lambda text: {"model": {text: 1}},
        lambda text: {"model": {"lora": {text: {text: 1}}}},
        lambda text: {"codec": {"outer_gradient": text}},
        lambda text: {"data": {"source": text}},
        lambda text: {"data": {"source": "mix", "mix": [{"source": text, text: 1}]}},
        lambda text: {"train": {"inner_optimizer": text}},
        lambda text: {"run_key": text},
    ],
)
def test_a_spec_is_described_in_one_printable_line(make: Any, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        TrainerSpec.from_dict({"name": "r", **make(text)}, origin="a stranger")
    assert is_harmless(str(caught.value))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_error_that_quotes_a_stranger_is_printable(text: str) -> None:
    for error in (PeerError(text), Refused(text, code="BUSY"), ModelError(text), SpecError(f"{text} is wrong")):
        assert is_harmless(str(error).replace("\n", ""))


def test_nothing_of_a_spec_with_another_digest_is_described() -> None:
    """Not even its shape: the digest in the ticket is checked before the spec is read."""

    class Liar:
        async def fetch(self, candidate: Candidate, want: object, *, timeout_s: float) -> AsyncGenerator[SpecJson]:
            yield SpecJson(json.dumps({"name": "r", "owned": 1}).encode())

    donor = Candidate(identity_of("liar").peer_id, "192.0.2.1:1")
    with pytest.raises(Unreachable, match="but the digest in the ticket is") as caught:
        asyncio.run(fetch_spec(Liar(), [donor], expected_digest="ab" * 32))  # pyright: ignore[reportArgumentType]
    assert "owned" not in str(caught.value)


def test_the_right_digest_still_needs_a_right_spec() -> None:
    data = json.dumps({"name": "r", "owned\x1b[2J": 1}).encode()
    with pytest.raises(SpecError, match=r"'owned\\x1b\[2J' is not a known field"):
        Spec.from_json(data, expected_digest=blake3(data).hexdigest(), origin="peer")


@pytest.mark.parametrize("text", [TEXTS["title"] + TEXTS["clear"] + TEXTS["c1"] + TEXTS["right to left"]])
def test_a_command_prints_no_control_characters(text: str, tmp_path: Path) -> None:
    key = json.dumps(text)  # a TOML string has the same escapes
    (tmp_path / "run.toml").write_text(f'name = "r"\n[model]\n{key} = 1\n[data]\n{key} = {key}\nsource = {key}\n')
    done = noloco("join", tmp_path / "run.toml", "--listen", "127.0.0.1:0", "--state-dir", tmp_path / "peer")
    assert done.returncode == 3
    assert is_harmless((done.stdout + done.stderr).replace("\n", ""))
    assert len(done.stderr.strip().splitlines()) == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def shown() -> Iterator[Screen]:
    """Put a terminal in place of standard output and standard error, as commands see it, with their logs."""
    screen, root = Screen(), logging.getLogger()
    stream, handlers, level = PrintableStream.around(screen), list(root.handlers), root.level
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            configure_logging(logging.WARNING)
            yield screen
    finally:
        root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "line"])
def test_printed_and_logged_text_is_printable(name: str) -> None:
    with shown() as screen:
        sys.stdout.write(f"{TEXTS[name]}\n")
        sys.stderr.writelines([f"{TEXTS[name]}\n"])
        logging.getLogger("another.library").warning("it says %s", TEXTS[name])
    assert is_harmless(screen.getvalue().replace("\n", ""))
    assert screen.getvalue().count(printable(TEXTS[name])) == 3


def test_a_display_still_moves_the_cursor_and_what_is_logged_meanwhile_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with shown() as screen, Live("bar", console=terminal(), auto_refresh=False) as live:
        assert terminal().is_terminal
        live.update("bar 2", refresh=True)
        logging.getLogger("noloco_p2p").warning("it says \x1b]0;owned\x07\x9b2J")
    assert "\x1b[" in screen.getvalue(), "rich draws"
    assert "\x1b]" not in screen.getvalue()
    assert "\x9b" not in screen.getvalue()
    assert "\\u001b]0;owned\\u0007\\u009b2J" in screen.getvalue()


def test_commands_write_to_printable_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    out, error = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    assert run(["join", "no\x1b[2J\x9bsuch.toml"]) == 3
    assert is_harmless((out.getvalue() + error.getvalue()).replace("\n", ""))
    assert "no\\u001b[2J" in error.getvalue()
