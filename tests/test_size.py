"""The size of each part stays within its budget. A change that needs more lines raises the number in its commit."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lines of Python without generated code, rounded up to 50. The first row holds the modules at the top of the package.
BUDGETS = {
    "noloco_p2p/*.py": 3_650,
    "noloco_p2p/cli/**/*.py": 2_250,
    "noloco_p2p/codec/**/*.py": 700,
    "noloco_p2p/data/**/*.py": 1_700,
    "noloco_p2p/doctor/**/*.py": 450,
    "noloco_p2p/flow/**/*.py": 1_600,
    "noloco_p2p/gossip/**/*.py": 2_250,
    "noloco_p2p/integrations/**/*.py": 400,
    "noloco_p2p/monitor/**/*.py": 950,
    "noloco_p2p/net/**/*.py": 2_650,
    "noloco_p2p/optim/**/*.py": 300,
    "noloco_p2p/outer/**/*.py": 2_750,
    "noloco_p2p/peer/**/*.py": 1_900,
    "noloco_p2p/simulate/**/*.py": 1_650,
    "noloco_p2p/swarm/**/*.py": 4_850,
    "noloco_p2p/telemetry/**/*.py": 1_050,
    "noloco_p2p/testing/**/*.py": 650,
    "noloco_p2p/trainer/**/*.py": 4_850,
    "noloco_p2p/transfer/**/*.py": 700,
    "benchmarks/**/*.py": 7_960,
    "tests/**/*.py": 32_980,
}


def num_lines(pattern: str) -> int:
    files = (path for path in ROOT.glob(pattern) if "wire" not in path.parts)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("pattern", BUDGETS)
def test_a_part_stays_within_its_budget(pattern: str) -> None:
    assert num_lines(pattern) <= BUDGETS[pattern]


def test_every_package_has_a_budget() -> None:
    packages = {path.parent.name for path in (ROOT / "noloco_p2p").glob("*/*.py")}
    assert packages <= {pattern.split("/")[1] for pattern in BUDGETS}
