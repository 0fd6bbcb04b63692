"""Draw sentences of the project at random, for a reader who judges their English.

    python benchmarks/sentences.py [--seed 20261128] [--number 100]

A third of the sentences comes from the pages, a third from docstrings, and a third from messages, which are all other
strings of the package with at least four words. `results/sentences.txt` has a sample with the verdicts of two readers.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "docker/README.md")
FENCE = re.compile(r"```.*?```", re.DOTALL)
LIST_ITEM = re.compile(r"^\s*(?:[*-]|\d+\.) ", re.MULTILINE)
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"0-9])")
LEAST_WORDS = 4
Found = tuple[str, str]  # where it is, and the text


def sentences(paragraph: str) -> Iterator[str]:
    for sentence in END.split(" ".join(paragraph.split())):
        if len(sentence.split()) >= LEAST_WORDS and re.search(r"[.!?][*)`\"]*$", sentence):
            yield sentence


def of_pages() -> Iterator[Found]:
    """Yield the sentences outside of tables, headings and code."""
    for page in (*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in PAGES)):
        text = LIST_ITEM.sub("\n\n", FENCE.sub("\n\n", page.read_text(encoding="utf-8")))
        for paragraph in re.split(r"\n\s*\n", text):
            if not paragraph.lstrip().startswith(("|", "#", "!", "<")):
                yield from ((page.name, sentence) for sentence in sentences(paragraph))


def of_code() -> tuple[list[Found], list[Found]]:
    """Return the sentences of all docstrings, and all messages."""
    docstrings, messages = list[Found](), list[Found]()
    for path in sorted((ROOT / "noloco_p2p").rglob("*.py")):
        if "_pb2" in path.name:
            continue
        name, inner = str(path.relative_to(ROOT)), set[int]()
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in node.values}
            elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and isinstance(node.body[0], ast.Expr):
                    inner.add(id(node.body[0].value))
                    docstrings += [(name, each) for part in docstring.split("\n\n") for each in sentences(part)]
        texts = [(node.lineno, _text(node)) for node in nodes if isinstance(node, ast.expr) and id(node) not in inner]
        messages += [
            (f"{name}:{line}", text)
            for line, text in texts
            if len(text.split()) >= LEAST_WORDS and re.search("[a-z] [a-z]", text)
        ]
    return docstrings, messages


def _text(node: ast.expr) -> str:
    """Return a string with its fields in braces, or "" for any other expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else _field(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _field(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--number", type=int, default=100)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    docstrings, messages = of_code()
    pools = {"page": [*of_pages()], "docstring": docstrings, "message": messages}
    for kind, pool in pools.items():
        number = args.number // 3 + (kind == "page") * (args.number % 3)
        for index, (place, text) in enumerate(rng.sample(pool, number), 1):
            print(f"{kind} {index}. [{place}] {' '.join(text.split())}")


if __name__ == "__main__":
    main()
