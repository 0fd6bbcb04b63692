"""Emulate routers and firewalls between network namespaces on one machine, for tests and benchmarks with real sockets.

    with NetLab(4, round_trip_ms=50) as lab:
        ...each process calls enter(lab.nodes[i].namespace) first, then talks to lab.nodes[j].address
    NetLab(3, routers=[Router("endpoint", "port")], behind=[None, 0, 0])      two at home, behind one router

Each node is a namespace with one TUN device. One forwarding process reads all of these devices, passes each packet
through the routers, and delays it by half of the round trip. The kernel must support namespaces and TUN, but not netem.
The lab needs root, /dev/net/tun and iproute2.

The forwarding process owns the namespaces. When the lab is closed or the process that made it dies, the forwarding
process kills all processes in the namespaces, deletes the namespaces, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from harness.nat import Router, Routers
from harness.packets import OFFLOAD_HEADER, flow

DEVICE = "wan0"
PREFIX = "noloco-lab"  # followed by the pid of the forwarding process and the index of the node
NAMESPACES = Path("/run/netns")
TUN = Path("/dev/net/tun")
ANSWER_S = 20.0  # for the forwarding process to start or to end
READS_AT_ONCE = 32
QUEUE_S = 0.2

# linux/if_tun.h, linux/virtio_net.h, linux/sched.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
MAX_FRAME_BYTES = OFFLOAD_HEADER.size + 65_535


class LabError(RuntimeError):
    """Raised if the lab cannot be made or does not answer. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Node:
    namespace: str
    address: str


class NetLab:
    """Namespaces of `num_nodes` nodes, from `__enter__` to `__exit__`.

    `behind` has the index of the router of each node, or None for a node on the internet. harness/nat.py describes what
    routers do, and which addresses nodes have behind them. Nodes in `closed` open connections but accept none, as
    behind a firewall. Each node sends at most `mbit_s` and drops what would wait longer than QUEUE_S, unless it is 0.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        round_trip_ms: float = 2.0,
        routers: Sequence[Router] = (),
        behind: Sequence[int | None] | None = None,
        closed: Sequence[int] = (),
        mbit_s: float = 0.0,
    ) -> None:
        self.nodes: tuple[Node, ...] = ()
        self._request = {
            "delay_s": round_trip_ms / 2e3,
            "routers": [asdict(router) for router in routers],
            "behind": list(behind or [None] * num_nodes),
            "closed": list(closed),
            "bytes_per_s": mbit_s * 1e6 / 8,
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> NetLab:
        """Raises LabError when rights or tools are missing."""
        check_rights(os.geteuid())
        # A session of its own: Ctrl-C in a terminal must not end it before it has cleaned up.
        self._process = process = subprocess.Popen(
            [sys.executable, "-E", "-s", str(Path(__file__).resolve()), "--forward"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(self._request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline() if select.select([process.stdout], [], [], ANSWER_S)[0] else ""
            answer = json.loads(line or '{"error": "the forwarding process has ended or says nothing"}')
            if "error" in answer:
                raise LabError(answer["error"])
        except BaseException:
            self.close()
            raise
        self.nodes = tuple(map(Node, answer["namespaces"], answer["addresses"]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes in the namespaces, and delete the namespaces. It is safe to call this twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # ends the forwarding process
        try:
            process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        remove_namespaces(process.pid)  # finds something only if that process was killed


def check_rights(user_id: int, *, tun: Path = TUN) -> None:
    """Raise a LabError that names the missing rights or tools, if there are any."""
    if user_id != 0:
        raise LabError(
            "network namespaces need root: run this with sudo, or in a container with CAP_SYS_ADMIN and NET_ADMIN"
        )
    if shutil.which("ip") is None:
        raise LabError("the command `ip` is missing: install iproute2")
    if not os.access(tun, os.R_OK | os.W_OK):
        raise LabError(f"{tun} cannot be opened: load the module tun, or pass the device into the container")


def why_not() -> str:
    """Return the reason why this process cannot make a lab, or "" if it can."""
    try:
        check_rights(os.geteuid())
    except LabError as error:
        return str(error)
    return ""


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace of a lab, with all threads and processes that it starts afterwards."""
    with open(NAMESPACES / namespace, "rb") as there:
        _set_namespace(there.fileno())


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET):
        code = ctypes.get_errno()
        raise LabError(f"cannot enter a network namespace: {os.strerror(code)}; it needs CAP_SYS_ADMIN")


# the forwarding process


