"""A page may quote only figures that the results contain."""

from __future__ import annotations

from pathlib import Path

import figures
import pytest
from figures import phrase

PHRASES = [phrase("swaps keep {:.2f} of their rate, {:,.0f} of {:.0f}", 0.9667, 1234, 12), phrase("with alpha 0.5")]
PAGE = """Swaps: swaps keep 0.97 of
their rate, 1,234 of 12, with alpha 0.5. `0.3`

```
0.1 of 5 %
```
<!-- best -->

| 0.4 |

<!-- /best -->
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def wrong(path: Path) -> list[str]:
    return [*figures.check(path.name, PHRASES)]


def test_a_page_that_says_what_the_results_say(page: Path) -> None:
    assert not wrong(page)
    figures.rewrite(page.name, PHRASES)
    assert page.read_text() == PAGE


def test_another_figure_is_named_and_written_anew(page: Path) -> None:
    page.write_text(PAGE.replace("0.97", "0.9").replace("1,234", "7"))
    (line,) = wrong(page)
    assert "0.97" in line
    assert "1,234" in line
    figures.rewrite(page.name, PHRASES)
    assert page.read_text() == PAGE


@pytest.mark.parametrize("added", ["and 3 % more", "and 0.25 more", "with alpha 0.6"])
def test_a_figure_without_a_source_is_named(page: Path, added: str) -> None:
    page.write_text(PAGE + added)
    (line,) = wrong(page)
    assert "without a source" in line


def test_a_phrase_that_the_page_lacks_is_named(page: Path) -> None:
    page.write_text(PAGE.replace("with alpha 0.5", "with a small alpha"))
    assert wrong(page) == ["page.md has no 'with alpha 0.5'"]


def test_a_transcript_has_no_line_of_its_own(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RESULTS", page.parent)
    (page.parent / "demo.txt").write_text("first\nsecond\nmerged model 1.1\n")
    page.write_text("```\nfirst\n...\nmerged model 1.1\n```\n")
    assert not [*figures.check_transcript(page.name, "demo.txt")]
    page.write_text("```\nfirst\n...\nmerged model 1.0\n```\n")
    assert [*figures.check_transcript(page.name, "demo.txt")] == ["page.md: demo.txt has no 'merged model 1.0'"]


@pytest.mark.parametrize(("text", "value"), [("rate", 1.0), ("rate, highest", 2.0), ("low", 3.0)])
def test_a_claim_is_found_by_its_name_or_its_beginning(
    text: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = '[{"claim": "rate", "value": 1}, {"claim": "rate, highest", "value": 2}, {"claim": "lowest", "value": 3}]'
    (tmp_path / "claims.json").write_text(rows)
    figures.result.cache_clear()
    assert figures.claim("claims", text) == value
    with pytest.raises(ValueError, match="unpack"):
        figures.claim("claims", "r")
    figures.result.cache_clear()
