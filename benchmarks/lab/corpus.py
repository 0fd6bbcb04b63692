"""Make a corpus of source code and documentation from folders, for the larger models of the lab.

    python benchmarks/lab/corpus.py FOLDER ... --out corpus.xz [--megabytes 150]

Each text file is taken once, however many copies there are. The files are shuffled with a fixed seed and cut off at
the given size; the first of them are held out. `leads.py --corpus` reads the result: an xz file with the number of
held-out bytes (8 bytes, little-endian), the held-out text, and the training text.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cuh", ".md", ".rst"}
MOST_BYTES = 200_000  # of a file; longer ones are mostly generated
HELD_OUT_SHARE = 0.01
SEED = 0


def texts(folders: list[Path]) -> Iterator[bytes]:
    """Yield the content of each different text file, in a random order that only the contents determine."""
    found: dict[bytes, Path] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file() and 0 < path.stat().st_size <= MOST_BYTES:
                found.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    order = sorted(found)
    random.Random(SEED).shuffle(order)
    for digest in order:
        content = found[digest].read_bytes()
        if b"\0" not in content:
            yield content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=150)
    arguments = parser.parse_args()
    held_out, training, num_held_out, left = list[bytes](), list[bytes](), 0, 10**6 * arguments.megabytes
    for content in texts(arguments.folders):
        is_held_out = num_held_out < HELD_OUT_SHARE * 10**6 * arguments.megabytes
        (held_out if is_held_out else training).append(content)
        num_held_out += len(content) * is_held_out
        left -= len(content)
        if left <= 0:
            break
    with lzma.open(arguments.out, "wb") as file:
        file.write(num_held_out.to_bytes(8, "little"))
        file.writelines([*held_out, *training])
    print(f"{sum(map(len, training)):,} bytes for training and {num_held_out:,} held out: {arguments.out}")


if __name__ == "__main__":
    main()
