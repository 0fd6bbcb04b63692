"""Pin what a release is built with: actions to the commit of their newest tag, base images to the digest of their tag.

    python .ci/pin.py      (`make pin`; needs git, github.com and the registries)

It writes `uses: OWNER/NAME@COMMIT # vX.Y.Z` into the workflows, and `NAME:TAG@sha256:...` into docker/. Read the diff
before you commit it: a new major version of an action may want other inputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *sorted(ROOT.glob(".github/workflows/*.yml")),
    *(ROOT / "docker" / name for name in ("Dockerfile", "compose.yaml", "compose.gpu.yaml")),
)
ACTION = re.compile(r"uses: (?P<name>[\w.-]+/[\w.-]+)@\S+(?: +#.*)?")
IMAGE = re.compile(r"(?P<name>docker\.io/[\w./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?")
VERSION = re.compile(r"(?P<commit>[0-9a-f]{40})\trefs/tags/(?P<tag>v\d+\.\d+\.\d+)(?:\^\{\})?$")
MANIFESTS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
TIMEOUT_S = 60


def pinned(text: str, *, commit_of: Callable[[str], tuple[str, str]], digest_of: Callable[[str], str]) -> str:
    """commit_of: OWNER/NAME -> (commit, tag). digest_of: docker.io/NAME:TAG -> sha256:..."""

    def action(found: re.Match[str]) -> str:
        commit, tag = commit_of(found["name"])
        return f"uses: {found['name']}@{commit} # {tag}"

    return IMAGE.sub(lambda found: f"{found['name']}@{digest_of(found['name'])}", ACTION.sub(action, text))


@cache
def newest_commit(name: str, *, host: str = "https://github.com") -> tuple[str, str]:
    """The commit of the newest tag vX.Y.Z, and the tag. An annotated tag has a second line, with its commit."""
    listed = subprocess.run(
        ["git", "ls-remote", "--tags", f"{host}/{name}"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    ).stdout
    commits = {found["tag"]: found["commit"] for found in map(VERSION.match, listed.splitlines()) if found}
    newest = max(commits, key=lambda tag: [int(part) for part in tag[1:].split(".")])
    return commits[newest], newest


@cache
def digest(image: str) -> str:
    """The digest of the index of all platforms that the tag of an image on Docker Hub stands for now."""
    name, _, tag = image.removeprefix("docker.io/").partition(":")
    asked = urllib.parse.urlencode({"service": "registry.docker.io", "scope": f"repository:{name}:pull"})
    with urllib.request.urlopen(f"https://auth.docker.io/token?{asked}", timeout=TIMEOUT_S) as answer:
        token = json.load(answer)["token"]
    request = urllib.request.Request(
        f"https://registry-1.docker.io/v2/{name}/manifests/{tag}",
        headers={"Authorization": f"Bearer {token}", "Accept": MANIFESTS},
        method="HEAD",
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.headers["docker-content-digest"]


def main() -> None:
    for file in FILES:
        before = file.read_text(encoding="utf-8")
        after = pinned(before, commit_of=newest_commit, digest_of=digest)
        if after != before:
            file.write_text(after, encoding="utf-8")
            print(f"pinned anew: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
