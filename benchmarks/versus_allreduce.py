"""Compare a synchronisation over home links by this project, by all-reduce on gloo, and by hivemind's averager.

    sudo python benchmarks/versus_allreduce.py [--quick] [--json FILE]

N peers run in separate processes, each in its own network namespace (`netlab.py`) with 100 Mbit/s in each direction and
a round trip of 50 ms. All methods synchronise the same fp32 vector over the same links, one method after another.
*Blocked* is the time that the training thread waits at the boundary of a round:

    gloo fp32         `all_reduce` of the vector, as DiLoCo does with its outer gradient
    gloo bf16         copy the vector to bf16, `all_reduce` the copy, copy it back
    gloo int8         a ring of sends in which every hop encodes in int8, as in PRIME
    ..., overlapped   bf16 and int8 during the next inner steps: make a copy, and add the mean later
    hivemind fp16     from the trigger of a step to its end, after matchmaking and with all connections open
    waiting           `stage` and `collect` of a swap with one partner, including the wait for its outer gradient
    eager             `stage` and `collect` without the wait, and the later addition of the partner's half

Swaps use TLS, as they do between real peers; gloo and hivemind do not encrypt. Slow weights and the outer momentum, if
it is swapped, are sent during the round, both with modulo8. Here, the boundary comes once the early parts of all peers
are committed and the lines have been idle for a while, as would be the case in a longer round. A first round, which is
not measured, sets the bounds of modulo coding. A barrier right before the boundary makes partners punctual; their
remaining lateness is part of "blocked", and is also reported separately. *The line of a round* is the blocked time plus
the time of the hidden early part: no round can be shorter, overlapped or not. Figures are medians over peers and
repeats. "Sent" is the size of all IP packets that a peer sends on its uplink, including acknowledgements.

In a real swarm, each peer has its own machine; here, N peers share the cores of one machine. This hardly affects the
time spent waiting for the network, but it slows computation. So the pairs of "eager" reach their boundaries one after
another. This gives them no advantage on the network, because pairs do not share a line. In "eager, all at once", all N
peers encode at the same time. "CPU of the training thread" is the cost of the boundary for a peer with its own core.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from claims import Claim, run
from netlab import DEVICE, LabError, NetLab, enter, home
from pair import PATIENCE_S, BarePeer

from noloco_p2p.codec import CHUNK_ELEMENTS, Scratch, chunk_bounds, section_bytes
from noloco_p2p.codec.blocks import INT8
from noloco_p2p.gossip.exchange import ThreadedExchange
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Half
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net.session import Session
from noloco_p2p.outer.chunk_filter import ChunkFilter
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec

RATE_MBIT_S, ROUND_TRIP_MS = 100.0, 50.0
REST_S, QUICK_REST_S = 2.0, 0.5  # a connection that was idle starts slowly again, as after a real round
STALLED_S, STALLED_BYTES = 60.0, 1_000_000  # a step that sends less than this in this time will not end
TRIES = 3
CODECS = CodecSpec(slow_weights="modulo8", outer_momentum="modulo8", outer_gradient="int4")
SAMPLE_STRIDE, SAMPLE_TOLERANCE = 997, 0.2  # bf16 rounds sums of 40 to 0.125

QUICK_ELEMENTS = 2_000_000
COMMON_ELEMENTS = 32_000_000  # at N = 2, 4 and 8, if it fits for 8; more would take over a quarter of an hour in total
# Measured peak of a peer with all its processes; hivemind needs most, 20 bytes per parameter.
MEMORY_PER_ELEMENT, MEMORY_PER_PEER, MEMORY_SHARE = 20, 400_000_000, 0.85


class BenchmarkError(RuntimeError):
    """Raised if a method fails. The message names the process and its error."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The arguments of one process, including its rank, its namespace and the addresses of all processes."""

    rank: int
    namespace: str
    addresses: tuple[str, ...]
    num_elements: int
    rest_s: float

    @property
    def size(self) -> int:
        return len(self.addresses)


