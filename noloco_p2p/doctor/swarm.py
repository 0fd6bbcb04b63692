"""The checks that need a run: entry, clock, reachability, link, and the requirements of the model."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from noloco_p2p._version import __version__
from noloco_p2p.control import ask
from noloco_p2p.data.sources import check_bindings
from noloco_p2p.devices import has_own_memory
from noloco_p2p.doctor import Check
from noloco_p2p.errors import DirectoryError, NolocoError, PeerError, Refused
from noloco_p2p.gossip.frames import RefuseCode, StateChunk, StateManifest, WantChunks, WantManifest
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.peer.run_folder import find_invitation, remembered_ports
from noloco_p2p.peer_name import named
from noloco_p2p.presets import describe_tokens
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import Spec, TrainerSpec
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.dial_back import DialBack
from noloco_p2p.swarm.directory import LOOK_TIMEOUT_S, SwarmDirectory, find_somebody, reader
from noloco_p2p.telemetry.console import count, counted, mib
from noloco_p2p.ticket import Ticket
from noloco_p2p.trainer.compute import choose_device
from noloco_p2p.trainer.cut import link_tokens_per_s
from noloco_p2p.trainer.model import count_parameters
from noloco_p2p.trainer.needs import USUAL_BYTES_PER_S, Counts, Sizes, estimate, memory_limit
from noloco_p2p.trainer.stage_choice import StageNeeds
from noloco_p2p.transfer.fetch import MESSAGE_TIMEOUT_S, fetch_spec
from noloco_p2p.transfer.fetch import ask as ask_peer

NOBODY = "no other peer can be dialled"
ASKED_PEERS = 3
DOWNLOAD_CHUNKS = 16
DOWNLOAD_S = 10.0
BUSY_S = 15.0  # for which a busy peer is asked again; it may be saving a newer state
LEAST_RETRY_S = 0.5
SLOW_LINK_BYTES_PER_S = 1e6


async def examine(ticket: Ticket, settings: PeerSettings) -> AsyncIterator[Check]:
    """Run all checks that need a run. If no peer is found, the result is a single failed check."""
    async with reader(ticket) as directory:
        try:
            await find_somebody(ticket, directory)
            await directory.check_clock(LOOK_TIMEOUT_S)
        except DirectoryError as error:
            fix = "set the clock of this machine, and run `noloco doctor` again"
            yield Check("clock", "failed", str(error), fix)
            return
        except PeerError as error:
            fix = "get a new ticket; if other peers can join, allow outgoing TCP traffic and set this machine's clock"
            yield Check("way in", "failed", str(error), fix)
            return
        local = ask(settings.state_dir, "status") or {}  # the peer on this machine, which must not be asked to check it
        peers = [peer for peer in directory.live() if peer.can_be_called and peer.peer_id != local.get("peer_id")]
        random.shuffle(peers)
        yield Check("way in", "ok", f"run {ticket.run_name}: {counted(len(peers), 'live peer')}")
        yield _versions(directory)
        yield _ways(directory, local)
        for peer_id, offset in list(directory.dialer.offsets.items())[:1]:
            yield clock(peer_id, offset)
        yield await _dialled_back(directory, peers, settings, local)
        transport = GrpcTransport.from_outside(ticket, directory.identity, directory.node.guard)
        manifest, bytes_per_s, bandwidth = await _download(peers, transport)
        yield bandwidth
        if manifest is None:
            return
        try:
            spec = await fetch_spec(transport, peers, expected_digest=ticket.spec_digest)
        except NolocoError as error:
            yield Check("the model", "skipped", f"no peer sent the spec: {error}")
            return
        if isinstance(spec, TrainerSpec):
            for check in (*bound(spec, settings), *model(spec, settings, download_bytes_per_s=bytes_per_s)):
                yield check
        else:
            yield needs(spec, Counts(manifest.num_elements), settings, link_bytes_per_s=bytes_per_s)


def _versions(directory: SwarmDirectory) -> Check:
    found = Counter(record.software for record, _ in directory.records())
    text = ", ".join(f"{version} ({number})" for version, number in sorted(found.items()))
    differs = "" if __version__ in found else f"; this machine has {__version__}"
    return Check.of("peers run", text + differs, "install the version that the other peers run", warns=bool(differs))


def _ways(directory: SwarmDirectory, local: Mapping[str, Any]) -> Check:
    """Report how the local peer reaches its neighbours. Without a local peer, report how peers can be reached according
    to their records.
    """
    own = local.get("neighbours") or {}
    found = Counter(own.values() if own else (record.reachability for record, _ in directory.records()))
    how = "how the local peer reaches its neighbours" if own else "how peers can be reached, according to their records"
    counts = ", ".join(f"{number} {way}" for way, number in found.most_common())
    return Check("ways", "ok", f"{how}: {counts or 'no peer is known'}")


def clock(peer_id: str, offset: Offset) -> Check:
    seconds = round(offset.seconds, 1) + 0.0  # turns -0.0 into 0.0
    text = f"the clock of {named(peer_id)} differs from this machine's by {seconds:+.1f} s (±{offset.unsure_s:.2f} s)"
    fix = "set the clock of this machine (start systemd-timesyncd or ntpd); a peer with a wrong clock cannot join"
    return Check.of("clock", text, fix, fails=offset.is_too_large())


async def _dialled_back(
    directory: SwarmDirectory, peers: Sequence[Candidate], settings: PeerSettings, local: Mapping[str, Any]
) -> Check:
    """Ask the first peer that answers to check the reachability of this machine.

    It dials the two ports of the peer on this machine. If none is running, the configured ports listen meanwhile.
    """
    faults = []
    async with AsyncExitStack() as stack:
        ports = [*remembered_ports(settings.state_dir).values()] if local else []
        with suppress(OSError):  # the `ports` check reports why
            for port in () if local else (settings.listen_port, settings.libp2p_port):
                server = await asyncio.start_server(_hang_up, settings.listen_host.strip("[]"), port)
                stack.callback(server.close)
                ports.append(server.sockets[0].getsockname()[1])
        for peer in peers[:ASKED_PEERS]:
            try:
                return reachability(await directory.ask_to_dial(peer.peer_id, ports), peer.peer_id)
            except DirectoryError as error:
                faults.append(str(error))
    return Check("reached", "warning", "no peer dialled back: " + ("; ".join(faults) or NOBODY), "try again later")


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def reachability(found: DialBack, peer_id: str) -> Check:
    closed = {port: why for port, why in found.reached.items() if why}
    seen = f"{named(peer_id)} sees this machine as {found.observed_host}"
    ports = " and ".join(map(str, found.reached))
    if closed:
        text = "; ".join(f"port {port}: {why}" for port, why in closed.items())
        fix = (
            "a peer also swaps by hole punching or through a relay; to help the swarm, forward TCP ports "
            f"{ports} to this machine in the router, open them in the firewall, and join with "
            f"--announce {found.observed_host}"
        )
        return Check("reached", "warning", f"{seen}; {text}", fix)
    if not found.reached:
        return Check("reached", "skipped", f"{seen}; no port of this machine was free for the test")
    return Check("reached", "ok", f"{seen} and can reach its ports {ports}")


async def _download(peers: Sequence[Candidate], transport: Transport) -> tuple[StateManifest | None, float, Check]:
    """Measure the download speed by fetching a few chunks of state from the first peer that serves it.

    Return the manifest of the state, the speed in bytes per second, and the check.
    """
    faults = []
    for peer in peers[:ASKED_PEERS]:
        try:
            manifest, speed = await _measured(peer, transport)
        except (NolocoError, TimeoutError) as error:
            faults.append(f"{named(peer.peer_id, peer.name)}: {error or 'too slow'}")
            continue
        text = (
            f"{mib(speed)}/s from {named(peer.peer_id, peer.name)} (download; the state is {mib(manifest.num_bytes)})"
        )
        slow = "over a slow link, swaps carry small parts of the weights, so replicas drift apart; use a smaller model"
        return manifest, speed, Check.of("bandwidth", text, slow, warns=speed < SLOW_LINK_BYTES_PER_S)
    why = "no peer served a chunk of its state: " + ("; ".join(faults) or NOBODY)
    return None, 0.0, Check("bandwidth", "skipped", why)


async def _measured(peer: Candidate, transport: Transport) -> tuple[StateManifest, float]:
    """Fetch a few chunks of a peer's state. Return the manifest, and the speed in bytes per second."""
    until_s = time.monotonic() + BUSY_S
    while True:
        try:
            manifest = await ask_peer(transport, peer, WantManifest(), StateManifest)
            indices = tuple(range(min(DOWNLOAD_CHUNKS, len(manifest.chunk_digests))))
            num_bytes, began_s = 0, time.monotonic()
            want = WantChunks(manifest.digest(), indices)
            async with aclosing(transport.fetch(peer, want, timeout_s=MESSAGE_TIMEOUT_S)) as items:
                async for item in items:
                    num_bytes += len(item.payload) if isinstance(item, StateChunk) else 0
                    if time.monotonic() - began_s > DOWNLOAD_S:
                        break
            return manifest, num_bytes / max(time.monotonic() - began_s, 1e-6)
        except Refused as refused:
            retry_s = max(refused.retry_after_s, LEAST_RETRY_S)
            if refused.code != RefuseCode.BUSY.name or time.monotonic() + retry_s > until_s:
                raise
        await asyncio.sleep(retry_s)