def forward() -> None:
    """Make the namespaces that the first line of standard input describes, and forward packets until its end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remove_stale()
    try:
        try:
            request = json.loads(sys.stdin.readline())
            network = Routers([Router(**values) for values in request["routers"]], request["behind"])
            names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(len(network.addresses))]
            devices = [make_node(name, address) for name, address in zip(names, network.addresses, strict=True)]
        except (OSError, ValueError, subprocess.CalledProcessError, LabError) as error:
            detail = getattr(error, "stderr", "") or ""
            print(json.dumps({"error": f"the lab cannot be made: {error} {detail}".strip()}), flush=True)
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)  # a late packet would measure this machine, not the link
            Path("/proc/self/autogroup").write_text("-10")  # for kernels that divide the CPU among sessions first
        print(json.dumps({"namespaces": names, "addresses": network.addresses}), flush=True)
        rest = {name: request[name] for name in ("delay_s", "closed", "bytes_per_s")}
        Forwarding(network, **rest).run(devices)
    finally:
        remove_namespaces(os.getpid())


class Forwarding:
    """The packets on their way, in the order in which they arrive."""

    def __init__(self, network: Routers, *, delay_s: float, closed: Sequence[int], bytes_per_s: float = 0.0) -> None:
        self._network = network
        self._delay_s = delay_s
        self._closed = set(closed)
        self._flows: set[tuple[int, bytes]] = set()  # opened by closed nodes
        self._bytes_per_s = bytes_per_s
        self._free_at_s: dict[int, float] = {}  # when the link of a node has sent its last packet
        self._packets: list[tuple[float, int, int, bytes]] = []  # a heap of (when it arrives, number, node, frame)
        self._num_sent = 0

    def run(self, devices: Sequence[int]) -> None:
        """Forward packets until the end of standard input."""
        nodes, commands = {device: node for node, device in enumerate(devices)}, sys.stdin.fileno()
        while True:
            for node, frame in self.arrived(time.monotonic()):
                try:
                    os.write(devices[node], frame)
                except OSError as error:  # the queue of the device is full, for example
                    if error.errno not in (errno.EAGAIN, errno.EINVAL, errno.EIO, errno.ENOBUFS):
                        raise
            wait_s = max(0.0, self._packets[0][0] - time.monotonic()) if self._packets else 1.0
            ready, _, _ = select.select([*devices, commands], [], [], wait_s)  # epoll rounds up to milliseconds
            if commands in ready:
                return
            for device in ready:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(READS_AT_ONCE):
                        self.send(os.read(device, MAX_FRAME_BYTES), nodes[device], time.monotonic())

    def send(self, frame: bytes, source: int, now_s: float) -> None:
        """Accept a packet that leaves a node."""
        on_its_way = self._network.leave(frame, source)
        if on_its_way is None:
            return
        outside, destination = on_its_way
        if source in self._closed:
            self._flows.add((source, flow(frame)))
        if destination not in self._closed or (destination, flow(outside, reverse=True)) in self._flows:
            sent_s = now_s
            if self._bytes_per_s:
                begin_s = max(now_s, self._free_at_s.get(source, 0.0))
                if begin_s > now_s + QUEUE_S:
                    return
                sent_s = self._free_at_s[source] = begin_s + len(frame) / self._bytes_per_s
            self._num_sent += 1
            heapq.heappush(self._packets, (sent_s + self._delay_s, self._num_sent, destination, outside))

    def arrived(self, now_s: float) -> list[tuple[int, bytes]]:
        """Return (node, frame) of each packet that has arrived and that the routers let in."""
        found = []
        while self._packets and self._packets[0][0] <= now_s:
            _, _, node, frame = heapq.heappop(self._packets)
            if (inside := self._network.arrive(frame)) is not None:
                found.append((node, inside))
        return found


def make_node(name: str, address: str) -> int:
    """Make the namespace and its device, route everything through the device, and return the open device.

    TCP may hand over segments of up to 16 KiB in total as one packet, as to a network card, which is ten times less
    work for the forwarding process.
    """
    _ip("netns", "add", name)
    with open("/proc/self/ns/net", "rb") as here:
        enter(name)
        try:
            device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
            fcntl.ioctl(device, TUNSETIFF, struct.pack("=16sH22x", DEVICE.encode(), flags))
            fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
            _ip("link", "set", "lo", "up")
            _ip("addr", "add", f"{address}/32", "dev", DEVICE)
            _ip("link", "set", DEVICE, "mtu", "1500", "gso_max_size", "16384", "txqueuelen", "1000", "up")
            _ip("route", "add", "default", "dev", DEVICE, "scope", "link", "src", address)
        finally:
            _set_namespace(here.fileno())
    return device


def remove_namespaces(owner: int) -> None:
    """Kill all processes in the namespaces that the forwarding process `owner` made, and delete the namespaces."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}-{owner}-*")):
        _empty(path.name)
        subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def remove_stale() -> None:
    """Remove the namespaces of labs whose forwarding process was killed before it could clean up."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\d+", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove_namespaces(int(found[1]))


def _empty(name: str) -> None:
    until_s = time.monotonic() + ANSWER_S / 2
    while time.monotonic() < until_s:
        found = subprocess.run(
            ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
        ).stdout.split()
        if not found:
            return
        for pid in map(int, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    forward()
