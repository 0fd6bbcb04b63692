"""Write docs/metrics.md from the tables of the package, or with --check tell whether it is what they say.

python docs/generate.py [--check]
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noloco_p2p.telemetry import prometheus
from noloco_p2p.telemetry.metrics import Metrics

TARGET = Path(__file__).resolve().parent / "metrics.md"
HEAD = """# Metrics

Written by `docs/generate.py` from `telemetry/metrics.py` and `telemetry/prometheus.py`: change those, not this page.

Counters only rise, over restarts too. A loss that is not known yet is left out.
"""


def table(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in body), ""]


def families(families: tuple[prometheus.Family, ...]) -> list[str]:
    rows = [(f"`{family.full_name}`{_labels(family)}", family.kind, family.unit, family.meaning) for family in families]
    return table([("name", "kind", "unit", "meaning"), *rows])


def _labels(family: prometheus.Family) -> str:
    return f" {{{', '.join(family.labels)}}}" if family.labels else ""


def render() -> str:
    own = (*prometheus.PEER, prometheus.LIVE_PEERS, prometheus.PEER_INFO)
    swarm = (prometheus.SWARM_PEERS, *prometheus.SWARM, prometheus.SWARM_ALONE, prometheus.DIRECTORY_AGE)
    texts = [item for item in fields(Metrics) if item.metadata["kind"] == "text"]
    rows = [(f"`{item.name}`", item.metadata["unit"], item.metadata["meaning"]) for item in texts]
    lines = [
        HEAD,
        "## One peer",
        "",
        "`noloco join --metrics HOST:PORT` serves these at `/metrics`. Without the prefix `noloco_` and the ending",
        "`_total` they are the fields of `noloco status --json` and of the events `round`, `finished` and `stopped`.",
        "",
        *families(own),
        "In status and events only:",
        "",
        *table([("name", "unit", "meaning"), *rows]),
        "## The swarm",
        "",
        "`noloco monitor TICKET --web` serves these at `/metrics`, from the records of the directory. No label grows",
        "with the swarm.",
        "",
        *families(swarm),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(render(), encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == render():
        return 0
    print(f"{TARGET} is not what the tables say: run python docs/generate.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
