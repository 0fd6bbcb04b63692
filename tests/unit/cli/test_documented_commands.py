"""Every `noloco ...` that README and docs name is one that the program takes: verb, arguments and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from noloco_p2p.cli.app import VERBOSITY, app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(noloco [^`]+)`")
OPERATORS = {"|", ">", ">>", "&&", ";"}
NUMBERS = {"SEED", "N"}  # stand for a number


def commands(text: str) -> list[tuple[str, bool]]:
    """(command, is whole): in code blocks a line each, a backslash goes on; in sentences, between backticks, a part of
    one may be meant."""
    lines = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    named = [" ".join(each.split()) for each in INLINE.findall(FENCED.sub("", text))]
    blocks = [line.strip() for line in lines if line.strip().startswith("noloco ")]
    return [*((line, True) for line in blocks), *((each, False) for each in named)]


def arguments(command: str) -> list[str]:
    words = shlex.split(command, comments=True)[1:]
    ends = [place for place, word in enumerate(words) if word in OPERATORS]
    mine = [word for word in words[: min(ends, default=len(words))] if word not in VERBOSITY]
    return ["7" if word in NUMBERS else word for word in mine]


def documented() -> list[Any]:
    found = [(page, command) for page in PAGES for command in dict.fromkeys(commands(page.read_text(encoding="utf-8")))]
    return [pytest.param(*command, id=f"{page.name}: {command[0]}") for page, command in found]


@pytest.mark.parametrize(("command", "is_whole"), documented())
def test_a_documented_command_is_one_that_the_program_takes(command: str, is_whole: bool) -> None:
    group: Any = get_command(app)
    verb, *rest = arguments(command) or [""]
    if verb.startswith("-"):
        group.make_context("noloco", [verb], resilient_parsing=True)
        return
    assert verb in group.commands, f"there is no verb {verb!r}"
    try:
        group.commands[verb].make_context(verb, [word for word in rest if word != "--help"])
    except Exception as error:
        if is_whole or type(error).__name__ != "MissingParameter":  # Typer brings its own click, and does not export it
            raise


def test_the_pages_were_found() -> None:
    assert len(documented()) > 20
