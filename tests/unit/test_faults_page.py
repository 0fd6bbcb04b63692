"""The tests, scripts and flags that docs/faults.md names exist, and it marks the rows that no test covers."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from adversarial.flags import FLAGS
from documented import ROOT

PAGE = ROOT.joinpath("docs", "faults.md").read_text(encoding="utf-8")
ROWS = {
    row[0]: row for line in PAGE.splitlines() if (row := [cell.strip() for cell in line.split("|")[1:-1]])[:1] != []
}
NUMBERED = {number: row for number, row in ROWS.items() if number.isdigit()}
TESTS = {path.stem: path for path in ROOT.joinpath("tests").rglob("test_*.py")}
SCRIPTS = {path.name for path in ROOT.joinpath("benchmarks").glob("*.py")}


def shown_by(number: str) -> str:
    return NUMBERED[number][3]


def test_every_row_has_five_cells_and_they_are_numbered_in_order() -> None:
    assert [int(number) for number in NUMBERED] == list(range(1, len(NUMBERED) + 1))
    assert all(len(row) == 5 for row in NUMBERED.values())


@pytest.mark.parametrize("number", NUMBERED)
def test_what_a_row_names_exists(number: str) -> None:
    cell = shown_by(number)
    names = set(re.findall(r"\btest_\w+", cell))
    assert names <= TESTS.keys()
    assert set(re.findall(r"\b\w+\.py\b", cell)) - {f"{name}.py" for name in names} <= SCRIPTS
    listed = re.search(r"adversarial (`[^`]*`(?:, `[^`]*`)*)", cell)
    flags = re.findall(r"`([^`]*)`", listed[1]) if listed else []
    assert bool(flags) == ("adversarial `" in cell)
    for pattern in flags:
        assert any(fnmatch(flag, pattern) for flag in FLAGS), pattern


@pytest.mark.parametrize("number", NUMBERED)
def test_a_row_without_a_test_says_how_it_was_tried(number: str) -> None:
    cell = shown_by(number)
    has_test = "test_" in cell or "adversarial `" in cell or "make fuzz" in cell
    is_open = cell == "-" and "not solved" in NUMBERED[number][2]
    assert has_test or is_open or "by script" in cell or "by hand" in cell, cell
    named = set(re.findall(r"\b(\w+\.py)\b", cell)) & SCRIPTS
    assert not named or "by script" in cell, f"{named} are no tests"


def test_every_flag_of_the_hostile_peer_has_the_row_that_it_names() -> None:
    assert {flag.row for flag in FLAGS.values()} <= NUMBERED.keys()