@dataclass(frozen=True, slots=True)
class Sample:
    """One peer's measurements of one synchronisation."""

    kind: str
    blocked_s: float
    began_s: float  # on the monotonic clock, which all processes of a machine share
    sent_bytes: int
    partner: int | None = None
    early_s: float = 0.0  # hidden, while the early part travelled
    apply_s: float = 0.0  # the part of `blocked_s` that adds a late half
    cpu_s: float = 0.0  # of the training thread, within `blocked_s`
    late_s: float = 0.0  # from the boundary to the arrival of the partner's half
    payload_bytes: int = 0
    share: float = 1.0  # of the vector that equals the mean of all peers, from a sample
    fault: str = ""


class Table:
    """A barrier for the processes of one method, at which each of them receives the messages of all."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.sent_bytes = 0  # on the own uplink, at the last barrier

    def meet(self, word: Any = None) -> list[Any]:
        self._pipe.send(("meet", word))
        words, self.sent_bytes = self._pipe.recv()
        return words


# a process


def sit_down(method: Callable[[Seat, Table], list[Sample]], seat: Seat, pipe: Connection) -> None:
    """Run `method` in this process and in the namespace of the seat, and send its samples or its error."""
    enter(seat.namespace)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format=f"peer {seat.rank}: %(message)s")
    try:
        answer: Any = ("done", method(seat, Table(pipe)))
    except Exception as error:  # noqa: BLE001 - the parent reports it instead of a figure
        answer = ("failed", f"{type(error).__name__}: {error}")
    with suppress(OSError, EOFError):
        pipe.send(answer)
        pipe.recv()  # wait until all are done, as others may still need this peer, or until the parent gives up


def noise(seat: Seat, *, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Return random numbers that are the same for every peer."""
    return torch.randn(seat.num_elements, generator=torch.Generator().manual_seed(seed)).mul_(scale)


class Judge:
    """Checks the mean of all peers' vectors. Each vector is the same noise plus the rank of its peer."""

    def __init__(self, seat: Seat) -> None:
        self.vector = noise(seat).add_(seat.rank)
        self._mean = self.vector[::SAMPLE_STRIDE] + ((seat.size - 1) / 2 - seat.rank)

    def share_of_mean(self) -> float:
        right = (self.vector[::SAMPLE_STRIDE] - self._mean).abs_() < SAMPLE_TOLERANCE
        return float(right.float().mean())


def all_reduce_on_gloo(seat: Seat, table: Table) -> list[Sample]:
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.addresses[0]}:29500",  # no port is taken in a new namespace
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=PATIENCE_S),
    )

    ways: dict[str, Callable[[torch.Tensor], None]] = {"fp32": mean_in_fp32, "bf16": mean_in_bf16, "int8": mean_in_int8}
    dist.all_reduce(torch.zeros(1 << 18))  # opens all connections
    samples = []
    for name, hides in (("fp32", False), ("bf16", False), ("int8", False), ("bf16", True), ("int8", True)):
        judge = Judge(seat)
        table.meet()
        time.sleep(seat.rest_s)
        table.meet()
        before, began_s, cpu_s = table.sent_bytes, time.monotonic(), time.thread_time()
        if hides:
            blocked_s, apply_s, late_s = reduce_beside_training(judge.vector, ways[name])
        else:
            ways[name](judge.vector)
            blocked_s = late_s = time.monotonic() - began_s
            apply_s = 0.0
        cpu_s = time.thread_time() - cpu_s
        table.meet()
        sample = Sample(
            f"gloo {name}{', overlapped' if hides else ''}",
            blocked_s,
            began_s,
            table.sent_bytes - before,
            apply_s=apply_s,
            cpu_s=cpu_s if hides else 0.0,
            late_s=late_s,
            share=judge.share_of_mean(),
        )
        samples.append(sample)
    dist.destroy_process_group()
    return samples


def mean_in_fp32(vector: torch.Tensor) -> None:
    dist.all_reduce(vector)
    vector.div_(dist.get_world_size())


def mean_in_bf16(vector: torch.Tensor) -> None:
    copy = vector.to(torch.bfloat16)
    dist.all_reduce(copy)
    vector.copy_(copy).div_(dist.get_world_size())


