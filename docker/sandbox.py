"""Podman without a daemon, a registry or systemd: for the check of the images on a bare Debian, as root.

The base image is made from Debian's packages and tagged with the public name, so that the Dockerfile is built
unchanged. Containers run in their own namespaces for network, mounts and processes: when the check ends, or is killed,
the kernel removes every process, bridge and firewall rule with them. Images are in a folder of this check, which no
other check may use at the same time.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlparse

if TYPE_CHECKING:
    from typing import Self

PYPI = "https://pypi.org/simple"
TOOLS = ("aardvark-dns", "buildah", "crun", "iptables", "mmdebstrap", "netavark", "podman", "uidmap")
BASE_PACKAGES = "ca-certificates,python3-minimal,python3-pip,python3-venv"
# What the public image has and Debian lacks: `python`, and permission for pip to install.
BASE = """FROM scratch
ADD base.tar /
RUN ln -sf python3 /usr/bin/python && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
"""
STORAGE = """[storage]
driver = "overlay"
runroot = "{folder}/run"
graphroot = "{folder}/images"
"""
# The limits: without CAP_SYS_RESOURCE podman cannot raise them to its own defaults.
ENGINE = """[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
WALLS = ("unshare", "--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
FURNISH = """set -e
ip link set lo up
mount -t sysfs none /sys
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run/netns
exec "$@"
"""


class Sandbox:
    """Make images in `folder`, and run commands where podman can use them. The context manager cleans up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._environment = os.environ | {
            "CONTAINERS_STORAGE_CONF": str(self._folder / "storage.conf"),
            "CONTAINERS_CONF": str(self._folder / "containers.conf"),
        }

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise SystemExit("without a Docker daemon or a registry, this check must run as root on Debian")
        if not all(map(shutil.which, ("buildah", "podman", "crun", "mmdebstrap", "iptables"))):
            raise SystemExit(f"tools are missing; run `apt-get install --no-install-recommends {' '.join(TOOLS)}`")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "storage.conf").write_text(STORAGE.format(folder=self._folder))
        (self._folder / "containers.conf").write_text(ENGINE.format(folder=self._folder))
        Path("/run/netns").mkdir(exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Unmount the layers that are still mounted, so that the folder can be removed."""
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            mounted = [line.split()[1] for line in mounts]
        for path in reversed(mounted):
            if path.startswith(f"{self._folder}/"):
                subprocess.run(["umount", "--lazy", path], check=False)

    def build(self, dockerfile: Path, *, target: str, tag: str, context: Path, say: Callable[[str], None]) -> None:
        """Build the unchanged Dockerfile on a Debian base, with the pip settings of this machine. Raises SystemExit."""
        name = re.search(r"^ARG BASE=(\S+)", dockerfile.read_text(), re.MULTILINE)
        assert name is not None
        began_s = time.monotonic()
        base = name[1].partition("@")[0]  # the base made here has another digest
        self._make_base(base)
        say(f"base made in {time.monotonic() - began_s:.0f} s")
        began_s = time.monotonic()
        settings = _pip_config()
        arguments = ["--pull-never", "--layers", "--target", target, *self._mounts(settings)]
        arguments += ["--build-arg", f"BASE={base}"]
        if index := settings.get("index-url"):
            arguments += ["--build-arg", f"INDEX={index}"]
        if _has_cpu_torch(settings):
            arguments += ["--build-arg", f"CPU_TORCH_INDEX={index or PYPI}"]
        self._bud("--file", str(dockerfile), "--tag", tag, *arguments, str(context))
        say(f"{target} image built in {time.monotonic() - began_s:.0f} s")

    def run(self, command: list[str]) -> int:
        """Run a command inside, with a network of its own, and return its exit code. Its processes end with it."""
        return subprocess.run(
            [*WALLS, "sh", "-c", FURNISH, "sh", *command], env=self._environment, check=False
        ).returncode

    def _make_base(self, name: str) -> None:
        has_base = subprocess.run(
            ["buildah", "inspect", "--type", "image", name], env=self._environment, capture_output=True, check=False
        )
        if has_base.returncode == 0:
            return
        root = self._folder / "base"
        root.mkdir(exist_ok=True)
        _must(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={BASE_PACKAGES}",
                "bookworm",
                str(root / "base.tar"),
            ]
        )
        (root / "Dockerfile").write_text(BASE)
        self._bud("--file", str(root / "Dockerfile"), "--tag", name, str(root))
        shutil.rmtree(root)

    def _bud(self, *arguments: str) -> None:
        _must(["buildah", "bud", "--isolation", "chroot", "--format", "docker", *arguments], env=self._environment)

    def _mounts(self, settings: dict[str, str]) -> list[str]:
        """Return the mounts for the settings of pip here, with the folders and certificates that they name."""
        file = self._folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        words = [word for value in settings.values() for word in shlex.split(value)]
        # An index in a folder refers to packages next to that folder.
        places = [Path(urlparse(word).path).parent if word.startswith("file:") else Path(word) for word in words]
        paths = sorted({path for path in places if path.is_absolute() and path.exists()})
        mounts = [f"{file}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in paths)]
        return [part for mount in mounts for part in ("--volume", mount)]


def _has_cpu_torch(settings: dict[str, str]) -> bool:
    """Whether pip finds torch without CUDA in a folder of this machine, so that PyTorch's index is not needed."""
    return any(glob.glob(f"{folder}/torch-*+cpu-*.whl") for folder in shlex.split(settings.get("find-links", "")))


def _pip_config() -> dict[str, str]:
    """Return the index settings of pip from its files and the environment, which takes precedence."""
    lines = _must(["python3", "-m", "pip", "config", "list"]).splitlines()
    found = (re.fullmatch(r"(?:global|:env:)\.([a-z-]+)='(.*)'", line) for line in sorted(lines, reverse=True))
    settings = {match[1]: match[2] for match in found if match}
    return {
        key: value for key, value in settings.items() if key in ("cert", "extra-index-url", "find-links", "index-url")
    }


def _must(command: list[str], *, env: dict[str, str] | None = None) -> str:
    """Run a command, and return its standard output. If it fails, raises SystemExit with the end of its output."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise SystemExit(f"{' '.join(command[:4])} .. failed with exit code {done.returncode}:\n{output}")
    return done.stdout
