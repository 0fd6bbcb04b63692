"""Emulate internet links between network namespaces on one machine, for benchmarks that need real sockets.

    python benchmarks/netlab.py [--quick] [--json FILE]      measures the links themselves

    with NetLab([home(rate_mbit_s=100, round_trip_ms=50)] * 4) as lab:
        ...each process calls enter(lab.nodes[i].namespace) first, then talks to lab.nodes[j].address
        lab.partition([0, 1], [2, 3])
    NetLab([...] * 3, routers=[Router("endpoint", "port")], behind=[None, 0, 0])      two at home, behind one router

Each node is a namespace with one TUN device. One forwarding process reads all of these devices, and delays every packet
by the time that it takes on the sender's uplink, on the path and on the receiver's downlink. Rates belong to a node, as
at home: all traffic of a node shares its uplink, whatever the destination. The kernel must support namespaces and TUN,
but not netem. The lab needs root, /dev/net/tun and iproute2.

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
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from harness.nat import Router, Routers
from harness.packets import OFFLOAD_HEADER, destination_address, flow, wire_bytes

DEVICE = "wan0"
PREFIX = "noloco-lab"  # followed by the pid of the forwarding process and the index of the node
NAMESPACES = Path("/run/netns")
TUN = Path("/dev/net/tun")
ANSWER_S = 20.0  # for the forwarding process to start, to answer or to end
READS_AT_ONCE = 32

# linux/if_tun.h, linux/virtio_net.h, linux/sched.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
MAX_FRAME_BYTES = OFFLOAD_HEADER.size + 65_535


class LabError(RuntimeError):
    """Raised if the lab cannot be made or does not answer. The message says what is missing."""


# links


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of the line between a node and the middle of the network."""

    rate_mbit_s: float = 0.0  # of IP packets; 0 = unlimited
    delay_ms: float = 0.0  # one way, this line only; from a to b it is a's up + b's down
    jitter_ms: float = 0.0  # added delay, uniform from 0 to this; packets keep their order
    loss: float = 0.0  # share of packets, at random
    queue_ms: float = 100.0  # capacity of the queue in front of a full line; further packets are dropped


@dataclass(frozen=True, slots=True)
class Access:
    """The two directions of a node's line."""

    up: Line = Line()
    down: Line = Line()


def home(
    *, rate_mbit_s: float, round_trip_ms: float, jitter_ms: float = 0.0, loss: float = 0.0, queue_ms: float = 100.0
) -> Access:
    """Return a symmetric line. The round trip between two nodes with such lines is `round_trip_ms`.

    `jitter_ms` and `loss` apply to a packet's whole path from one node to the other.
    """
    leg_ms = round_trip_ms / 4
    up = Line(rate_mbit_s, leg_ms, jitter_ms, loss, queue_ms)
    return Access(up, Line(rate_mbit_s, leg_ms, queue_ms=queue_ms))


@dataclass(slots=True)
class Counters:
    """The traffic of one node. Bytes are those of whole IP packets, with headers and retransmissions."""

    sent_bytes: int = 0  # offered to the uplink, dropped packets included
    received_bytes: int = 0
    lost_packets: int = 0  # of the sent packets, at random or by a cut
    dropped_packets: int = 0  # at a full queue: uplink of the sender or downlink of the receiver
    filtered_packets: int = 0  # rejected by its router


# the network in virtual time: no clock, no sockets


@dataclass(slots=True)
class _Packet:
    source: int
    destination: int
    num_bytes: int  # on the wire
    frame: bytes
    on_downlink: bool = False


