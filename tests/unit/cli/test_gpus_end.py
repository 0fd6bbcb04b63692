from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from noloco_p2p.cli import gpus


def test_a_rank_leaves_with_its_launcher_where_no_kernel_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, left = threading.Event(), threading.Event()
    signals: list[tuple[int, int]] = []

    def parent() -> int:
        asked.set()
        return 1 if is_gone.is_set() else 4711

    def kill(pid: int, signum: int) -> None:
        signals.append((pid, signum))
        left.set()

    is_gone = threading.Event()
    monkeypatch.setattr(gpus, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(gpus, "POLL_S", 0.01)
    monkeypatch.setattr(os, "getppid", parent)
    monkeypatch.setattr(os, "kill", kill)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", gpus.LAUNCHER: "4711"}.items():
        monkeypatch.setenv(name, value)
    assert gpus.own_rank() == gpus.OwnRank(rank=1, num_ranks=2, gpu=1)
    assert asked.wait(10)
    assert not signals
    is_gone.set()
    assert left.wait(10)
    assert signals == [(os.getpid(), signal.SIGTERM)]
