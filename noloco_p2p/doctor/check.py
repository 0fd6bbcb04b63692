"""One finding of the doctor, and how it is shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "failed", "skipped"]
MARKS: dict[str, str] = {"ok": "ok     ", "warning": "warning", "failed": "FAILED ", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class Check:
    """`found` says what was seen; `fix` what to do, and is there whenever the level is warning or failed."""

    name: str
    level: Level
    found: str
    fix: str = ""

    def lines(self) -> list[str]:
        told = [f"{MARKS[self.level]}  {self.name:12}  {self.found}"]
        return [*told, f"{'':9}{'':14}-> {self.fix}"] if self.fix else told


def report(checks: list[Check]) -> dict[str, Any]:
    """As JSON; `healthy` is what the exit code says."""
    return {"healthy": is_healthy(checks), "checks": [asdict(check) for check in checks]}


def is_healthy(checks: list[Check]) -> bool:
    return not any(check.level == "failed" for check in checks)
