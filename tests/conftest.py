"""For all tests: no time limit on a single example, as machines are shared; every test as a whole has one.

It is in pyproject.toml, and for tests marked slow in `benchmarks/harness/patience.py`.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
# A script that starts the tests in its background has them ignore Ctrl-C, and every process that they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# torch computes with one thread, in child processes, too; it reads this when it is imported. With several, sums come
# out in another order each time, and on a busy machine they wait for one another: a test took 59 s instead of 12.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from harness.patience import SLOW_TEST_S

    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))
