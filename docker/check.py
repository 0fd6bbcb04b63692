"""Build the cpu image and run a small swarm from it: a bootstrap and two peers, as locked up as containers can be.

    python docker/check.py [--engine docker|podman|sandbox] [--keep DIR]

The script checks that the demo runs, that the peers swap, that `docker stop` ends a peer cleanly and in time, and that
the same command resumes. It uses Docker if its daemon answers, else Podman if it can pull the base image, else
sandbox.py, which needs neither a daemon nor a registry. It always removes its containers, volumes, networks, namespaces
and images.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SPEC = ROOT / "docker" / "run.toml"

BUILD_S = 3600.0
COMMAND_S = 60.0
START_S = 180.0  # importing torch on a busy machine, and the first evaluation
SWAP_S = 300.0
DEMO_S = 600.0
GRACE_S = 10  # the default of `docker stop`
POLL_S = 0.5

LOCKED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
# Prints programs and files that must not be in the image.
UNWANTED = r"""
for name in gcc cc g++ clang ld make protoc nvcc; do command -v "$name"; done
cd /opt/venv && ls -d lib/python3*/site-packages/pip lib/python3*/site-packages/grpc_tools 2>/dev/null
find . -type d -name tests
find /root/.cache /var/lib/apt/lists /var/cache/apt -type f 2>/dev/null
true
"""
PROOF = r"""
id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status | tr -d '\t'
touch /opt/x 2>/dev/null && echo writable; cat /proc/1/comm
"""


class Failed(Exception):
    """The check failed; the message says what was seen."""


class Engine:
    """The `docker` or `podman` command. All containers, volumes and networks that it makes share one prefix."""

    def __init__(self, command: str, *, prefix: str, run_flags: tuple[str, ...] = ()) -> None:
        self.command = command
        self.prefix = prefix
        self.run_flags = run_flags
        self._containers: list[str] = []
        self._volumes: list[str] = []

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Run a command, and return its standard output. Raises Failed with its standard error."""
        done = run([self.command, *arguments], timeout_s=timeout_s)
        if done.returncode:
            command = f"{self.command} {' '.join(arguments[:6])}"
            raise Failed(f"{command} .. failed with exit code {done.returncode}: {done.stderr}")
        return done.stdout

    def start(self, name: str, image: str, *arguments: str, flags: tuple[str, ...] = ()) -> Container:
        """Start a locked-down container on the private network, where others reach it as PREFIX-NAME."""
        full_name = f"{self.prefix}-{name}"
        self._containers.append(full_name)
        where = ("--name", full_name, "--network", self.prefix)
        self("run", "--detach", *where, *LOCKED, *self.run_flags, *flags, image, *arguments)
        return Container(self, full_name)

    def once(self, image: str, script: str) -> str:
        """Run a shell script in the image without any network, and return what it prints."""
        lonely = ("--network", "none", "--user", "0", "--entrypoint", "sh")
        return self("run", "--rm", *lonely, *self.run_flags, image, "-c", script)

    def volume(self, name: str) -> str:
        self._volumes.append(f"{self.prefix}-{name}")
        return f"{self.prefix}-{name}"

    @contextmanager
    def network(self) -> Iterator[None]:
        """Make a private bridge, and remove all that this engine made at its end."""
        self("network", "create", self.prefix)
        try:
            yield
        finally:
            for name in self._containers:
                run([self.command, "rm", "--force", "--volumes", name], timeout_s=COMMAND_S)
            for name in self._volumes:
                run([self.command, "volume", "rm", "--force", name], timeout_s=COMMAND_S)
            run([self.command, "network", "rm", self.prefix], timeout_s=COMMAND_S)


