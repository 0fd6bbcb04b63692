"""Run real peers on one machine, which join, leave and are killed at random times that a seed determines.

    python benchmarks/churn.py [--quick] [--json FILE]

Twelve processes, each with a tiny model and one thread, run for five minutes; with --quick, six run for 90 seconds.
Every few seconds, one of them is killed (SIGKILL), leaves (SIGTERM) or comes back. The benchmark checks that every live
peer swaps at least once in any 5 rounds, that no round waits beyond its deadline, that every peer leaves when asked,
and that no process or socket remains.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from claims import Claim, run
from harness.churn import NETWORK_ANSWER_S, Churn, Plan
from harness.processes import small_spec

MAX_WAIT_S = 3.0
DEADLINE_S = MAX_WAIT_S + NETWORK_ANSWER_S
EXIT_S = 30.0
SPEC = small_spec("churn", outer__max_wait_s=MAX_WAIT_S, outer__inner_steps=40)
FULL = Plan(num_peers=12, min_living=6, seconds=300.0, mean_pause_s=5.0, seed=2506)
QUICK = Plan(num_peers=6, min_living=3, seconds=90.0, mean_pause_s=5.0, seed=2506)


def measure(quick: bool) -> list[Claim]:
    plan = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="noloco-churn-") as folder:
        report = Churn(SPEC, plan, Path(folder)).run()
    for what in (*report.bad_exits, *report.left_behind, *report.tracebacks):
        print(f"! {what}")
    print(f"most solo rounds in a row: {report.longest_alone}")
    alone, blocked_s, exit_s = len(report.longest_alone), report.longest_blocked_s, report.longest_exit_s
    return [
        Claim("peers at most, and seconds", plan.num_peers, f"in {plan.seconds:.0f} s"),
        Claim("processes started", report.joins, "processes"),
        Claim("left politely", report.leaves, "processes"),
        Claim("killed", report.kills, "processes"),
        Claim("training at the end", report.living, "processes"),
        Claim("rounds, all peers", report.rounds, "rounds"),
        Claim("swapped", 100 * report.swapped / report.rounds, "% of rounds"),
        Claim("half", 100 * report.half / report.rounds, "% of rounds"),
        Claim("alone", 100 * report.alone / report.rounds, "% of rounds"),
        Claim("most solo rounds in a row", alone, "rounds", "< 5", alone < 5),
        Claim("longest wait at a boundary", blocked_s, "s", f"<= {DEADLINE_S:g}", blocked_s <= DEADLINE_S),
        Claim("longest exit", exit_s, "s", f"< {EXIT_S:g}", exit_s < EXIT_S),
        Claim("ended with another exit code than 0", len(report.bad_exits), "processes", "0", not report.bad_exits),
        Claim("processes and sockets left behind", len(report.left_behind), "", "0", not report.left_behind),
        Claim("logs with a traceback", len(report.tracebacks), "logs", "0", not report.tracebacks),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
