"""Keep the figures that pages quote from benchmarks/results up to date. Each figure is part of a phrase of its page.

    python benchmarks/study/quoted.py [--check]

`quoted.py` lists the phrases. A phrase is text of the page with a format in place of each figure, such as "keep {:.2f}
of their rate". Line breaks in the page do not matter. A phrase without a format contains numbers that were not
measured, such as settings, targets and results of arithmetic.

Without --check, the script writes the figures of the current results into the pages. With --check, it reports every
figure that differs from the results, every phrase that is missing from its page, and every percentage and decimal
number that is not in a phrase, in a table of `tables.py` or in code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"([-+]?\d+(?:,\d{3})*(?:\.\d+)?)"
SUSPECT = re.compile(r"\d+\.\d+|\d+(?= %)")
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|<!-- (\w+) -->.*?<!-- /\1 -->|\]\([^)]*\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of a page. `template` has a format for each of `values`."""

    template: str
    values: tuple[float, ...]

    def pattern(self) -> re.Pattern[str]:
        """Return a pattern with a group for each figure. Spaces in the template also match line breaks in the page."""
        parts = []
        for text, field, *_ in Formatter().parse(self.template):
            parts.append(r"\s+".join(re.escape(word) for word in re.split(r"\s+", text)))
            if field is not None:
                parts.append(NUMBER)
        return re.compile("".join(parts))

    def figures(self) -> list[str]:
        formats = [spec or "" for _, field, spec, _ in Formatter().parse(self.template) if field is not None]
        return [format(value, spec) for value, spec in zip(self.values, formats, strict=True)]

    def write(self, found: re.Match[str]) -> str:
        """Return the piece of the page that was found, with the current figures."""
        text, start = found[0], found.start()
        for index, figure in reversed([*enumerate(self.figures(), 1)]):
            first, last = found.start(index) - start, found.end(index) - start
            text = text[:first] + figure + text[last:]
        return text


def phrase(template: str, *values: float) -> Phrase:
    return Phrase(template, values)


# results


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def claim(name: str, text: str) -> float:
    """Return the value of the claim `text`, or of the only claim that begins with it. Otherwise, raise ValueError."""
    values = {row["claim"]: row["value"] for row in result(name)}
    if text not in values:
        (text,) = (claim for claim in values if claim.startswith(text))
    return values[text]


def line(name: str, pattern: str) -> float:
    """Return the number that the group of `pattern` matches in a plain-text results file. Raises ValueError."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{name} has no {pattern!r}")
    return float(found[1].replace(",", ""))


def row(name: str, case: str, seed: int = 0) -> dict[str, Any]:
    """Return the first row of a study with that case and seed."""
    return next(row for row in result(f"study_{name}")["rows"] if (row["case"], row["seed"]) == (case, seed))


def loss(name: str, case: str, *seeds: int) -> float:
    """Return the mean loss of a case over `seeds`, or over all of its seeds."""
    rows = [row for row in result(f"study_{name}")["rows"] if row["case"] == case]
    losses = [row["loss"] for row in rows if not seeds or row["seed"] in seeds]
    return sum(losses) / len(losses)


def above(value: float, other: float) -> float:
    """Return by how many per cent `value` exceeds `other`."""
    return 100 * (value / other - 1)


# pages


def check(name: str, phrases: Sequence[Phrase]) -> Iterator[str]:
    """Return the faults of a page, one line each."""
    page = (ROOT / name).read_text(encoding="utf-8")
    covered = [(found.start(), found.end()) for found in NOT_PROSE.finditer(page)]
    for each in phrases:
        matches = [*each.pattern().finditer(page)]
        if not matches:
            yield f"{name} has no {each.template!r}"
        for found in matches:
            covered.append((found.start(), found.end()))
            if [*found.groups()] != each.figures():
                yield f"{name} says {' '.join(found[0].split())!r}; the results say {each.figures()}"
    for found in SUSPECT.finditer(page):
        if not any(start <= found.start() < stop for start, stop in covered):
            around = " ".join(page[max(0, found.start() - 50) : found.end() + 20].split())
            yield f"{name} has a figure without a source, {found[0]}: ...{around}..."


def check_transcript(name: str, result_name: str) -> Iterator[str]:
    """Yield the lines of a page's transcript of `noloco demo` that are missing from the output of the demo."""
    lines = {"...", *(RESULTS / result_name).read_text(encoding="utf-8").splitlines()}
    for block in re.findall(r"^```\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        if "merged model" in block:
            yield from (f"{name}: {result_name} has no {each!r}" for each in block.splitlines() if each not in lines)


def rewrite(name: str, phrases: Sequence[Phrase]) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    for each in phrases:
        page = each.pattern().sub(each.write, page)
    (ROOT / name).write_text(page, encoding="utf-8")


def run(pages: Mapping[str, Callable[[], Sequence[Phrase]]], transcripts: Mapping[str, str]) -> int:
    if "--check" not in sys.argv[1:]:
        for name, phrases in pages.items():
            rewrite(name, phrases())
        return 0
    wrong = [text for name, phrases in pages.items() for text in check(name, phrases())]
    wrong += [text for name, output in transcripts.items() for text in check_transcript(name, output)]
    if wrong:
        print(*wrong, "run python benchmarks/study/quoted.py, or list what is new there", sep="\n")
    return 1 if wrong else 0
