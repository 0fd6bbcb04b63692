"""Checks whether this machine can take part in a run. This file imports only what is always installed."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from noloco_p2p._version import __version__

PACKAGES = ("torch", "hivemind", "grpcio", "transformers")
Level = Literal["ok", "warning", "failed", "skipped"]
MARKS: dict[str, str] = {"ok": "ok     ", "warning": "warning", "failed": "FAILED ", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `found` describes the result. For warnings and failures, `fix` says what to do."""

    name: str
    level: Level
    found: str
    fix: str = ""

    @classmethod
    def of(cls, name: str, found: str, fix: str, *, fails: bool = False, warns: bool = False) -> Check:
        """Return the result of a check that fails, warns, or is ok."""
        return cls(name, "failed" if fails else "warning" if warns else "ok", found, fix if fails or warns else "")

    def lines(self) -> list[str]:
        found, *more = self.found.split("\n")
        lines = [f"{MARKS[self.level]}  {self.name:12}  {found}", *(f"{'':23}{line}" for line in more)]
        return [*lines, f"{'':23}-> {self.fix}"] if self.fix else lines


def versions() -> Check:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    text = f"noloco_p2p {__version__}, Python {platform.python_version()}, {text}"
    missing = [name for name, number in found.items() if number is None]
    fix = f"install the missing packages: pip install {' '.join(missing)}"
    return Check.of("versions", text, fix, fails=bool(missing))
