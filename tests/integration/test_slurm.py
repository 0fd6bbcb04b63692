"""The batch script of docs/volunteers.md with real peers and torchrun; a replacement of `srun` runs one task here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.patience import SLOW_TEST_S
from harness.processes import small_spec, until, write_spec

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
[ "$1" = --kill-on-bad-exit=0 ] && shift
export SLURM_PROCID=0
exec "$@"
"""

pytestmark = pytest.mark.slow


@contextmanager
def job(script: Path, name: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run what `sbatch --job-name=NAME` would start, and kill all of its processes at the end."""
    folder = script.parent
    environment = os.environ | {
        "HOME": str(folder),
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NAME": name,
        "NOLOCO_DEVICE": "cpu",
        "NOLOCO_REPORT_EVERY_S": "1",
        "NOLOCO_LISTEN": "127.0.0.1:0",
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", script, *map(str, arguments)], cwd=folder, env=environment, stdout=log, stderr=log, process_group=0
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_two_jobs_swap_and_leave_in_order(tmp_path: Path) -> None:
    [text] = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "volunteers.md").read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "noloco.sbatch"
    script.write_text(text)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    write_spec(small_spec("slurm"), tmp_path)
    spec = next(tmp_path.glob("*.toml")).name

    def said(name: str, what: str) -> bool:
        return what in (tmp_path / f"{name}.log").read_text()

    def wait(name: str, what: str) -> None:
        log = tmp_path / f"{name}.log"
        until(lambda: said(name, what), what=lambda: f"{what!r} in {log.read_text()}", timeout_s=SLOW_TEST_S)

    with job(script, "first", spec, "--ticket-file", "ticket") as first, job(script, "more", "@ticket") as more:
        wait("more", "% apart")
        for process in (more, first):
            os.killpg(process.pid, signal.SIGTERM)  # as Slurm signals every process of a step
        for name, process in (("more", more), ("first", first)):
            process.wait(timeout=SLOW_TEST_S)
            wait(name, "left; run the same command to resume")
    assert len(list(tmp_path.glob("noloco/*-0/identity.key"))) == 2