class Container:
    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    def status(self) -> dict[str, Any] | None:
        """Return `noloco status --json` of the peer; None until it answers. Raises Failed if the container ended."""
        done = run([self._engine.command, "exec", self.name, "noloco", "status", "--json"], timeout_s=COMMAND_S)
        if not self._is_running():
            raise Failed(f"{self.name} has ended; its log:\n{self.log()}")
        reply = json.loads(done.stdout) if done.stdout.strip() else {}
        return reply if "peer_id" in reply else None

    def shell(self, script: str) -> str:
        return self._engine("exec", self.name, "sh", "-c", script)

    def log(self) -> str:
        done = run([self._engine.command, "logs", self.name], timeout_s=COMMAND_S)
        return done.stdout + done.stderr

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], *, timeout_s: float, what: str) -> dict[str, Any]:
        """Wait for a status that fulfils a condition, and return it. Raises Failed."""
        until_s = time.monotonic() + timeout_s
        while not ((status := self.status()) and condition(status)):
            if time.monotonic() > until_s:
                raise Failed(
                    f"{self.name}: timed out after {timeout_s:.0f} s waiting for {what}; its log:\n{self.log()}"
                )
            time.sleep(POLL_S)
        return status

    def stop(self) -> float:
        """Run `docker stop`, remove the container, and return the seconds. Raises Failed if killed."""
        began_s = time.monotonic()
        self._engine("stop", "-t", str(GRACE_S), self.name)
        seconds = time.monotonic() - began_s
        code, said = self._inspect("{{.State.ExitCode}}"), self._engine("logs", self.name).splitlines()
        if code != "0" or not said[-1].startswith("left") or seconds > GRACE_S:
            raise Failed(f"{self.name} was stopped in {seconds:.1f} s with exit code {code}; its log:\n{self.log()}")
        self._engine("rm", self.name)
        return seconds

    def _is_running(self) -> bool:
        return self._inspect("{{.State.Running}}") == "true"

    def _inspect(self, template: str) -> str:
        return self._engine("inspect", "--format", template, self.name).strip()


def run(command: list[str], *, timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(command[:8])} .. did not end within {timeout_s:.0f} s") from None


def say(line: str) -> None:
    print(line, flush=True)


def check_image(engine: Engine, image: str) -> None:
    """Check the size of the image, and that it contains nothing that it must not."""
    for line in engine("history", "--format", "{{.Size}}\t{{.CreatedBy}}", image).splitlines():
        size, _, made_by = line.partition("\t")
        if not re.match(r"0 ?B", size):
            say(f"  layer {size:>9}  {re.sub(r' +', ' ', made_by)[:70]}")
    num_bytes = int(engine("inspect", "--type", "image", "--format", "{{.Size}}", image))
    say(f"  image {num_bytes / 1e6:.0f} MB")
    if unwanted := engine.once(image, UNWANTED).strip():
        raise Failed(f"the image contains files that should not be in it:\n{unwanted}")
    say("  the image contains no compiler, tests or package cache")


def check_swarm(engine: Engine, image: str) -> None:
    """Check a bootstrap, a peer that starts the run, and one with its ticket: they swap, stop cleanly, and resume."""
    began_s = time.monotonic()
    bootstrap = engine.start("bootstrap", image, "bootstrap", "--announce", f"{engine.prefix}-bootstrap")
    address = bootstrap.wait_for(lambda _: True, timeout_s=START_S, what="an address")["addresses"][0]
    say(f"  bootstrap up after {time.monotonic() - began_s:.1f} s")
    check_locked(bootstrap)

    threads = ("--env", "NOLOCO_THREADS=1")
    spec = ("--volume", f"{SPEC}:/run.toml:ro")
    first_state = ("--volume", f"{engine.volume('first')}:/state")
    first = engine.start(
        "first", image, "join", "/run.toml", "--bootstrap", address, flags=(*spec, *threads, *first_state)
    )
    ticket = first.wait_for(lambda s: s["step"] > 0, timeout_s=START_S, what="a step")["ticket"]
    say(f"  first peer trains after {time.monotonic() - began_s:.1f} s")

    join = ("join", ticket)
    flags = (*threads, "--volume", f"{engine.volume('second')}:/state")
    second, joined_s = engine.start("second", image, *join, flags=flags), time.monotonic()
    # It can swap before its first step, but is interrupted without a checkpoint until then.
    swapped = second.wait_for(lambda s: s["swaps"] > 0 < s["step"], timeout_s=SWAP_S, what="a swap and a step")
    say(f"  second peer: a swap {time.monotonic() - joined_s:.1f} s after docker run")
    say(f"  second peer stopped in {second.stop():.1f} s, exit code 0")

    second, again_s = engine.start("second", image, *join, flags=flags), time.monotonic()

    def resumed_at() -> float:
        found = re.search(r"resumed from step (\d+)", second.log())
        return int(found[1]) if found else float("inf")

    trained = second.wait_for(lambda s: s["step"] > resumed_at(), timeout_s=START_S, what="a further step")
    status = second.wait_for(lambda s: s["swaps"] > trained["swaps"], timeout_s=SWAP_S, what="another swap")
    if status["peer_id"] != swapped["peer_id"]:
        raise Failed(f"the same command did not resume; its log:\n{second.log()}")
    say(f"  the same command resumed from step {resumed_at()}, and swapped after {time.monotonic() - again_s:.1f} s")
    for what, container in (("second peer", second), ("first peer", first), ("bootstrap", bootstrap)):
        say(f"  {what} stopped in {container.stop():.1f} s, exit code 0")


