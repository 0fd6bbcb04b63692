"""Measure the goodput of a swap over lines that lose packets, with one connection and with several.

    python benchmarks/lossy_links.py [--quick] [--json FILE]

A line of 100 Mbit/s with a round trip of 50 ms joins two network namespaces. It loses 1 % of the packets, and is
measured with cubic and with bbr as TCP's congestion control. The same line without loss, on which more connections
cannot help, is measured as well. The swap runs the production code, in both directions at once, with int8. Goodput is
the number of payload bytes in each direction, divided by the time of the whole swap, from the offer to the commit. On
the lossy line, a quarter of the vector is sent when there is one connection. This needs root (see netlab.py).
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from statistics import fmean

from claims import Claim, run
from netlab import LabError, NetLab, enter, home
from pair import Side, run_pair

from noloco_p2p.net import client
from noloco_p2p.net.client import FAR_CONNECTIONS
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec

RATE_MBIT_S, ROUND_TRIP_MS, LOSS = 100, 50, 0.01
SPEC = RunSpec(name="lossy-links", outer=OuterSpec(wait=True), codec=CodecSpec(weights="int8"))


def side(
    name: str,
    pipe: Connection,
    namespaces: dict[str, str],
    num_elements: int,
    connections: int,
    repeats: int,
) -> None:
    """Send (seconds, payload bytes received) for each swap. Only `a` makes offers."""
    enter(namespaces[name])
    client.FAR_S = -1.0  # without a session, a dial does not measure the round trip
    peer = Side(name, pipe, SPEC, host="0.0.0.0", connections=connections)
    if name == "b":
        peer.directory.others = []
    peer.begin(num_elements)
    for _ in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        num_bytes = peer.swap()
        seconds = time.monotonic() - began_s
        time.sleep(1.0)  # until the stream is closed
        pipe.send((seconds, num_bytes))
    peer.stop()


def goodputs(congestion_control: str, *, loss: float, connections: int, num_elements: int, repeats: int) -> list[float]:
    """Return the Mbit/s in each direction for each swap."""
    line = home(rate_mbit_s=RATE_MBIT_S, round_trip_ms=ROUND_TRIP_MS, loss=loss)
    # No offload even without loss, so that the figures differ by the loss alone.
    with NetLab([line] * 2, congestion_control=congestion_control, offload=False) as lab:
        a, b = lab.nodes
        namespaces = {"a": a.namespace, "b": b.namespace}
        hosts = a.address, b.address
        results = run_pair(side, namespaces, num_elements, connections, repeats=repeats, hosts=hosts)
    return [(a_bytes + b_bytes) / 2 * 8e-6 / max(a_s, b_s) for (a_s, a_bytes), (b_s, b_bytes) in results]


def compare(congestion_control: str, *, loss: float, num_elements: int, repeats: int) -> list[Claim]:
    """Compare a swap over one connection with the mean of swaps over several connections."""
    name = f"{congestion_control}, {loss:.0%} loss"
    fewer = num_elements // 4 if loss else num_elements  # one connection gets 2 Mbit/s and would take minutes
    alone = goodputs(congestion_control, loss=loss, connections=1, num_elements=fewer, repeats=1)[0]
    swaps = goodputs(
        congestion_control, loss=loss, connections=FAR_CONNECTIONS, num_elements=num_elements, repeats=repeats
    )
    several = fmean(swaps)
    claims = [
        Claim(f"{name}: one connection", alone, "Mbit/s"),
        Claim(f"{name}: {FAR_CONNECTIONS} connections", several, "Mbit/s"),
    ]
    ratio = several / alone
    if loss and congestion_control == "cubic":
        claims.append(Claim(f"{name}: {FAR_CONNECTIONS} connections / one", ratio, "ratio", ">= 3", ratio >= 3))
    else:
        claims.append(Claim(f"{name}: {FAR_CONNECTIONS} connections / one", ratio, "ratio", ">= 0.9", ratio >= 0.9))
    return claims


def measure(quick: bool) -> list[Claim]:
    if quick:
        return compare("cubic", loss=LOSS, num_elements=6_000_000, repeats=2)
    claims = compare("cubic", loss=LOSS, num_elements=25_000_000, repeats=3)
    claims += compare("bbr", loss=LOSS, num_elements=75_000_000, repeats=3)
    return claims + compare("cubic", loss=0.0, num_elements=75_000_000, repeats=3)


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"lossy_links: {failure}")
