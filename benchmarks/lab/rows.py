"""The cells of a script of the lab: a file of JSON lines, to which any number of processes add, and its command."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from corpus import CACHE

C = TypeVar("C")  # a dataclass
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell_of(kind: type[C], row: Row) -> C:
    """Return the cell of a row, which has all its fields."""
    return kind(**{name: row[name] for name in kind.__dataclass_fields__})  # pyright: ignore[reportAttributeAccessIssue]


def key_of(cell: Any) -> str:
    return json.dumps(asdict(cell), sort_keys=True)


def add_missing(cells: Iterable[C], run: Callable[[C], Row], path: Path, *, can_end: Callable[[C], bool]) -> None:
    """Run the cells that neither the file nor another process has, and of which `can_end` says that time suffices."""
    for cell in cells:
        if not can_end(cell) or not (lock := _claimed(key_of(cell))):
            continue
        if cell not in (cell_of(type(cell), row) for row in read(path)):
            row = run(cell)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['loss']:.4f} {row['wall_s']:.0f} s {key_of(cell)}", flush=True)
        lock.close()


def command(
    doc: str | None,
    out: Path,
    cells: Callable[[list[Row]], Iterable[C]],
    run: Callable[[C], Row],
    table: Callable[[list[Row]], str],
    *,
    name: Callable[[C], str] = str,
) -> None:
    """Print a table of the rows, or run cells that are missing. `cells` returns those that follow from the rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--only", default="", help="part of the name of a cell")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after this time")
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    until_s, found = time.monotonic() + 60 * arguments.minutes, read(arguments.out)
    if arguments.what == "table":
        print(table(found))
        return
    torch.set_num_threads(1)
    wanted = [cell for cell in cells(found) if arguments.only in name(cell)]
    add_missing(wanted, run, arguments.out, can_end=lambda cell: time.monotonic() < until_s)


def _claimed(key: str) -> Any:
    """Return a locked file, or None if another process runs this cell. The lock ends with its process."""
    folder = CACHE / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / hashlib.sha256(key.encode()).hexdigest()[:16]).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
