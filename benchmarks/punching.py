"""Measure holes between peers behind every kind of router: which pairs meet, and how fast.

    python benchmarks/punching.py [--quick] [--json FILE]

Routers are emulated between network namespaces (netlab.py, harness/nat.py). The round trip between any two peers is 50
ms. A kind of router is MAPPING/FILTERING of RFC 4787. The mapping says on which part of the partner's address the outer
port depends, and the filtering says which part of a sender's address the router must know to let a packet in. Routers
never preserve the inner port, drop packets silently, and do not hairpin.

The table compares all pairs of kinds; the row is the side that calls. Every attempt does what a real call does: each
side asks the relay for its own outer address, they exchange the addresses through the relay (with a round trip of 100
ms), and connect. The time ends when the caller has the connection. A dash stands for a pair for which no attempt made a
hole; calls between such peers go through the relay.

This needs root (see netlab.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from claims import Claim, run
from harness.holes import Homes
from harness.nat import Router
from netlab import LabError

ROUND_TRIP_MS = 50
KINDS = (
    "endpoint/endpoint",
    "endpoint/address",
    "endpoint/port",
    "address/address",
    "address/port",
    "port/port",
)
CARRIER, BEHIND_IT = Router("endpoint", "endpoint"), "endpoint/port, carrier"  # RFC 6888 asks carriers for this one


def router(kind: str, behind: int | None = None) -> Router:
    mapping, _, filtering = kind.partition("/")
    return Router(mapping, filtering, behind)  # pyright: ignore[reportArgumentType] - one of the three words


def must_work(one: str, other: str) -> bool:
    """Return whether a hole is required: both sides map by endpoint, or one side maps and filters by endpoint."""
    return all(kind.startswith("endpoint") for kind in (one, other)) or "endpoint/endpoint" in (one, other)


def table(attempts: int) -> list[Claim]:
    kinds = [*KINDS, BEHIND_IT]
    carriers = [CARRIER, CARRIER]
    routers = carriers + [router(kind) for kind in KINDS for _ in "ab"]
    routers += [router("endpoint/port", behind=0), router("endpoint/port", behind=1), router("endpoint/port", behind=0)]
    behind = list(range(2, len(routers)))  # a node for each router but the carriers: two for each kind
    behind += [2 + 2 * KINDS.index("endpoint/port"), 2 + 2 * KINDS.index("port/port")]  # a second one in two homes
    claims, rows = [], []
    with Homes(routers, behind, round_trip_ms=ROUND_TRIP_MS) as homes:
        for row, one in enumerate(kinds):
            cells = []
            for column, other in enumerate(kinds):
                claim = _claim(homes, f"{one} calls {other}", 1 + 2 * row, 2 + 2 * column, attempts)
                claims.append(_must(claim) if must_work(_plain(one), _plain(other)) else claim)
                cells.append(claim.value)
            rows.append(cells)
        for number, kind in enumerate(("endpoint/port", "port/port"), len(behind) - 1):
            what = f"two behind one {kind} router"
            claims.append(_must(_claim(homes, what, 1 + 2 * KINDS.index(kind), number, attempts)))
        claims.append(
            _claim(homes, "two homes of one carrier", 1 + 2 * kinds.index(BEHIND_IT), len(behind) - 2, attempts)
        )
    _show(kinds, rows)
    return claims


def _plain(kind: str) -> str:
    return kind.partition(",")[0]


def _claim(homes: Homes, what: str, caller: int, called: int, attempts: int) -> Claim:
    """The median of the milliseconds; 0 when no attempt came to a hole."""
    met = [homes.meet(caller, called) for _ in range(attempts)]
    found = [1e3 * each.seconds for each in met if each]
    return Claim(f"{what}: {len(found)} holes in {attempts}", median(found) if found else 0.0, "ms")


def _must(claim: Claim) -> Claim:
    _, _, count = claim.claim.rpartition(": ")
    made, _, attempts = count.partition(" holes in ")
    return Claim(claim.claim, claim.value, claim.unit, "a hole each time", made == attempts)


def _show(kinds: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    width = max(map(len, kinds))
    print(f"{'calls, ms':>{width}}  " + "  ".join(kinds))
    for kind, cells in zip(kinds, rows, strict=True):
        shown = [f"{cell:.0f}" if cell else "-" for cell in cells]
        print(f"{kind:>{width}}  " + "  ".join(text.rjust(len(each)) for text, each in zip(shown, kinds, strict=True)))


def measure(quick: bool) -> list[Claim]:
    return table(1 if quick else 3)


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"punching: {failure}")
