"""Small faults, put into a copy of the code one by one: each must make the test fail that is named beside it.

A mutant is a TOML file in this folder: `fault` (what goes wrong, in a sentence), `file`, `old` (which occurs there
exactly once), `new`, and `test` (a pytest node; the cheapest that must fail). Names on the command line, or parts of
them, choose some. Every named test first runs without any fault and has to pass. Ends with 1 when a fault was not
noticed, or was noticed by a hang only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHECKOUT = FOLDER.parents[1]
IMPORTS = ["torch", "transformers", "datasets", "hivemind", "grpc", "pytest"]  # once, not for each test
# Without a time limit of pytest's own: a test that hangs has not failed. What is imported already cannot be rewritten.
PYTEST = ["-x", "-p", "no:cacheprovider", "-o", "timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
LIMIT_S = 300  # for one test: only a hang takes as long
ALL_LIMIT_S = 1200  # for the tests without a fault
DISTINCT_S = itertools.count(10)  # compiled code is looked up by the second in which its source was changed
PASSED, FAILED, NO_ANSWER = 0, 1, 100  # exit codes of pytest; others than these say that it could not run the test


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
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(options.jobs):
            copies.put(_copy(Path(folder) / str(index)))
        os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, which is before the tests are
        multiprocessing.set_start_method("forkserver")
        multiprocessing.set_forkserver_preload(IMPORTS)
        tests = sorted({each.test for each in mutants})
        with ThreadPoolExecutor(options.jobs) as pool:
            parts = [tests[index :: options.jobs] for index in range(min(options.jobs, len(tests)))]
            for code, output in pool.map(lambda part: _tried(part, copies, limit_s=ALL_LIMIT_S), parts):
                if code != PASSED:
                    print(f"a named test fails without any fault:\n{output}", file=sys.stderr)
                    return 1
        print(f"{len(tests)} tests pass without a fault ({time.monotonic() - began:.0f} s)", flush=True)
        survivors = _survivors(mutants, copies, jobs=options.jobs)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} faults noticed ({time.monotonic() - began:.0f} s)")
    for mutant, why in survivors:
        print(f"SURVIVED {mutant.name} ({why})\n    {mutant.fault}\n    {mutant.test}")
    return bool(survivors)


def _survivors(mutants: list[Mutant], copies: queue.Queue[Path], *, jobs: int) -> list[tuple[Mutant, str]]:
    survivors: list[tuple[Mutant, str]] = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_tried, [each.test], copies, limit_s=LIMIT_S, mutant=each): each for each in mutants}
        for done in as_completed(running):
            mutant, (code, output) = running[done], done.result()
            print(f"{'noticed ' if code == FAILED else 'SURVIVED'} {mutant.name}", flush=True)
            if code != FAILED:
                why = "the test passes" if code == PASSED else f"the test gave no answer: {code}\n{output}"
                survivors.append((mutant, why))
    return survivors


def _tried(
    tests: Iterable[str], copies: queue.Queue[Path], *, limit_s: float, mutant: Mutant | None = None
) -> tuple[int | None, str]:
    """The exit code of pytest in a copy, with the mutant in it, and what it wrote; None = it hung or was killed."""
    copy = copies.get()
    output = copy.with_suffix(".txt")
    try:
        with _fault_in(copy, mutant):
            output.write_text("")
            process = multiprocessing.Process(target=_run_tests, args=(copy, output, list(tests)))
            process.start()
            assert process.pid
            process.join(limit_s)
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the test has left behind
            process.join()
        code = process.exitcode
        return (None if code is None or code < 0 else code), output.read_text(errors="replace")
    finally:
        copies.put(copy)


@contextlib.contextmanager
def _fault_in(copy: Path, mutant: Mutant | None) -> Iterator[None]:
    if mutant is None:
        yield
        return
    path = copy / mutant.file
    right, times = path.read_bytes(), path.stat()
    path.write_text(mutant.text(copy), encoding="utf-8")
    os.utime(path, (times.st_atime, times.st_mtime - next(DISTINCT_S)))
    try:
        yield
    finally:
        path.write_bytes(right)
        os.utime(path, (times.st_atime, times.st_mtime))


def _run_tests(copy: Path, output: Path, tests: list[str]) -> None:
    """In a process of its own, forked from one that has imported what does not change."""
    os.setpgrp()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    import pytest

    code = NO_ANSWER
    try:
        code = int(pytest.main([*PYTEST, "--rootdir", str(copy), *tests]))
    except BaseException:  # noqa: BLE001 - an exit code of 1 would say that the test has failed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads that a fault left running end here


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
