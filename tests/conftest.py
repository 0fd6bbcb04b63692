"""Settings of all tests: examples have no time limit, as machines are shared; each test as a whole has one.

That limit is in pyproject.toml, and for tests marked slow in `benchmarks/harness/patience.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
# Tests in the background of a script inherit SIGINT as ignored, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# torch reads the number of threads when it is imported; child processes inherit it. With several threads, sums are
# added in another order each time, and on a busy machine threads wait for each other (a test took 59 s, not 12 s).
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from harness.patience import SLOW_TEST_S

    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def test_...` on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    import uvloop
    from harness.patience import PATIENCE_S

    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), PATIENCE_S))
    return True


@pytest.fixture(autouse=True)
def levels_of_logs() -> Iterator[None]:
    """Restore the levels that a command line run in this process has set, which hide what later tests wait for."""
    loggers = [logging.getLogger(name) for name in (None, "noloco_p2p", "noloco_p2p.data.documents", "hivemind")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