def invited(spec: TrainerSpec, settings: PeerSettings) -> Iterator[Check]:
    """Check that this machine can start or resume a private run."""
    if not spec.run_key:
        return
    try:
        find_invitation(spec, settings)
    except NolocoError as error:
        fix = "pass the run key that `noloco init --private` wrote with --run-key FILE"
        yield Check("run key", "failed", str(error), fix)
    else:
        yield Check("run key", "ok", "this machine has the run key or an invitation")


def bound(spec: TrainerSpec, settings: PeerSettings) -> Iterator[Check]:
    """Check that the data of a run is on this machine. With stages, only a peer of stage 0 needs it."""
    if spec.pipeline.stages > 1 and settings.stage != 0:
        return
    try:
        check_bindings(spec.data, settings.data)
    except NolocoError as error:
        yield Check("data", "failed", str(error), "bind it with --data NAME=GLOB, or in the settings file")
    else:
        sources = ", ".join(part.source for part, _ in spec.data.parts())
        yield Check("data", "ok", f"{sources} (not read; `noloco data check SPEC.toml` does)")


def model(spec: TrainerSpec, settings: PeerSettings, *, download_bytes_per_s: float | None = None) -> list[Check]:
    """Check whether this machine meets the needs of a run, using only the run's spec."""
    settings.check_names(spec)
    tokens = Check("tokens", "ok", describe_tokens(spec))
    if spec.pipeline.stages > 1:
        return [tokens, *stages(spec, settings, download_bytes_per_s=download_bytes_per_s)]
    try:
        counts = count_parameters(spec.model, sequence_length=spec.data.sequence_length, folders=settings.models)
    except NolocoError as error:
        return [Check("the model", "failed", str(error), "pass the folder of the model with --model NAME=FOLDER")]
    found = [tokens, needs(spec, counts, settings, link_bytes_per_s=download_bytes_per_s)]
    if (spec.model.pretrained or spec.model.lora.rank) and (sizes := Sizes.of(spec.model, folders=settings.models)):
        found.append(Check("GPUs", "ok", "\n".join(sizes.lines(spec))))
    return found


