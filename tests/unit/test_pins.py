"""The inputs of a release build are pinned, and `make pin` finds every pin."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("pin", ROOT / ".ci" / "pin.py")
assert _SPEC is not None
assert _SPEC.loader is not None
pin = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pin)


@pytest.mark.parametrize("file", pin.FILES, ids=lambda file: file.name)
def test_everything_from_elsewhere_has_a_commit_or_a_digest(file: Path) -> None:
    lines = [line.partition(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    actions = [line for line in lines if "uses: " in line]
    images = [line for line in lines if "docker.io/" in line]
    assert [line for line in actions if not re.search(r"@[0-9a-f]{40}$", line)] == []
    assert [line for line in images if not re.search(r"@sha256:[0-9a-f]{64}$", line)] == []


def test_no_image_is_named_without_its_registry() -> None:
    """pin.py looks for docker.io/, so it would miss a short name."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) <= stages | {"${BASE}"}


def test_pinning_again_changes_what_is_pinned_and_nothing_else() -> None:
    for file in pin.FILES:
        before = file.read_text(encoding="utf-8")
        kept = pin.pinned(before, commit_of=_of_line(before), digest_of=_of_image(before))
        assert kept == before
        after = pin.pinned(before, commit_of=lambda name: ("c" * 40, "v9.8.7"), digest_of=lambda image: "sha256:d")
        assert after.count("v9.8.7") == before.count("uses: ")
        assert len(after.splitlines()) == len(before.splitlines())


def test_the_newest_tag_is_taken_by_number_and_an_annotated_one_by_its_commit(tmp_path: Path) -> None:
    repository = tmp_path / "owner" / "action"
    repository.mkdir(parents=True)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(repository), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    for tag in ("v9.0.0", "v10.0.0", "v10.1"):
        git("commit", "--quiet", "--allow-empty", "--message", tag)
        git("tag", "--annotate", tag, "--message", tag)
    wanted = git("rev-parse", "v10.0.0^{commit}")
    assert pin.newest_commit("owner/action", host=tmp_path.as_uri()) == (wanted, "v10.0.0")


def _of_line(text: str) -> Callable[[str], tuple[str, str]]:
    found = dict(re.findall(r"uses: (\S+)@(\S+ # \S+)", text))
    return lambda name: (found[name].partition(" # ")[0], found[name].partition(" # ")[2])


def _of_image(text: str) -> Callable[[str], str]:
    return lambda image: text.partition(f"{image}@")[2].split()[0]
