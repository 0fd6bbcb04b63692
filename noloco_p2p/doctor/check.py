"""Defines and formats the result of a check, and verifies that the required packages are installed."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from noloco_p2p._version import __version__
from noloco_p2p.telemetry.console import counted

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

    def lines(self) -> list[str]:
        lines = [f"{MARKS[self.level]}  {self.name:12}  {self.found}"]
        return [*lines, f"{'':9}{'':14}-> {self.fix}"] if self.fix else lines


def report(checks: list[Check]) -> dict[str, Any]:
    """Return the checks as JSON values. `healthy` determines the exit code."""
    return {"healthy": is_healthy(checks), "checks": [asdict(check) for check in checks]}


def is_healthy(checks: list[Check]) -> bool:
    return not any(check.level == "failed" for check in checks)


def verdict(checks: list[Check]) -> str:
    """Summarize the checks in one sentence."""
    counts = Counter(check.level for check in checks)
    if counts["failed"]:
        return f"{counted(counts['failed'], 'problem')} would prevent training; see the advice next to the arrows above"
    warnings = f" ({counted(counts['warning'], 'warning')})" if counts["warning"] else ""
    return f"found nothing that would prevent training{warnings}"


def versions() -> Check:
    found = {name: _version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    text = f"noloco_p2p {__version__}, Python {platform.python_version()}, {text}"
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return Check("versions", "failed", text, f"install the missing packages: pip install {' '.join(missing)}")
    return Check("versions", "ok", text)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
