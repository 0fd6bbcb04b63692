"""Measure the web page of the monitor with 3,000 peers: memory, and processor time per update in browser and server.

    python benchmarks/monitor_page.py --minutes 10 --json benchmarks/results/monitor_page.json

Synthetic records replace the directory. Everything else runs as in `noloco monitor --web`, with a headless Chromium as
the only viewer. Targets: an update takes less than 200 ms on the page's main thread, and after the warm-up only the
curves make memory grow (by at most 40 MB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from harness.crowd import Crowd

from noloco_p2p.codec.sketch import SKETCH_SIZE, pack
from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.web import LOOK_S, LiveSwarm, app
from noloco_p2p.telemetry.http import HttpServer
from noloco_p2p.ticket import Ticket

SAMPLE_S = 15.0
WARM_S = 60.0


async def run(num_peers: int, minutes: float) -> dict[str, Any]:
    from playwright.async_api import async_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no Chromium here: apt-get install chromium")
    sketch = pack(torch.randn(SKETCH_SIZE), mark=1, norm=1.0)
    crowd = Crowd(num_peers, began_s=time.time() - 5000, sketch=sketch)
    updates: list[float] = []
    samples: list[dict[str, float]] = []
    swarm = LiveSwarm(Watcher(Ticket("crowd", "c0" * 32, ())))
    server = HttpServer(app(swarm), host="127.0.0.1", port=0)

    def look() -> None:
        now_s = time.time()
        swarm.watcher.take(records, directory_age_s=0.5, now_s=now_s)

    async def looking() -> None:
        nonlocal records
        while True:
            records = crowd.records(time.time())  # not the monitor's work: a directory would have the records
            began_s = time.process_time()
            swarm.look(look)
            updates.append(1000 * (time.process_time() - began_s))
            await asyncio.sleep(LOOK_S)

    records = crowd.records(time.time())
    swarm.look(look)
    await server.start(flag="--listen")
    task = asyncio.create_task(looking())
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})  # processor time, not the clock's
        await page.goto(f"http://127.0.0.1:{server.port}/")
        began_s, last = time.monotonic(), await _page(page, session)
        while time.monotonic() - began_s < 60 * minutes:
            await asyncio.sleep(SAMPLE_S)
            now = await _page(page, session)
            number = now["updates"] - last["updates"]
            samples.append(
                {
                    "at_s": round(time.monotonic() - began_s, 1),
                    "update_ms": round(1000 * (now["busy_s"] - last["busy_s"]) / max(1, number), 1),
                    "heap_mib": round(now["heap_mib"], 1),
                    "server_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
                    "updates": number,
                }
            )
            last = now
            print(samples[-1], flush=True)
        await browser.close()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.stop()
    return _summary(num_peers, minutes, samples, updates)


async def _page(page: Any, session: Any) -> dict[str, float]:
    """Return the figures of the page, after garbage collection. `busy_s`: processor time of its main thread."""
    await session.send("HeapProfiler.collectGarbage")
    metrics = {entry["name"]: entry["value"] for entry in (await session.send("Performance.getMetrics"))["metrics"]}
    updates = await page.evaluate("Number(document.body.dataset.updates || 0)")
    return {"busy_s": metrics["TaskDuration"], "heap_mib": metrics["JSHeapUsedSize"] / 2**20, "updates": updates}


def _summary(num_peers: int, minutes: float, samples: list[dict[str, float]], updates: list[float]) -> dict[str, Any]:
    warm = [sample for sample in samples if sample["at_s"] >= WARM_S] or samples
    half = max(1, len(warm) // 2)

    def grown(name: str) -> float:
        early, late = [s[name] for s in warm[:half]], [s[name] for s in warm[half:]] or [warm[-1][name]]
        return round(statistics.mean(late) - statistics.mean(early), 1)

    return {
        "peers": num_peers,
        "minutes": minutes,
        "page_update_ms_median": statistics.median(sample["update_ms"] for sample in warm),
        "page_update_ms_highest": max(sample["update_ms"] for sample in warm),
        "server_update_ms_median": round(statistics.median(updates), 1),
        "heap_mib_first": warm[0]["heap_mib"],
        "heap_mib_last": warm[-1]["heap_mib"],
        "heap_mib_second_half_minus_first": grown("heap_mib"),
        "server_mib_first": warm[0]["server_mib"],
        "server_mib_last": warm[-1]["server_mib"],
        "server_mib_second_half_minus_first": grown("server_mib"),
        "machine": f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores",
        "load": psutil.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(run(args.peers, args.minutes))
    for name, value in found.items():
        if name != "samples":
            print(f"{name:36} {value}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
