"""Flags that several verbs share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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
Data = Annotated[
    list[str] | None,
    typer.Option(help="NAME=GLOB: where the data set that the spec calls NAME lies here.", show_default=False),
]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
