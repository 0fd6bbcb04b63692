"""Flags that several verbs share."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from noloco_p2p.errors import SettingsError

StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Where identity, checkpoints and logs live.  [default: ~/.local/state/noloco]", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Listen = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT; PORT is gRPC, PORT+1 libp2p; 0 takes two free ports.  [default: 0.0.0.0:31337]",
        show_default=False,
    ),
]
Announce = Annotated[
    str | None,
    typer.Option(help="HOST[:PORT] that others dial, where it is not what --listen says.", show_default=False),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        help="Address of a peer to enter through (/ip4/../tcp/../p2p/.., or @FILE with one); may be repeated.",
        show_default=False,
    ),
]
MaxUpload = Annotated[
    str | None,
    typer.Option(help="Cap on what swaps and fetches send together, for example 40mbit or 5MB/s.", show_default="none"),
]
MaxDownload = Annotated[
    str | None, typer.Option(help="The same for what they receive, for example 100mbit.", show_default="none")
]
Data = Annotated[
    list[str] | None,
    typer.Option(help="NAME=GLOB: where the data set that the spec calls NAME lies here.", show_default=False),
]
Model = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FOLDER: where the model or tokenizer that the spec calls NAME lies here.", show_default=False
    ),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE, for example outer.alpha=0.3; may be repeated.")
]


def parse_duration(text: str, *, flag: str) -> float:
    """90s, 30min, 12h, 7d -> seconds. Raises SettingsError."""
    match = re.fullmatch(r"(\d{1,6})(s|min|h|d)", text)
    if not match:
        raise SettingsError(f"{flag} {text!r} must be a time such as 30min, 12h or 7d")
    return int(match[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


def parse_changes(changes: list[str] | None) -> dict[str, Any]:
    """["outer.alpha=0.3"] -> {"outer.alpha": 0.3}, each value read as TOML, or as a plain string."""
    return dict(_parse(change) for change in changes or [])


def _parse(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals:
        raise SettingsError(f"--set {change!r} must be KEY=VALUE, for example outer.alpha=0.3")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
