"""Checks that need no swarm: ports, p2pd, disk, memory, accelerator, and the speed of the codec."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import torch

from noloco_p2p.codec import CHUNK_ELEMENTS, get_codec
from noloco_p2p.control import ask
from noloco_p2p.devices import describe, free_and_total_bytes
from noloco_p2p.doctor import Check
from noloco_p2p.errors import NolocoError
from noloco_p2p.identity import Identity
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm import kademlia
from noloco_p2p.swarm.daemon import Daemon, ListenOn, probe_port
from noloco_p2p.telemetry.console import mib
from noloco_p2p.trainer.compute import Compute, choose_device

LOW_DISK_BYTES = 5 << 30
LOW_MEMORY_BYTES = 2 << 30
SLOW_CODEC_BYTES_PER_S = 200e6  # of fp32 values; a slower codec would delay swaps over a fast link
CODEC_CHUNKS = 8


def ports(settings: PeerSettings) -> Check:
    """Check that the ports are free, or in use by the peer on this machine."""
    running = ask(settings.state_dir, "status")
    if running:
        return Check("ports", "ok", f"in use by the peer running on this machine (process {running['pid']})")
    try:
        for port in (settings.listen_port, settings.libp2p_port):
            probe_port(settings.listen_host, port)
    except NolocoError as error:
        fix = "stop the other program, or choose other ports with --listen HOST:PORT"
        return Check("ports", "failed", str(error), fix)
    ports = f"{settings.listen_port} and {settings.libp2p_port}"
    chosen = ports if settings.listen_port else "two ports chosen by the system (port 0)"
    return Check("ports", "ok", f"{chosen} on {settings.listen_host}: free")


async def p2pd() -> Check:
    """Check that the libp2p daemon starts. The check uses a temporary identity."""
    await asyncio.to_thread(kademlia.load)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="noloco-doctor-") as folder:
        key = Path(folder) / "identity.key"
        Identity.load_or_create(key)
        try:
            daemon = await Daemon.start(key, ListenOn("127.0.0.1", 0, None, 0))
            await daemon.stop()
        except NolocoError as error:
            return Check("p2pd", "failed", str(error), "reinstall hivemind: pip install --force-reinstall hivemind")
    return Check("p2pd", "ok", f"starts in {time.monotonic() - began_s:.1f} s")


def disk(settings: PeerSettings) -> Check:
    folder = settings.state_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        fix = "use another --state-dir, or fix the ownership of this one"
        return Check("disk", "failed", f"{folder} is not writable", fix)
    free = shutil.disk_usage(existing).free
    fix = "free some space, or use another --state-dir: a checkpoint takes up to 20 bytes per parameter, and up to "
    fix += "three exist at a time"
    return Check.of("disk", f"{mib(free)} free in {existing}", fix, warns=free < LOW_DISK_BYTES)


def memory() -> Check:
    free = psutil.virtual_memory().available
    fix = "close other programs: loading torch and hivemind needs 1 GiB of memory"
    return Check.of("memory", f"{mib(free)} free", fix, warns=free < LOW_MEMORY_BYTES)


def accelerator() -> Check:
    """Check the GPUs, and report what `--device auto` and `--precision auto` choose on this machine."""
    device = choose_device("auto")
    chosen = f"auto selects {device} and {'bf16' if Compute().is_bf16(device) else 'fp32'}"
    if device.type == "cpu":
        fix = "to train on a GPU, install its driver and a build of torch for it (CUDA or ROCm)"
        return Check("accelerator", "warning", f"torch found no GPU (CUDA, ROCm or MPS); {chosen}", fix)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    names = ", ".join(describe(torch.device(device.type, index)) for index in range(count))
    free, total = free_and_total_bytes(device)
    return Check("accelerator", "ok", f"{names}; {mib(free)} of {mib(total)} free on the first GPU; {chosen}")


def codec_speed(name: str = "int8") -> Check:
    """Measure the speed of encoding and decoding: the best of three measurements, in bytes of fp32 per second."""
    codec, values = get_codec(name), torch.randn(CHUNK_ELEMENTS, dtype=torch.float32, device="cpu")
    seconds = []
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(CODEC_CHUNKS):
            codec.decode(codec.encode(values), shape=values.shape)
        seconds.append(time.perf_counter() - began_s)
    speed = CODEC_CHUNKS * 4 * CHUNK_ELEMENTS / min(seconds)
    fix = "the processor is slow or busy, so it will slow down swaps of large models"
    text = f"{name}: encodes and decodes {mib(speed)}/s of fp32"
    return Check.of("codec", text, fix, warns=speed < SLOW_CODEC_BYTES_PER_S)
