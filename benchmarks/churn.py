"""Run real peers on one machine, which join, leave and are killed at random times that a seed determines.

    python benchmarks/churn.py [--quick] [--json FILE]

Twelve processes, each with a tiny model and one thread, run for five minutes; with --quick, six run for 90 seconds.
Every few seconds, one of them is killed (SIGKILL), leaves (SIGTERM) or comes back. The benchmark checks that every live
peer keeps swapping, that every peer leaves when asked, and that no process or socket remains.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from claims import Claim, run
from harness.churn import Churn, Plan
from harness.processes import small_spec

EXIT_S = WITHOUT_S = 30.0
SPEC = small_spec("churn")
FULL = Plan(num_peers=12, min_living=6, seconds=300.0, mean_pause_s=5.0, seed=2506)
QUICK = Plan(num_peers=6, min_living=3, seconds=90.0, mean_pause_s=5.0, seed=2506)


def measure(quick: bool) -> list[Claim]:
    plan = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="noloco-churn-") as folder:
        report = Churn(SPEC, plan, Path(folder)).run()
    for what in (*report.bad_exits, *report.left_behind, *report.tracebacks):
        print(f"! {what}")
    exit_s, without_s = report.longest_exit_s, report.longest_without_s
    return [
        Claim("peers at most, and seconds", plan.num_peers, f"in {plan.seconds:.0f} s"),
        Claim("processes started", report.joins, "processes"),
        Claim("left politely", report.leaves, "processes"),
        Claim("killed", report.kills, "processes"),
        Claim("training at the end", report.living, "processes"),
        Claim("committed swaps, all peers", report.swaps, "swaps"),
        Claim("failed swaps, all peers", report.failed, "swaps"),
        Claim("longest time without a swap", without_s, "s", f"< {WITHOUT_S:g}", without_s < WITHOUT_S),
        Claim("longest exit", exit_s, "s", f"< {EXIT_S:g}", exit_s < EXIT_S),
        Claim("ended with another exit code than 0", len(report.bad_exits), "processes", "0", not report.bad_exits),
        Claim("processes and sockets left behind", len(report.left_behind), "", "0", not report.left_behind),
        Claim("logs with a traceback", len(report.tracebacks), "logs", "0", not report.tracebacks),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
