"""Small faults, put into a copy of the code one by one: each must make the test fail that is named beside it.

A mutant is a TOML file in this folder: `fault` (what goes wrong, in a sentence), `file`, `old` (which occurs there
exactly once), `new`, and `test` (a pytest node; the cheapest that must fail). Names on the command line, or parts of
them, choose some. Every named test first runs without any fault and has to pass. Ends with 1 when a fault was not
noticed, or was noticed by a hang only.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHECKOUT = FOLDER.parents[1]
LIMIT_S = 300  # for one test: only a hang takes as long
ALL_LIMIT_S = 1200  # for the tests without a fault
PASSED, FAILED = 0, 1  # exit codes of pytest; others than these say that it could not run the test


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    fault: str
    file: str
    old: str
    new: str
    test: str

    def text(self, root: Path) -> str:
        """The whole file with the fault in it. Raises ValueError unless `old` is there exactly once."""
        right = (root / self.file).read_text(encoding="utf-8")
        if (found := right.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {found} times in {self.file}, and must occur once")
        return right.replace(self.old, self.new)


MUTANTS = [
    Mutant(f"{path.parent.name}/{path.stem}", **tomllib.loads(path.read_text(encoding="utf-8")))
    for path in sorted(FOLDER.glob("*/*.toml"))
]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="parts of the names of mutants; all by default")
    arguments.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    options = arguments.parse_args()
    mutants = [each for each in MUTANTS if not options.names or any(name in each.name for name in options.names)]
    began_s, survivors = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(options.jobs):
            copies.put(_copy(Path(folder) / str(index)))

        def tried(mutant: Mutant) -> tuple[Mutant, int | None, str]:
            copy = copies.get()
            right = (copy / mutant.file).read_bytes()
            try:
                (copy / mutant.file).write_text(mutant.text(copy), encoding="utf-8")
                return mutant, *_run(copy, [mutant.test], limit_s=LIMIT_S)
            finally:
                (copy / mutant.file).write_bytes(right)
                copies.put(copy)

        tests = sorted({each.test for each in mutants})
        code, output = _run(copies.queue[0], tests, limit_s=ALL_LIMIT_S)
        if code != PASSED:
            print(f"a named test fails without any fault:\n{output}", file=sys.stderr)
            return 1
        print(f"{len(tests)} tests pass without a fault ({time.monotonic() - began_s:.0f} s)", flush=True)
        for mutant, code, output in pool.map(tried, mutants):
            print(f"{'noticed ' if code == FAILED else 'SURVIVED'} {mutant.name}", flush=True)
            if code != FAILED:
                survivors += 1
                print(f"    {mutant.fault}\n    {mutant.test}\n    exit code {code}\n{output}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} faults noticed ({time.monotonic() - began_s:.0f} s)")
    return bool(survivors)


def _run(copy: Path, tests: Iterable[str], *, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code of pytest in a copy and what it wrote; None if it hung.

    pytest has no time limit of its own, because a test that hangs has not failed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-o", "timeout=0", *tests]
    # Python would not notice that a source changes twice in a second, so nothing compiled is kept.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def _copy(to: Path) -> Path:
    """The checkout as it is, with what is not committed, and without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (source := CHECKOUT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)
    return to


if __name__ == "__main__":
    sys.exit(main())
