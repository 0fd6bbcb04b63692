"""The tests and scripts that the tables of SECURITY.md name exist, and each row names what shows it."""

from __future__ import annotations

import re

import pytest
from documented import ROOT

PAGE = ROOT.joinpath("SECURITY.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("## Faults and attacks")[2].partition("## Not solved")[0]
TABLE_LINES = [line for line in TABLES.splitlines() if line.startswith("|")]
HEADS = {"| fault | what a peer does | test |", "| attack | what a peer does | test |"}
HEADS |= {"| fault or attack | what a peer does | test |", "|---|---|---|"}
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE_LINES if line not in HEADS]
TESTS = {path.stem for path in ROOT.joinpath("tests").rglob("test_*.py")}
SCRIPTS = {path.name for path in ROOT.joinpath("benchmarks").rglob("*.py")}


def test_the_page_names_tests_that_exist() -> None:
    assert set(re.findall(r"\btest_\w+", PAGE)) <= TESTS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_shows_it(row: list[str]) -> None:
    assert len(row) == 3
    cell = row[-1]
    assert "test_" in cell, "each row has a test; a script that runs by hand is not enough"
    assert set(re.findall(r"\b\w+\.py\b", cell)) <= SCRIPTS
