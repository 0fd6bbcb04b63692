"""How long tests wait. A limit exists to catch a hang, and for nothing else.

Every wait ends as soon as what it waits for is there, so a limit costs nothing. It holds on a machine that is several
times slower than two free cores: a test with a limit of its own is a test that fails there. A test as a whole may take
what pyproject.toml says, or, if it is slow, SLOW_TEST_S.

What is promised about time is no limit, and is not measured by one. That nobody waits in vain is shown by a wait or
a deadline of PATIENCE_S that is not waited out: the test ends within AT_ONCE_S. Other promises are compared with a
deadline of the test's own, or with what was measured in the same run.
"""

from __future__ import annotations

from noloco_p2p.gossip.deadlines import Deadlines

PATIENCE_S = 300.0  # for one thing: a process that starts or ends, a round, an answer
SLOW_TEST_S = 1800.0  # for all of a test that is marked slow
AT_ONCE_S = 30.0  # what waits for nothing takes no longer, wherever it runs; a tenth of PATIENCE_S

# Between peers where no deadline has to run out: what breaks is noticed because it broke.
PATIENT = Deadlines(dial_s=PATIENCE_S, offer_s=PATIENCE_S, status_s=PATIENCE_S, progress_s=PATIENCE_S)
