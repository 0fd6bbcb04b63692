"""The program accepts every `noloco ...` command in README and docs: verbs, arguments and options exist."""

from __future__ import annotations

from typing import Any

import pytest
from documented import PAGES, arguments, in_blocks, in_sentences
from typer.main import get_command

from noloco_p2p.cli.app import app

NUMBERS = {"SEED", "N"}  # placeholders for a number


def documented() -> list[Any]:
    """Return (command, is_whole) for every command on the pages."""
    return [
        pytest.param(command, is_whole, id=f"{page.name}: {command}")
        for page in PAGES
        for commands, is_whole in ((in_blocks(page), True), (in_sentences(page), False))
        for command in dict.fromkeys(commands)
    ]


@pytest.mark.parametrize(("command", "is_whole"), documented())
def test_a_documented_command_is_one_that_the_program_takes(command: str, is_whole: bool) -> None:
    group: Any = get_command(app)
    verb, *rest = ["7" if word in NUMBERS else word for word in arguments(command)] or [""]
    if verb.startswith("-"):
        group.make_context("noloco", [verb], resilient_parsing=True)
        return
    assert verb in group.commands, f"there is no verb {verb!r}"
    try:
        group.commands[verb].make_context(verb, [word for word in rest if word != "--help"])
    except Exception as error:
        if is_whole or type(error).__name__ != "MissingParameter":  # Typer bundles click and does not export this error
            raise


def test_the_pages_were_found() -> None:
    assert len(documented()) > 20
