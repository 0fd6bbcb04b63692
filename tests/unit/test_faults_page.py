"""The tests, scripts and flags that the tables of SECURITY.md name exist, and each row names what shows it."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from adversarial.flags import FLAGS
from documented import ROOT

PAGE = ROOT.joinpath("SECURITY.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("## Faults and attacks")[2].partition("## Not solved")[0]
TABLE_LINES = [line for line in TABLES.splitlines() if line.startswith("|")]
HEADS = {"| fault | what a peer does | test |", "| attack | what a peer does | test |"}
HEADS |= {"| fault or attack | what a peer does | test |", "|---|---|---|"}
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE_LINES if line not in HEADS]
TESTS = {path.stem for path in ROOT.joinpath("tests").rglob("test_*.py")}
SCRIPTS = {path.name for path in ROOT.joinpath("benchmarks").glob("*.py")}


def flags_in(row: list[str]) -> list[str]:
    """Return the patterns of flags that follow test_rows in the last cell of a row."""
    listed = re.search(r"test_rows((?: `[^`]*`)+)", row[-1])
    return re.findall(r"`([^`]*)`", listed[1]) if listed else []


def test_the_page_names_tests_that_exist() -> None:
    assert set(re.findall(r"\btest_\w+", PAGE)) <= TESTS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_shows_it(row: list[str]) -> None:
    assert len(row) == 3
    cell = row[-1]
    assert "test_" in cell, "each row has a test; a script that runs by hand is not enough"
    assert set(re.findall(r"\b\w+\.py\b", cell)) <= SCRIPTS
    assert bool(flags_in(row)) == ("test_rows" in cell)
    for pattern in flags_in(row):
        assert any(fnmatch(flag, pattern) for flag in FLAGS), pattern


def test_every_flag_of_the_hostile_peer_is_in_a_row() -> None:
    patterns = [pattern for row in ROWS for pattern in flags_in(row)]
    assert [flag for flag in FLAGS if not any(fnmatch(flag, pattern) for pattern in patterns)] == []