@dataclass(slots=True)
class Fabric:
    """Decides where and when each packet arrives. All times are in seconds on one clock, and must not decrease."""

    accesses: list[Access]
    rng: random.Random
    counters: list[Counters] = field(init=False)
    groups: list[int] = field(init=False)  # nodes of different groups cannot reach each other
    blocked: set[tuple[int, int]] = field(init=False, default_factory=set)  # (source, destination): this way only
    closed: set[int] = field(init=False, default_factory=set)  # nodes that open connections and accept none
    _flows: set[tuple[int, bytes]] = field(init=False, default_factory=set)  # opened by closed nodes
    _free_up_s: list[float] = field(init=False)  # when the queue of the line is empty
    _free_down_s: list[float] = field(init=False)
    _last_s: dict[tuple[int, int], float] = field(init=False, default_factory=dict)
    _events: list[tuple[float, int, _Packet]] = field(init=False, default_factory=list)
    _num_events: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        num_nodes = len(self.accesses)
        self.counters = [Counters() for _ in range(num_nodes)]
        self.groups = [0] * num_nodes
        self._free_up_s = [0.0] * num_nodes
        self._free_down_s = [0.0] * num_nodes

    def accept(self, frame: bytes, *, source: int, destination: int, num_bytes: int, now_s: float) -> None:
        """Accept a packet that leaves `source`."""
        access, counters = self.accesses[source], self.counters[source]
        up = access.up
        counters.sent_bytes += num_bytes
        if source in self.closed:
            self._flows.add((source, flow(frame)))
        if not self._passes(frame, source, destination):
            counters.lost_packets += 1
            return
        free_s = max(now_s, self._free_up_s[source])
        if free_s - now_s > up.queue_ms / 1e3:
            counters.dropped_packets += 1
            return
        sent_s = free_s + serial_s(num_bytes, up)
        self._free_up_s[source] = sent_s
        down = self.accesses[destination].down
        if (up.loss and self.rng.random() < up.loss) or (down.loss and self.rng.random() < down.loss):
            counters.lost_packets += 1
            return
        jitter_ms = self.rng.random() * (up.jitter_ms + down.jitter_ms)
        arrives_s = sent_s + (up.delay_ms + down.delay_ms + jitter_ms) / 1e3
        way = source, destination
        arrives_s = self._last_s[way] = max(arrives_s, self._last_s.get(way, 0.0))
        self._push(arrives_s, _Packet(source, destination, num_bytes, frame))

    def _passes(self, frame: bytes, source: int, destination: int) -> bool:
        """Whether a packet passes the cuts and the firewall of a closed node, which admits only answers."""
        if self.groups[source] != self.groups[destination] or (source, destination) in self.blocked:
            return False
        return destination not in self.closed or (destination, flow(frame, reverse=True)) in self._flows

    def deliver(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield (node, frame) of each packet that has arrived by `now_s`, in order."""
        while self._events and self._events[0][0] <= now_s:
            when_s, _, packet = heapq.heappop(self._events)
            through_s = when_s if packet.on_downlink else self._pass_downlink(packet, when_s)
            if through_s is None:
                self.counters[packet.destination].dropped_packets += 1
            elif through_s > now_s:
                packet.on_downlink = True
                self._push(through_s, packet)
            else:
                self.counters[packet.destination].received_bytes += packet.num_bytes
                yield packet.destination, packet.frame

    def next_s(self) -> float | None:
        """Return the time of the next event for `deliver`, or None if there is no such event."""
        return self._events[0][0] if self._events else None

    def _pass_downlink(self, packet: _Packet, when_s: float) -> float | None:
        """Return when the packet has passed the receiver's line; None if its queue is full.

        A packet that meets no queue passes at once. The sender's line has already delayed it by its length, and a
        second delay would be too long for a packet that stands for many segments.
        """
        down, node = self.accesses[packet.destination].down, packet.destination
        if self._free_down_s[node] - when_s > down.queue_ms / 1e3:
            return None
        through_s = max(when_s, self._free_down_s[node] + serial_s(packet.num_bytes, down))
        self._free_down_s[node] = through_s
        return through_s

    def _push(self, when_s: float, packet: _Packet) -> None:
        self._num_events += 1  # breaks ties: first in, first out
        heapq.heappush(self._events, (when_s, self._num_events, packet))


def serial_s(num_bytes: int, line: Line) -> float:
    """Return how many seconds a line needs to send a packet."""
    return num_bytes * 8e-6 / line.rate_mbit_s if line.rate_mbit_s else 0.0


def node_address(index: int) -> str:
    return f"10.77.{index // 250}.{index % 250 + 1}"


# the lab, as its user sees it


@dataclass(frozen=True, slots=True)
class Node:
    namespace: str
    address: str


class NetLab:
    """Namespaces with lines between them, from `__enter__` to `__exit__`.

    congestion_control: The congestion control of TCP within the namespaces. None is the default of the machine. Raises
        LabError if the kernel does not have it.
    offload: If true, TCP may hand over segments of up to 16 KiB in total as one packet, as to a network card. This is
        ten times less work for the forwarding process, but loss and queues drop such packets as a whole. Lines with
        loss therefore need `offload=False`, which is their default.
    routers, behind: The routers, and for each node the index of its router, or None. harness/nat.py describes what
        routers do, and which addresses nodes have behind them.
    """

    def __init__(
        self,
        accesses: Sequence[Access],
        *,
        congestion_control: str | None = None,
        offload: bool | None = None,
        routers: Sequence[Router] = (),
        behind: Sequence[int | None] = (),
    ) -> None:
        self._routers, self._behind = list(routers), list(behind)
        has_loss = any(access.up.loss or access.down.loss for access in accesses)
        self._offload = not has_loss if offload is None else offload
        self._accesses = list(accesses)
        self._congestion_control = congestion_control
        self._process: subprocess.Popen[str] | None = None
        self.nodes: tuple[Node, ...] = ()

    def __enter__(self) -> NetLab:
        """Raises LabError when rights or tools are missing."""
        check_rights(os.geteuid())
        # A session of its own: Ctrl-C in a terminal must not end it before it has cleaned up.
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-s", str(Path(__file__).resolve()), "--forward"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            answer = self._ask(
                accesses=[asdict(access) for access in self._accesses],
                offload=self._offload,
                congestion_control=self._congestion_control,
                routers=[asdict(router) for router in self._routers],
                behind=self._behind,
            )
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

    def set_access(self, index: int, access: Access) -> None:
        """Change the line of a node. Packets in flight are not affected."""
        if self._offload and (access.up.loss or access.down.loss):
            raise LabError("a line with loss needs a lab made with offload=False: loss takes single packets")
        self._accesses[index] = access
        self._ask(node=index, access=asdict(access))

    def partition(self, *groups: Sequence[int]) -> None:
        """Separate the groups from each other. A node that is in no group is separated from all other nodes."""
        numbers = [-1 - index for index in range(len(self.nodes))]
        for number, group in enumerate(groups):
            for index in group:
                numbers[index] = number
        self._ask(groups=numbers)

    def heal(self) -> None:
        """Remove all partitions and blocks. Nodes that accept no connections stay closed."""
        self._ask(groups=[0] * len(self.nodes), blocked=[])

    def block(self, *ways: tuple[int, int]) -> None:
        """Drop all packets from each source to its destination, in this direction only. Each call replaces the last."""
        self._ask(blocked=ways)

    def let_nothing_in(self, *nodes: int) -> None:
        """Let these nodes open connections but accept none, as behind a home router. Others accept them."""
        self._ask(closed=nodes)

    def counters(self) -> list[Counters]:
        """Return the counters of each node since the lab was made."""
        return [Counters(**counters) for counters in self._ask(counters=True)["counters"]]

    def _ask(self, **request: Any) -> dict[str, Any]:
        """Send one line to the forwarding process, and return its answer. Raises LabError."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise LabError("the lab is closed")
        with contextlib.suppress(BrokenPipeError):  # its last message is read below
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], ANSWER_S)[0]:
            raise LabError(f"the forwarding process (pid {process.pid}) says nothing for {ANSWER_S:g} s")
        line = process.stdout.readline()
        if not line:
            raise LabError(f"the forwarding process (pid {process.pid}) has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer


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
    """Make the namespaces that the first line of standard input names, forward packets until its end, and clean up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remove_stale()
    try:
        try:
            request = json.loads(sys.stdin.readline())
            accesses = [_access(values) for values in request["accesses"]]
            names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(len(accesses))]
            network = _network(request, len(accesses))
            devices = [
                make_node(name, address, network.route, request["congestion_control"], offload=request["offload"])
                for name, address in zip(names, network.addresses, strict=True)
            ]
        except (OSError, ValueError, subprocess.CalledProcessError, LabError) as error:
            detail = getattr(error, "stderr", "") or ""
            _say(error=f"the lab cannot be made: {error} {detail}".strip())
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)  # a late packet would measure this machine, not the link
            Path("/proc/self/autogroup").write_text("-10")  # for kernels that divide the CPU among sessions first
        _say(namespaces=names, addresses=network.addresses)
        _forward(devices, Fabric(accesses, random.Random(0)), network)
    finally:
        remove_namespaces(os.getpid())


class Open:
    """A network without routers, in which every node can reach every other node."""

    route = "10.77.0.0/16"

    def __init__(self, num_nodes: int) -> None:
        self.addresses = [node_address(node) for node in range(num_nodes)]
        self._nodes = {socket.inet_aton(address): node for node, address in enumerate(self.addresses)}

    def leave(self, frame: bytes, node: int) -> tuple[bytes, int] | None:
        target = self._nodes.get(destination_address(frame) or b"")
        return None if target is None else (frame, target)

    def arrive(self, frame: bytes) -> bytes | None:
        return frame


def _network(request: dict[str, Any], num_nodes: int) -> Open | Routers:
    if not request["routers"]:
        return Open(num_nodes)
    return Routers([Router(**values) for values in request["routers"]], request["behind"])


def _forward(devices: list[int], fabric: Fabric, network: Open | Routers) -> None:
    node_of_device = {device: node for node, device in enumerate(devices)}
    commands = sys.stdin.fileno()
    pending = b""
    while True:
        now_s = time.monotonic()
        for node, frame in fabric.deliver(now_s):
            arrived = network.arrive(frame)
            if arrived is None:
                fabric.counters[node].filtered_packets += 1
                continue
            try:
                os.write(devices[node], arrived)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINVAL, errno.EIO, errno.ENOBUFS):
                    raise
                fabric.counters[node].dropped_packets += 1
        next_s = fabric.next_s()
        wait_s = 1.0 if next_s is None else max(0.0, next_s - time.monotonic())
        ready, _, _ = select.select([*devices, commands], [], [], wait_s)  # epoll rounds up to milliseconds
        for fd in ready:
            if fd != commands:
                _read_device(fd, node_of_device[fd], network, fabric)
                continue
            data = os.read(commands, 65_536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), fabric)


def _read_device(fd: int, source: int, network: Open | Routers, fabric: Fabric) -> None:
    for _ in range(READS_AT_ONCE):
        try:
            frame = os.read(fd, MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        if on_its_way := network.leave(frame, source):
            outside, destination = on_its_way
            fabric.accept(
                outside,
                source=source,
                destination=destination,
                num_bytes=wire_bytes(frame),
                now_s=time.monotonic(),
            )


def _obey(request: dict[str, Any], fabric: Fabric) -> None:
    if "access" in request:
        fabric.accesses[request["node"]] = _access(request["access"])
    if "groups" in request:
        fabric.groups = request["groups"]
    if "blocked" in request:
        fabric.blocked = {(source, destination) for source, destination in request["blocked"]}
    if "closed" in request:
        fabric.closed = set(request["closed"])
    _say(counters=[asdict(counters) for counters in fabric.counters])


def _access(values: dict[str, Any]) -> Access:
    return Access(Line(**values["up"]), Line(**values["down"]))


def _say(**answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the lab has closed; standard input ends, too
        print(json.dumps(answer), flush=True)


def make_node(name: str, address: str, route: str, congestion_control: str | None, *, offload: bool) -> int:
    """Make the namespace and its device, route `route` through the device, and return the open device."""
    _ip("netns", "add", name)
    with open("/proc/self/ns/net", "rb") as here:
        enter(name)
        try:
            device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
            fcntl.ioctl(device, TUNSETIFF, struct.pack("=16sH22x", DEVICE.encode(), flags))
            if offload:
                fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
            _ip("link", "set", "lo", "up")
            _ip("addr", "add", f"{address}/32", "dev", DEVICE)
            _ip("link", "set", DEVICE, "mtu", "1500", "gso_max_size", "16384", "txqueuelen", "1000", "up")
            _add_route(route, address, congestion_control)
        finally:
            _set_namespace(here.fileno())
    return device


def _add_route(route: str, address: str, congestion_control: str | None) -> None:
    """Add the route with its congestion control.

    The sysctl of a namespace accepts only what the kernel allows all users, which often excludes cubic.
    """
    way = [route, "dev", DEVICE, "scope", "link", "src", address]
    try:
        _ip("route", "add", *way, *(["congctl", congestion_control] if congestion_control else []))
    except subprocess.CalledProcessError:
        if not congestion_control:
            raise
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().strip()
        raise LabError(
            f"there is no congestion control {congestion_control!r} here; this kernel has {available}"
        ) from None


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


# the links, measured


def tcp_mbit_s(lab: NetLab, ways: Sequence[tuple[int, int]], *, seconds: float, congestion_control: str) -> float:
    """Return the total payload rate of simultaneous TCP streams, one per (sender, receiver), after the first second."""
    streams = [_Stream(lab, way, congestion_control) for way in ways]
    threads = [threading.Thread(target=part) for stream in streams for part in (stream.receive, stream.send)]
    until_s = time.monotonic() + seconds
    for stream in streams:
        stream.until_s = until_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(stream.mbit_s for stream in streams)


class _Stream:
    """A TCP connection that sends as much as it can."""

    def __init__(self, lab: NetLab, way: tuple[int, int], congestion_control: str) -> None:
        source, destination = (lab.nodes[index] for index in way)
        self.until_s = 0.0
        self.mbit_s = 0.0
        with _socket_in(destination) as listener:
            listener.bind(("", 0))
            listener.listen()
            self._sender = _socket_in(source)
            self._sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
            self._sender.connect((destination.address, listener.getsockname()[1]))
            self._receiver = listener.accept()[0]
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed at the end

    def send(self) -> None:
        block = bytes(1 << 18)
        with self._sender:
            while time.monotonic() < self.until_s:
                self._sender.sendall(block)

    def receive(self) -> None:
        began_s, num_bytes, inbox = time.monotonic(), 0, bytearray(1 << 20)
        first_s = last_s = 0.0
        with self._receiver, contextlib.suppress(ConnectionResetError):
            while received := self._receiver.recv_into(inbox):
                last_s = time.monotonic()
                if first_s:
                    num_bytes += received
                elif last_s - began_s > 1.0:  # TCP starts slowly
                    first_s = last_s
        self.mbit_s = num_bytes * 8e-6 / (last_s - first_s)


def round_trip_ms(lab: NetLab, *, repeats: int = 20, timeout_s: float = 5.0) -> float:
    """Return the median round-trip time of small UDP packets between node 0 and node 1."""
    times_ms = []
    with _socket_in(lab.nodes[0], socket.SOCK_DGRAM) as near, _socket_in(lab.nodes[1], socket.SOCK_DGRAM) as far:
        near.settimeout(timeout_s)
        far.settimeout(timeout_s)
        far.bind(("", 0))
        target = lab.nodes[1].address, far.getsockname()[1]
        for _ in range(repeats):
            began_s = time.monotonic()
            near.sendto(b"there", target)
            far.sendto(b"back", far.recvfrom(64)[1])
            near.recv(64)
            times_ms.append((time.monotonic() - began_s) * 1e3)
    return median(times_ms)


def _socket_in(node: Node, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket of the node's namespace. It stays there, whichever thread uses it."""

    def make() -> socket.socket:
        enter(node.namespace)
        return socket.socket(socket.AF_INET, kind)

    with ThreadPoolExecutor(1) as thread:  # only this thread moves into the namespace
        return thread.submit(make).result()


def measure(quick: bool) -> list[Any]:
    """Measure lines of 100 Mbit/s with a round trip of 50 ms."""
    from claims import Claim  # here, because the forwarding process does not need it

    seconds = 3.0 if quick else 15.0
    line = home(rate_mbit_s=100, round_trip_ms=50)
    one_way = {
        "one way": [(0, 1)],
        "one uplink to three peers, sum": [(0, 1), (0, 2), (0, 3)],
        "three peers to one downlink, sum": [(1, 0), (2, 0), (3, 0)],
    }
    crossing = {  # acknowledgements wait behind the data of the other direction, as on a real line
        "both ways, sum of two": [(0, 1), (1, 0)],
        "ring, sum of four": [(0, 1), (1, 2), (2, 3), (3, 0)],
    }
    claims = []
    for name in ("cubic", "bbr"):
        with NetLab([line] * 4) as lab:
            if not claims:
                trip_ms = round_trip_ms(lab)
                claims.append(Claim("round trip of a small packet", trip_ms, "ms", "50 to 52", 50 <= trip_ms <= 52))
            for what, ways in one_way.items():
                rate = tcp_mbit_s(lab, ways, seconds=seconds, congestion_control=name)
                claims.append(Claim(f"TCP {name}, {what}", rate, "Mbit/s", ">= 90", rate >= 90))
            for what, ways in crossing.items():
                rate = tcp_mbit_s(lab, ways, seconds=seconds, congestion_control=name)
                claims.append(Claim(f"TCP {name}, {what}", rate, "Mbit/s"))
        with NetLab([home(rate_mbit_s=100, round_trip_ms=50, loss=0.01)] * 2) as lab:
            rate = tcp_mbit_s(lab, [(0, 1)], seconds=seconds, congestion_control=name)
            claims.append(Claim(f"TCP {name}, one way, 1 % loss", rate, "Mbit/s"))
    return claims


if __name__ == "__main__":
    if sys.argv[1:] == ["--forward"]:
        forward()
    else:
        from claims import run

        try:
            run(measure, doc=__doc__)
        except LabError as failure:
            sys.exit(f"netlab: {failure}")
