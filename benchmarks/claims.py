"""Provide the parts that all benchmarks share: the flags, the table, and the JSON of claims."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Claim:
    """One measured figure. `target` describes the required value, and `met` is None if there is no requirement."""

    claim: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


def run(measure: Callable[[bool], list[Claim]], *, doc: str | None) -> None:
    """Parse --quick and --json, run `measure(quick)`, which returns the claims, and print them as a table."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller run, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    show(measure(args.quick), args.json)


def show(claims: Sequence[Claim], path: Path | None) -> None:
    """Print claims as a table, and write them to a JSON file."""
    print(machine())
    width = max(len(claim.claim) for claim in claims)
    for claim in claims:
        print(line(claim, width=width))
    write(claims, path)


def line(claim: Claim, *, width: int) -> str:
    verdict = "" if claim.met is None else f"target {claim.target}: {'met' if claim.met else 'NOT met'}"
    return f"{claim.claim:<{width}}  {claim.value:>10.4g} {claim.unit:<14} {verdict}".rstrip()


def write(claims: Sequence[Claim], path: Path | None) -> None:
    """Write claims to a JSON file, if there is a path."""
    if path:
        path.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """Return the first line of a result: the date, the cores of this machine and the versions of libraries."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "grpcio", "uvloop"))
    cores = len(os.sched_getaffinity(0))
    python = f"Python {platform.python_version()}"
    return f"# {datetime.now(UTC):%Y-%m-%d} | {platform.machine()}, {cores} cores | {python} {libraries}"