def mean_in_int8(vector: torch.Tensor) -> None:
    """Average in a ring, because gloo cannot sum codes. N - 1 hops add parts, and N - 1 more pass on encoded means."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts, scratch = vector.tensor_split(size), Scratch()

    def hop(sent: torch.Tensor, index: int) -> torch.Tensor:
        """Send a part to the next peer, and return part `index` from the previous peer."""
        request = dist.isend(sent, (rank + 1) % size)
        coded = torch.empty(section_bytes(INT8, parts[index].numel()), dtype=torch.uint8)
        dist.recv(coded, (rank - 1) % size)
        request.wait()  # pyright: ignore[reportOptionalMemberAccess]
        return coded

    for step in range(size - 1):
        index = (rank - step - 1) % size
        received = hop(coded_int8(parts[(index + 1) % size], scratch), index)
        for values, decoded in decoded_int8(received, parts[index], scratch):
            values.add_(decoded)
    coded = coded_int8(parts[(rank + 1) % size].div_(size), scratch)
    for step in range(size):
        index = (rank + 1 - step) % size
        for values, decoded in decoded_int8(coded, parts[index], scratch):
            values.copy_(decoded)
        if step < size - 1:
            coded = hop(coded, (index - 1) % size)


def coded_int8(values: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    coded = torch.empty(section_bytes(INT8, values.numel()), dtype=torch.uint8)
    for start, stop, first, last in _int8_bounds(values.numel()):
        INT8.encode_into(values[start:stop], coded[first:last], scratch=scratch)
    return coded


def decoded_int8(
    coded: torch.Tensor, values: torch.Tensor, scratch: Scratch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (chunk of `values`, its decoded payload) for each chunk. The second tensor reuses the same memory."""
    payload, memory = coded.numpy().data, torch.empty(CHUNK_ELEMENTS)
    for start, stop, first, last in _int8_bounds(values.numel()):
        decoded = memory[: stop - start]
        INT8.decode(payload[first:last], num_elements=stop - start, out=decoded, scratch=scratch)
        yield values[start:stop], decoded


