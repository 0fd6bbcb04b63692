"""Define how long tests wait. Limits exist only to detect a hang.

Every wait ends as soon as its condition holds, so a limit costs nothing. It must hold on a machine that is several
times slower than two free cores: a test with its own, shorter limit would fail there. A whole test may take the time in
pyproject.toml, or SLOW_TEST_S if it is marked slow.

A limit is not a promise about time, and does not test such a promise. To show that a peer does not wait in vain, a test
gives it a wait or a deadline of PATIENCE_S, and ends within AT_ONCE_S. Other durations are compared with a deadline of
the test, or with a time that is measured in the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_p2p.gossip.seams import Deadlines

PATIENCE_S = 300.0  # for one event: the start or end of a process, a round, an answer
SLOW_TEST_S = 1800.0  # for a whole test that is marked slow
AT_ONCE_S = 30.0  # an action without waits takes no longer on any machine; a tenth of PATIENCE_S

# Between peers in tests where no deadline may expire: peers must notice a fault by the fault itself.
PATIENT = Deadlines(dial_s=PATIENCE_S, offer_s=PATIENCE_S, status_s=PATIENCE_S, progress_s=PATIENCE_S)


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until a condition of other programs or tasks holds. Raises AssertionError after PATIENCE_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < until_s, f"waited {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.02)