def check_demo(engine: Engine, image: str) -> None:
    """Check `docker run IMAGE demo`: peers, a DHT and a corpus, without network and with a read-only root."""
    began_s = time.monotonic()
    flags = ("--network", "none", *LOCKED, *engine.run_flags)
    engine("run", "--rm", *flags, image, "demo", "--peers", "2", "--minutes", "1", timeout_s=DEMO_S)
    say(f"  two peers trained, left and were merged in {time.monotonic() - began_s:.0f} s")


def check_locked(container: Container) -> None:
    proof = container.shell(PROOF).split()
    if proof != ["10001", "CapEff:0000000000000000", "NoNewPrivs:1", "tini"]:
        raise Failed(f"the container is not locked down as expected: {proof}")
    say("  user 10001, no capabilities, no new privileges, read-only root file system, tini as init")


def check(engine: Engine, image: str) -> None:
    say("image")
    check_image(engine, image)
    say("demo")
    check_demo(engine, image)
    say("swarm")
    with engine.network():
        check_swarm(engine, image)


def build(engine: Engine, image: str) -> None:
    began_s = time.monotonic()
    engine("build", "--file", str(DOCKERFILE), "--target", "cpu", "--tag", image, str(ROOT), timeout_s=BUILD_S)
    say(f"built in {time.monotonic() - began_s:.0f} s")


def choose_engine() -> str:
    """Return the first of docker, podman and sandbox that works here."""
    base = re.search(r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert base is not None
    for name, proof in (("docker", ["docker", "info"]), ("podman", ["podman", "pull", "--quiet", base[1]])):
        try:
            if run(proof, timeout_s=300).returncode == 0:
                return name
        except (FileNotFoundError, Failed):
            continue
    return "sandbox"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("docker", "podman", "sandbox"), help="default: the first one that works")
    keep_help = "folder in which the sandbox keeps the base and the images for the next run"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=keep_help)
    parser.add_argument("--inside", metavar="IMAGE", help=argparse.SUPPRESS)  # sandbox.py runs this script again inside
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up after SIGTERM, too
    prefix = f"noloco-check-{os.getpid()}"
    try:
        if options.inside:
            check(Engine("podman", prefix=prefix, run_flags=("--cgroups", "disabled")), options.inside)
            return 0
        name = options.engine or choose_engine()
        say(f"engine {name}")
        if name == "sandbox":
            from sandbox import Sandbox

            with (
                tempfile.TemporaryDirectory(prefix="noloco-check-") as folder,
                Sandbox(options.keep or Path(folder)) as box,
            ):
                box.build(DOCKERFILE, target="cpu", tag=f"localhost/{prefix}", context=ROOT, say=say)
                code = box.run([sys.executable, __file__, "--inside", f"localhost/{prefix}"])
        else:
            engine = Engine(name, prefix=prefix)
            try:
                build(engine, prefix)
                check(engine, prefix)
            finally:
                run([name, "rmi", "--force", prefix], timeout_s=COMMAND_S)
            code = 0
    except Failed as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything has been cleaned up", file=sys.stderr)
        return 130
    say("passed" if code == 0 else "failed")
    return code


if __name__ == "__main__":
    sys.exit(main())