def _int8_bounds(num_elements: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, stop) of each chunk, followed by those of its payload."""
    first = 0
    for start, stop in chunk_bounds(num_elements):
        last = first + INT8.num_bytes(stop - start)
        yield start, stop, first, last
        first = last


def reduce_beside_training(vector: torch.Tensor, mean: Callable[[torch.Tensor], None]) -> tuple[float, float, float]:
    """Return the time that blocks training, the part of it that adds the mean, and the time until the mean arrives.

    A second thread averages a copy, while this thread would continue to train. Then the mean is added to the slow and
    fast weights.
    """
    began_s = time.monotonic()
    copy = vector.clone()
    copied_s = time.monotonic() - began_s
    with ThreadPoolExecutor(1) as thread:
        thread.submit(mean, copy).result()
    late_s = time.monotonic() - began_s
    fast = vector.clone()  # any vector will do
    began_s = time.monotonic()
    fast.add_(copy)
    vector.copy_(copy)
    apply_s = time.monotonic() - began_s
    return copied_s + apply_s, apply_s, late_s


def average_with_hivemind(seat: Seat, table: Table) -> list[Sample]:
    """Average in one group of all peers, each with a DHT. fp16 is the smallest codec that works with numpy 2.4."""
    multiprocessing.set_start_method("fork", force=True)  # hivemind is written for it
    from hivemind import DHT, DecentralizedAverager
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression

    judge = Judge(seat)

    def dht(initial_peers: Sequence[str]) -> DHT:
        options: dict[str, Any] = {
            "host_maddrs": [f"/ip4/{seat.addresses[seat.rank]}/tcp/0"],
            "use_relay": False,
            "auto_nat": False,
            "nat_port_map": False,
        }
        return DHT(initial_peers, start=True, **options)

    first = dht([]) if seat.rank == 0 else None
    addresses = table.meet([str(address) for address in first.get_visible_maddrs()] if first else [])[0]
    node = first or dht(addresses)
    averager = DecentralizedAverager(
        [judge.vector],
        node,
        start=True,
        prefix="versus",
        target_group_size=seat.size,
        min_group_size=seat.size,
        min_matchmaking_time=5.0,
        request_timeout=3.0,
        compression=Float16Compression(),
    )
    table.meet()
    opened_s = time.monotonic()
    step: Any = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
    while step.stage is not AveragingStage.AWAITING_TRIGGER:
        if step.done():
            raise BenchmarkError(f"no group of {seat.size} was found: {step.exception()}")
        time.sleep(0.01)
    early_s = time.monotonic() - opened_s
    table.meet()
    before, began_s = table.sent_bytes, time.monotonic()
    step.allow_allreduce()
    group = step.result(PATIENCE_S)
    blocked_s = time.monotonic() - began_s
    table.meet()
    if len(group) != seat.size:
        raise BenchmarkError(f"a group of {len(group)} instead of {seat.size}")
    sent_bytes, share = table.sent_bytes - before, judge.share_of_mean()
    averager.shutdown()
    node.shutdown()
    return [Sample("hivemind fp16", blocked_s, began_s, sent_bytes, early_s=early_s, share=share)]


def swap(seat: Seat, table: Table) -> list[Sample]:
    peer = Peer(seat, table)
    peer.round("bounds", waits=True, momentum=True)  # modulo coding learns the distance between partners
    samples = [
        peer.round("waiting", waits=True),
        peer.round("waiting, momentum", waits=True, momentum=True),
        peer.round("eager", waits=False, by_turns=True),
    ]
    if seat.size > 2:
        samples.append(peer.round("eager, all at once", waits=False))
    table.meet()
    peer.stop()
    return samples


class Peer:
    """One peer of this project in a swarm of N peers. It draws a partner in each round."""

    def __init__(self, seat: Seat, table: Table) -> None:
        self._seat, self._table = seat, table
        spec = RunSpec(name="versus", outer=OuterSpec(inner_steps=1), codec=CODECS)
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Identity.load_or_create(Path(folder) / "key"))
        self._peer = BarePeer(str(seat.rank), spec, seat.num_elements, host="0.0.0.0", session=session)
        words = table.meet((self._peer.server.port, session.identity.peer_id, session.key))
        self._ranks = {peer_id: rank for rank, (_, peer_id, _) in enumerate(words)}
        self._peer.directory.others = [
            Candidate(peer_id, f"{seat.addresses[rank]}:{port}", session_key=key)
            for rank, (port, peer_id, key) in enumerate(words)
            if rank != seat.rank
        ]
        self._fast = self._peer.slow_weights + self._peer.outer_gradient
        self._bounds = chunk_bounds(seat.num_elements)
        self._round = 0

    def round(self, kind: str, *, waits: bool, momentum: bool = False, by_turns: bool = False) -> Sample:
        """Open a round, wait for the early part and for all peers, and end the round: all at once, or pair by pair."""
        peer, table = self._peer, self._table
        exchange = self._exchange(momentum=momentum)
        table.meet()
        before, payload_before = table.sent_bytes, peer.driver.traffic.bytes_sent
        opened_s = time.monotonic()
        state = {SectionName.SLOW_WEIGHTS: peer.slow_weights, SectionName.OUTER_MOMENTUM: peer.outer_gradient}
        exchange.open(self._round, progress=0.0, state=state)
        self._round += 1
        peer.wait_for_early()
        early_s = time.monotonic() - opened_s
        turns_before, turns_after = self._turns(
            table.meet(self._ranks.get(peer.driver.partner or "", self._seat.rank)), by_turns=by_turns
        )
        for _ in range(turns_before + 1):
            table.meet()

        began_s, cpu_s = time.monotonic(), time.thread_time()
        exchange.stage(self._gradient)
        outcome = exchange.collect(PATIENCE_S if waits else 0.0)
        blocked_s, cpu_s = time.monotonic() - began_s, time.thread_time() - cpu_s
        apply_s = late_s = 0.0
        fault = ""
        if isinstance(outcome, Half) and not waits:
            correction = peer.wait_for_correction()
            late_s = time.monotonic() - began_s
            apply_s, apply_cpu_s = self._apply(correction)
            blocked_s, cpu_s = blocked_s + apply_s, cpu_s + apply_cpu_s
        elif isinstance(outcome, Alone | Half):
            fault = outcome.reason
        partner = None if isinstance(outcome, Alone) else self._ranks[outcome.received.partner]
        for _ in range(turns_after):
            table.meet()
        return Sample(
            kind,
            blocked_s,
            began_s,
            table.sent_bytes - before,
            partner=partner,
            early_s=early_s,
            apply_s=apply_s,
            cpu_s=cpu_s,
            late_s=late_s,
            payload_bytes=peer.driver.traffic.bytes_sent - payload_before,
            fault=fault,
        )

    def stop(self) -> None:
        self._peer.stop()

    def _exchange(self, *, momentum: bool) -> ThreadedExchange:
        spec = self._peer.spec.with_changes({"outer.alpha": 0.5 if momentum else 0.0})
        return ThreadedExchange(spec, self._peer.driver, self._peer.loop)

    def _turns(self, partners: Sequence[int], *, by_turns: bool) -> tuple[int, int]:
        """Let the line rest, and return how often to meet before and after the own boundary."""
        time.sleep(self._seat.rest_s)
        pairs = sorted({(min(pair), max(pair)) for pair in enumerate(partners)})
        before = next(turn for turn, pair in enumerate(pairs) if self._seat.rank in pair) if by_turns else 0
        return before, len(pairs) - before if by_turns else 1

    def _gradient(self) -> Any:
        slow = self._peer.slow_weights
        return (self._fast[start:stop] - slow[start:stop] for start, stop in self._bounds)

    def _apply(self, correction: Correction) -> tuple[float, float]:
        """Add beta h to slow and fast weights, as training does, and return the seconds and the CPU seconds it took."""
        began_s, cpu_s = time.monotonic(), time.thread_time()
        gates = ChunkFilter([self._peer.slow_weights.numel()])
        for start, late in gates.late_steps(correction.gradient, beta=self._peer.spec.outer.beta):
            for vector in (self._peer.slow_weights, self._fast):
                vector[start : start + len(late)].add_(late)
        self._peer.exchange.corrected()
        return time.monotonic() - began_s, time.thread_time() - cpu_s


# the parent


def run_method(
    method: Callable[[Seat, Table], list[Sample]], *, num_peers: int, num_elements: int, rest_s: float
) -> list[list[Sample]]:
    """Return the samples of each peer. Raises BenchmarkError if a process fails or stalls."""
    # Fork from a server that has imported everything and runs no threads: sixteen imports would take a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "uvloop", "noloco_p2p.net.server", "hivemind"])
    line = home(rate_mbit_s=RATE_MBIT_S, round_trip_ms=ROUND_TRIP_MS)
    pipes: list[Any] = []
    processes = []
    with NetLab([line] * num_peers) as lab:
        addresses = tuple(node.address for node in lab.nodes)
        try:
            for rank, node in enumerate(lab.nodes):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                seat = Seat(rank, node.namespace, addresses, num_elements, rest_s)
                process = context.Process(target=sit_down, args=(method, seat, theirs))
                process.start()
                theirs.close()
                processes.append(process)
            samples = _host(pipes, lab)
        finally:
            for pipe in pipes:
                pipe.close()
            until_s = time.monotonic() + 5.0  # for all processes, as some may hang after a fault
            for process in processes:
                process.join(max(0.0, until_s - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
    return samples


def _host(pipes: Sequence[Any], lab: NetLab) -> list[list[Sample]]:
    """Pass messages between the processes until all are done."""
    while True:
        heard = _hear(pipes, lab)
        if all(kind == "done" for kind, _ in heard):
            return [samples for _, samples in heard]
        if not all(kind == "meet" for kind, _ in heard):
            raise BenchmarkError("some processes are done while others are not")
        counters = lab.counters()
        words = [word for _, word in heard]
        for pipe, own in zip(pipes, counters, strict=True):
            pipe.send((words, own.sent_bytes))


def _hear(pipes: Sequence[Any], lab: NetLab) -> list[tuple[str, Any]]:
    """Return the next message of each process. Raises BenchmarkError if one has failed, or if no traffic flows."""
    heard: dict[int, tuple[str, Any]] = {}
    moved_bytes = -STALLED_BYTES
    while len(heard) < len(pipes):
        silent = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in heard}
        ready = wait(list(silent), STALLED_S)
        for pipe in ready:
            heard[silent[pipe]] = _listen(silent[pipe], pipe)
        if not ready:
            before_bytes, moved_bytes = moved_bytes, sum(counters.sent_bytes for counters in lab.counters())
            if moved_bytes - before_bytes < STALLED_BYTES:
                ranks = ", ".join(map(str, sorted(silent.values())))
                raise BenchmarkError(f"stalled: nothing moved for {STALLED_S:g} s, and not done are peers {ranks}")
    return [heard[rank] for rank in range(len(pipes))]


def _listen(rank: int, pipe: Any) -> tuple[str, Any]:
    try:
        kind, word = pipe.recv()
    except EOFError:
        raise BenchmarkError(f"the process of peer {rank} has died") from None
    if kind == "failed":
        raise BenchmarkError(f"peer {rank}: {word}")
    return kind, word


def largest_vector(num_peers: int, *, wanted: int) -> int:
    """Return the number of elements that fit into free memory: `wanted`, or fewer whole millions."""
    free_bytes = psutil.virtual_memory().available * MEMORY_SHARE - num_peers * MEMORY_PER_PEER
    fits = int(free_bytes / (num_peers * MEMORY_PER_ELEMENT))
    return wanted if fits >= wanted else fits // 1_000_000 * 1_000_000


class Result:
    """All samples for one number of peers."""

    def __init__(self, num_peers: int, num_elements: int) -> None:
        self.num_peers, self.num_elements = num_peers, num_elements
        self.faults: dict[str, str] = {}  # method -> what went wrong
        self._samples: dict[str, list[Sample]] = {}
        self._lateness_s: list[float] = []

    def add(self, samples_of_peers: list[list[Sample]]) -> None:
        for samples in zip(*samples_of_peers, strict=True):  # one synchronisation of all peers
            for rank, sample in enumerate(samples):
                if sample.fault:
                    self.faults[f"{sample.kind}, peer {rank}"] = sample.fault
                    continue
                self._samples.setdefault(sample.kind, []).append(sample)
                if sample.partner is not None:
                    late_s = samples[sample.partner].began_s - sample.began_s
                    self._lateness_s.append(max(0.0, late_s))

    def kinds(self) -> list[str]:
        return list(self._samples)

    def median(self, kind: str, what: str = "blocked_s") -> float | None:
        samples = self._samples.get(kind)
        return median(getattr(sample, what) for sample in samples) if samples else None

    def lateness_s(self) -> float:
        return max(self._lateness_s, default=0.0)


METHODS = {"gloo": all_reduce_on_gloo, "hivemind": average_with_hivemind, "ours": swap}


def measure_peers(num_peers: int, num_elements: int, *, methods: Sequence[str], rest_s: float) -> Result:
    result = Result(num_peers, num_elements)
    for name in methods:
        began_s = time.monotonic()
        faults = []
        while len(faults) < TRIES:
            try:
                samples = run_method(METHODS[name], num_peers=num_peers, num_elements=num_elements, rest_s=rest_s)
            except BenchmarkError as error:
                faults.append(str(error))
            else:
                result.add(samples)
                break
        if faults:
            result.faults[name] = f"{len(faults)} of up to {TRIES} tries failed: {faults[-1]}"
        took_s = time.monotonic() - began_s
        print(f"N = {num_peers}, {num_elements / 1e6:g}M numbers, {name}: {took_s:.0f} s", flush=True)
    for name, fault in result.faults.items():
        print(f"N = {num_peers}, {name}: {fault}", flush=True)
    return result


def measure(quick: bool) -> list[Claim]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of each socket whose address has no name
    congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(
        f"# links of {RATE_MBIT_S:g} Mbit/s up and down, {ROUND_TRIP_MS:g} ms there and back, TCP {congestion_control}"
    )
    results: dict[tuple[int, int], Result] = {}
    if quick:
        common = QUICK_ELEMENTS
        for num_peers, methods in ((2, list(METHODS)), (8, ["gloo", "ours"])):  # hivemind is too slow in a group of 8
            results[num_peers, common] = measure_peers(num_peers, common, methods=methods, rest_s=QUICK_REST_S)
    else:
        common = largest_vector(8, wanted=COMMON_ELEMENTS)
        for num_peers in (2, 4, 8):
            results[num_peers, common] = measure_peers(num_peers, common, methods=list(METHODS), rest_s=REST_S)
    claims = [claim for result in results.values() for claim in claims_of(result)]
    return claims + comparison(results[8, common]) + flatness(results[2, common], results[8, common])


def claims_of(result: Result) -> list[Claim]:
    """Return the measurements for one N, without targets."""
    head = f"N = {result.num_peers}, {result.num_elements / 1e6:g}M"
    claims = []
    for kind in result.kinds():

        def figure(what: str, kind: str = kind) -> float:
            return result.median(kind, what) or 0.0

        claims.append(Claim(f"{head}, {kind}: blocked", figure("blocked_s"), "s"))
        if figure("apply_s"):
            what = "half" if kind.startswith("eager") else "mean"
            claims.append(Claim(f"{head}, {kind}: of it to add the late {what}", figure("apply_s"), "s"))
            claims.append(Claim(f"{head}, {kind}: late {what} here after", figure("late_s"), "s"))
        if figure("cpu_s"):
            claims.append(Claim(f"{head}, {kind}: CPU of the training thread", figure("cpu_s"), "s"))
        if figure("early_s"):
            what = "early part, hidden" if figure("payload_bytes") else "group found, hidden"
            claims.append(Claim(f"{head}, {kind}: {what}", figure("early_s"), "s"))
        sent = figure("sent_bytes") / result.num_elements
        claims.append(Claim(f"{head}, {kind}: sent by a peer", sent, "bytes/number"))
        if figure("share") < 0.999:
            claims.append(Claim(f"{head}, {kind}: share of the vector that was averaged", figure("share"), "of 1"))
        if figure("payload_bytes"):
            payload = figure("payload_bytes") / result.num_elements
            claims.append(Claim(f"{head}, {kind}: payload sent by a peer", payload, "bytes/number"))
    claims.append(Claim(f"{head}, swaps: partner late at the boundary, worst", result.lateness_s(), "s"))
    claims += [Claim(f"{head}, {name}: {fault}", 0.0, "") for name, fault in result.faults.items()]
    return claims


def comparison(result: Result) -> list[Claim]:
    """Return the comparisons of the methods at the largest N, some with targets."""
    targets = [
        ("gloo fp32", "waiting", 10.0),
        ("gloo bf16", "waiting", 3.0),
        ("gloo int8", "waiting", None),
        ("hivemind fp16", "waiting", None),
        ("gloo fp32", "eager", 50.0),
        ("gloo fp32", "eager, all at once", 50.0),
        ("gloo bf16, overlapped", "eager", None),
        ("gloo int8, overlapped", "eager", None),
        ("gloo int8, overlapped", "eager, all at once", None),
        ("hivemind fp16", "eager", None),
    ]
    claims = []
    for other, kind, target in targets:
        theirs, ours = result.median(other), result.median(kind)
        if theirs is None or ours is None:
            continue
        ratio = theirs / ours
        name = f"N = {result.num_peers}, {result.num_elements / 1e6:g}M: blocked time, {other} / {kind}"
        if target is None:
            claims.append(Claim(name, ratio, "ratio"))
        else:
            claims.append(Claim(name, ratio, "ratio", f">= {target:g}", ratio >= target))
    busy_s = {kind: line_s(result, kind) for kind in ("gloo int8", "gloo bf16", "waiting")}
    for other in ("gloo bf16", "gloo int8"):
        if busy_s["waiting"]:
            name = f"N = {result.num_peers}, {result.num_elements / 1e6:g}M: the line of a round, {other} / waiting"
            claims.append(Claim(name, busy_s[other] / busy_s["waiting"], "ratio"))
    payload = result.median("waiting", "payload_bytes")
    if payload is not None:
        each = payload / result.num_elements
        claims.append(Claim("payload, modulo8 + int4, without momentum", each, "bytes/number", "<= 1.52", each <= 1.52))
    return claims


def line_s(result: Result, kind: str) -> float:
    """Return how long a round keeps the line busy, hidden or not, in seconds. No round can be shorter."""
    return (result.median(kind) or 0.0) + (result.median(kind, "early_s") or 0.0)


def flatness(few: Result, many: Result) -> list[Claim]:
    """Return the ratio of the blocked time with many peers to that with few peers, for the same vector."""
    claims = []
    for kind in many.kinds():
        at_few, at_many = few.median(kind), many.median(kind)
        if at_few is None or at_many is None:
            continue
        ratio, name = at_many / at_few, f"blocked time, N = {many.num_peers} / N = {few.num_peers}: {kind}"
        if kind in ("waiting", "eager", "eager, all at once"):
            claims.append(Claim(name, ratio, "ratio", "<= 1.2", ratio <= 1.2))
        else:
            claims.append(Claim(name, ratio, "ratio"))
    return claims


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"versus_allreduce: {failure}")