def needs(spec: Spec, counts: Counts, settings: PeerSettings, *, link_bytes_per_s: float | None = None) -> Check:
    """Compare the memory and disk space that the run's model needs (without activations) with what is free."""
    has_gpu = has_own_memory(choose_device(settings.device))
    found = estimate(
        spec, counts, settings, has_gpu=has_gpu, num_ranks=settings.gpus, link_bytes_per_s=link_bytes_per_s
    )
    warnings = found.warnings(settings)
    fix = "join a smaller run, or use a larger machine"
    return Check.of("the model", "\n".join([*found.lines(), *warnings]), fix, fails=bool(warnings))


def stages(spec: TrainerSpec, settings: PeerSettings, *, download_bytes_per_s: float | None = None) -> list[Check]:
    """Check the cost of each stage on this machine, and the number of tokens per second that the link can carry.

    The check fails if this machine cannot hold any stage. `download_bytes_per_s` is the measured speed, or None.
    """
    try:
        needs = StageNeeds.as_cut(spec, folders=settings.models)
    except NolocoError as error:
        fix = "recreate the spec with `noloco init --stages`, or pass the folder of its model with --model NAME=FOLDER"
        return [Check("the stages", "failed", str(error), fix)]
    unfit = needs.unfit(settings)
    found = [_stage(needs, unfit, stage, settings) for stage in range(spec.pipeline.stages)]
    # The link has the measured rate or that of the limits in the settings, whichever is lower.
    known = {
        "measured": download_bytes_per_s,
        "--max-upload": settings.upload_bytes_per_s,
        "--max-download": settings.download_bytes_per_s,
    }
    rates = {origin: rate for origin, rate in known.items() if rate} or {"not measured": USUAL_BYTES_PER_S}
    origin = min(rates, key=lambda origin: rates[origin])
    mbit_s = rates[origin] * 8 / 1e6
    carried = count(link_tokens_per_s(spec.pipeline, needs.sizes.hidden_size, mbit_s=mbit_s))
    text = f"{mbit_s:,.0f} Mbit/s each way ({origin}) is enough for {carried} tokens/s"
    return [*found, Check("link", "ok", text)]


def _stage(needs: StageNeeds, unfit: dict[int, str], stage: int, settings: PeerSettings) -> Check:
    if why := unfit.get(stage):
        can_hold_another = len(unfit) < needs.spec.pipeline.stages
        level, other = ("warning", "hold another stage, or ") if can_hold_another else ("failed", "")
        is_too_large = needs.memory(stage) > memory_limit(settings)
        fix = "use a machine with more memory" if is_too_large else "provide the data with --data"
        return Check(f"stage {stage}", level, why, f"{other}{fix}")
    reads = "; this machine can be a head, because it can read the data" if stage == 0 else ""
    text = (
        f"{count(needs.part(stage).num_parameters)} parameters: {mib(needs.memory(stage))} of memory plus activations, "
        f"which fits within the limit of {mib(memory_limit(settings))}{reads}"
    )
    return Check(f"stage {stage}", "ok", text)
