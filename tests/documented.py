"""The pages for users and developers, and the `noloco ...` commands that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from noloco_p2p.cli.app import VERBOSITY

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(page for folder in (".", "docs", "docker") for page in ROOT.joinpath(folder).glob("*.md"))
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(noloco [^`]+)`")
OPERATORS = {"|", ">", ">>", "&&", ";"}


def in_blocks(page: Path) -> list[str]:
    """Return the commands in code blocks, in the order of the page, with continued lines joined."""
    lines = "\n".join(FENCED.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("noloco ")]


def in_sentences(page: Path) -> list[str]:
    """Return the text between backticks, which may contain a part of a command."""
    return [" ".join(each.split()) for each in INLINE.findall(FENCED.sub("", page.read_text(encoding="utf-8")))]


def arguments(command: str) -> list[str]:
    """Return the words after `noloco`, up to a pipe or a comment, without -v and -q, which are valid anywhere."""
    words = shlex.split(command, comments=True)[1:]
    ends = [place for place, word in enumerate(words) if word in OPERATORS]
    return [word for word in words[: min(ends, default=len(words))] if word not in VERBOSITY]
