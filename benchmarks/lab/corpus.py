"""Make the text of the lab: Python sources and documentation of packages, as the package index delivers them.

    python benchmarks/lab/corpus.py [--folder ~/.cache/noloco-lab]

It downloads the source distributions that corpus.txt lists by name and version, and writes text-*.jsonl, which the data
source of any run can read (`--data text=FOLDER/text-*.jsonl`). The list determines the result. Each text is taken once,
however many packages contain it, and so is each paragraph of 400 bytes or more (licences, vendored modules). Nothing is
downloaded or written again if it is there. Building the metadata of a package may run its setup.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("corpus.txt")
CACHE = Path.home() / ".cache" / "noloco-lab"
SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".rst", ".md")
LEAST_BYTES, MOST_BYTES = 200, 200_000  # of a file; longer ones are mostly generated
PARAGRAPH_BYTES = 400  # a shorter one may occur twice
PART_BYTES = 16 << 20
SEED = 0


def download(folder: Path) -> list[Path]:
    """Download what is missing, and return the archives in the order of the list."""
    archives = []
    for pinned in LIST.read_text().split():
        target = folder / "sdists" / pinned
        if not list(target.glob("*")):
            print(f"downloading {pinned}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, "--no-binary", ":all:", "--dest", target, pinned], check=True)
        archives += sorted(target.glob("*"))
    return archives


def files(archive: Path) -> Iterator[bytes]:
    """Yield the text files of an archive, without unpacking it to disk."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if entry.filename.endswith(SUFFIXES) and LEAST_BYTES <= entry.file_size <= MOST_BYTES:
                    yield packed.read(entry)
        return
    with tarfile.open(archive) as packed:
        for entry in packed:
            if entry.isfile() and entry.name.endswith(SUFFIXES) and LEAST_BYTES <= entry.size <= MOST_BYTES:
                content = packed.extractfile(entry)
                assert content
                yield content.read()


def texts(archives: list[Path]) -> Iterator[str]:
    """Yield each text without the long paragraphs that an earlier one contains."""
    seen: set[bytes] = set()
    for archive in archives:
        for content in files(archive):
            try:
                paragraphs = content.decode().replace("\r\n", "\n").split("\n\n")
            except UnicodeDecodeError:
                continue
            kept = []
            for paragraph in paragraphs:
                digest = hashlib.blake2b(paragraph.strip().encode(), digest_size=12).digest()
                if len(paragraph) < PARAGRAPH_BYTES or digest not in seen:
                    kept.append(paragraph)
                seen.add(digest)
            text = "\n\n".join(kept)
            whole = hashlib.blake2b(b"whole" + text.encode(), digest_size=12).digest()
            if len(text) >= LEAST_BYTES and whole not in seen:
                seen.add(whole)
                yield text


def make(folder: Path) -> str:
    """Write the corpus unless it is there, and return a glob of its files."""
    pattern, done = str(folder / "text-*.jsonl"), folder / "done.json"
    digest = hashlib.sha256(LIST.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if done.exists() and json.loads(done.read_text())["recipe"] == digest:
        return pattern
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("text-*.jsonl"):
        old.unlink()
    documents = [*texts(download(folder))]
    random.Random(SEED).shuffle(documents)
    num_bytes = sum(len(text.encode()) for text in documents)
    content, size, number = hashlib.sha256(), 0, 0
    for text in documents:
        line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
        content.update(line.encode())
        with (folder / f"text-{number:03}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
        size += len(line)
        number, size = (number + 1, 0) if size > PART_BYTES else (number, size)
    told = {"recipe": digest, "documents": len(documents), "bytes": num_bytes, "sha256": content.hexdigest()}
    done.write_text(json.dumps(told))
    print(json.dumps(told), flush=True)
    return pattern


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CACHE, help="outside of the repository; about 600 MB")
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    main()
