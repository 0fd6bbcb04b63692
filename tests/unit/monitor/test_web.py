from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from harness.crowd import Crowd
from harness.patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from recorded import changed

from noloco_p2p.monitor import web
from noloco_p2p.monitor.watcher import Watcher
from noloco_p2p.monitor.web import MAX_SAMPLES, MEETINGS_SHOWN_S, PAGE_PEERS, SAMPLE_S, STATIC, LiveSwarm, app
from noloco_p2p.telemetry.http import HttpServer
from noloco_p2p.telemetry.prometheus import STAGES
from noloco_p2p.ticket import Ticket

NOW_S = time.time()
TICKET = Ticket("crowd", "c0" * 32, ())
APIS = ("api/page", "api/page?page=99999999999&sort=none&words=%00", "api/status", "api/history")


class Site:
    """The page of a synthetic swarm, served at a port of its own."""

    def __init__(self, num_peers: int) -> None:
        self.watcher, self.crowd, self.url = Watcher(TICKET), Crowd(num_peers, began_s=NOW_S - 2000), ""
        self.swarm = LiveSwarm(self.watcher.meetings)
        self.now_s = NOW_S

    def look(self, *, after_s: float = 0.0) -> None:
        self.now_s += after_s
        records = self.crowd.records(self.now_s)
        self.swarm.show(self.watcher.take(records, directory_age_s=0.5, now_s=self.now_s))

    async def get(self, path: str, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
        def ask() -> tuple[int, bytes, dict[str, str]]:
            try:
                request = urllib.request.Request(self.url + path, method=method)
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    return answer.status, answer.read(), dict(answer.headers)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), dict(error.headers)

        return await asyncio.to_thread(ask)


@asynccontextmanager
async def site(num_peers: int = 4) -> AsyncIterator[Site]:
    made = Site(num_peers)
    server = HttpServer(app(made.swarm), host="127.0.0.1", port=0)
    made.look()
    await server.start(flag="--listen")
    made.url = f"http://127.0.0.1:{server.port}/"
    try:
        yield made
    finally:
        await server.stop()


def on_site(check: Callable[[Site], Any], num_peers: int = 4) -> None:
    async def main() -> None:
        async with site(num_peers) as made:
            await check(made)

    asyncio.run(main())


def test_every_path_answers_and_nothing_can_be_changed() -> None:
    async def check(made: Site) -> None:
        for path in ("", "static/page.js", "static/uPlot.iife.min.js", "static/page.css", "healthz", *APIS):
            status, body, headers = await made.get(path)
            assert status == 200, path
            assert body
            assert "default-src 'none'" in headers["content-security-policy"]
        assert (await made.get("api/status", "POST"))[0] == 405
        assert (await made.get("static/../web.py"))[0] == 404
        assert (await made.get("static/..%2fweb.py"))[0] == 404
        status = json.loads((await made.get("api/status"))[1])
        assert (status["version"], status["run"], len(status["peers"])) == (1, "crowd", 4)
        assert "addresses" not in status["peers"][0]
        name = status["peers"][0]["peer_id"]
        curves = json.loads((await made.get(f"api/history?id={name}&id=nobody"))[1])
        assert list(curves["losses"]) == [name]
        assert len(curves["losses"][name]) == len(curves["time_s"]) == len(curves["apart"]) == 1

    on_site(check)


def test_prometheus_gets_few_series_however_large_the_swarm() -> None:
    async def check(made: Site) -> None:
        families = text_string_to_metric_families((await made.get("metrics"))[1].decode())
        samples = [sample for family in families for sample in family.samples]
        assert len(samples) < 40
        assert sum(s.value for s in samples if s.name == "noloco_swarm_peers") == 200

    on_site(check, num_peers=200)


def test_prometheus_gets_one_series_for_each_stage() -> None:
    async def check(made: Site) -> None:
        assert "noloco_swarm_stage" not in (await made.get("metrics"))[1].decode(), "peers hold whole models"
        head, inner, other, *_ = made.crowd.peers
        made.crowd.peers[:] = [
            changed(head, stages=3, capacity=10.0, queue=2, microbatches=8, late_microbatches=1),
            replace(changed(inner, capacity=3.0, queue=1, lost_microbatches=4), stages=3, stage=1),
            replace(changed(other, capacity=4.0, queue=5, lost_microbatches=2), stages=3, stage=1),
        ]
        made.watcher.members.clear()
        made.look(after_s=2.0)
        families = list(text_string_to_metric_families((await made.get("metrics"))[1].decode()))
        found = {
            family.name.removeprefix("noloco_swarm_stage_"): {s.labels["stage"]: s.value for s in family.samples}
            for family in families
            if family.name.startswith("noloco_swarm_stage_")
        }
        assert found.keys() == {family.name.removeprefix("noloco_swarm_stage_") for family in STAGES}
        assert found["peers"] == {"0": 1, "1": 2, "2": 0}
        assert found["capacity"] == {"0": 10, "1": 7, "2": 0}
        assert found["queue"] == {"0": 2, "1": 6, "2": 0}
        assert found["late_microbatches"] == {"0": 1, "1": 0, "2": 0}
        assert found["lost_microbatches"] == {"0": 0, "1": 6, "2": 0}

    on_site(check)


def test_the_page_is_told_its_text_and_who_has_just_swapped_with_whom() -> None:
    async def check(made: Site) -> None:
        for _ in range(60):
            made.look(after_s=4.0)
        page = json.loads((await made.get("api/page"))[1])
        assert {len(row["cells"]) for row in page["rows"]} == {len(page["columns"])}
        assert [value["name"] for value in page["values"]][:2] == ["peers alive", "loss"]
        assert page["values"][0]["text"] == "4"
        known = {peer["id"] for peer in page["graph"]}
        assert page["meetings"]
        assert all({peer, partner} <= known for _, peer, partner in page["meetings"])
        assert len(page["meetings"]) < len(made.watcher.meetings)
        assert all(0 <= made.now_s - at_s <= MEETINGS_SHOWN_S + 0.1 for at_s, _, _ in page["meetings"])
        assert page["curves"]["ids"] == sorted(known)

    on_site(check)


def test_the_page_is_sorted_searched_and_cut_by_the_monitor() -> None:
    async def check(made: Site) -> None:
        async def ask(query: str) -> dict[str, Any]:
            return json.loads((await made.get(f"api/page?{query}"))[1])

        def losses(page: dict[str, Any]) -> list[float]:
            place = [column["name"] for column in page["columns"]].index("loss")
            return [float(row["cells"][place]) for row in page["rows"]]

        first, last = await ask("sort=loss&descending=1"), await ask("sort=loss&descending=1&page=7")
        assert (first["num_rows"], first["num_pages"], first["page"], last["page"]) == (120, 3, 0, 2)
        assert (len(first["rows"]), len(last["rows"]), len(first["graph"])) == (PAGE_PEERS, 20, 120)
        assert losses(first) == sorted(losses(first), reverse=True)
        assert losses(first)[-1] >= losses(last)[0]
        assert first["curves"]["ids"] == [], "too many"
        name = first["rows"][3]["peer"]
        found = await ask(f"words={name[-5:].upper()}")
        assert sorted(row["peer"] for row in found["rows"]) == found["curves"]["ids"]
        assert name in found["curves"]["ids"], "beside those whose last partner it was"
        assert len(found["rows"]) < 10
        assert (await ask("words=nobody"))["rows"] == []

    on_site(check, num_peers=120)


def test_the_page_is_told_the_stages_and_who_sends_to_whom() -> None:
    async def check(made: Site) -> None:
        head, inner, *_ = made.crowd.peers
        made.crowd.peers[:] = [
            changed(head, stages=3, capacity=10.0, sends_to=(inner.peer_id[-6:],)),
            replace(inner, stages=3, stage=1),
        ]
        made.watcher.members.clear()
        made.look(after_s=2.0)
        page = json.loads((await made.get("api/page"))[1])
        assert [(row["cells"][:2], row["health"]) for row in page["stages"]] == [
            (["1", "1"], ""),
            (["2", "empty"], "empty"),
            (["0 (head)", "1"], ""),
        ]
        shown = [(peer["stage"], peer["sends_to"]) for peer in page["graph"]]
        assert shown == [(0, [inner.peer_id[-6:]]), (1, [])]
        assert page["curves"]["ids"] == [head.peer_id], "other stages have no loss"
        assert page["notices"][0]["text"].startswith("No peer holds stage 2")

    on_site(check)


def test_a_blind_monitor_is_not_healthy() -> None:
    async def check(made: Site) -> None:
        made.swarm.looked_at_s -= 60.0
        assert (await made.get("healthz"))[0] == 503

    on_site(check)


@pytest.mark.parametrize("name", ["index.html", "page.js", "charts.js", "page.css"])
def test_the_page_names_no_other_host(name: str) -> None:
    text = (STATIC / name).read_text()
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text.replace("http://www.w3.org/2000/svg", ""))
    assert 'href="/' not in text
    assert 'src="/' not in text, "a proxy may serve the page under any path"


def test_the_licence_of_what_others_wrote_is_shipped() -> None:
    assert "MIT" in (STATIC / "uPlot.LICENSE").read_text()


def summaries(num_peers: int, *, every_s: float, number: int) -> list[dict[str, Any]]:
    crowd, watcher = Crowd(num_peers, began_s=NOW_S), Watcher(TICKET)
    found = []
    for index in range(number):
        now_s = NOW_S + 1000 + index * every_s
        found.append(watcher.take(crowd.records(now_s), directory_age_s=0.5, now_s=now_s))
    return found


def test_there_is_one_sample_per_interval_of_the_swarm_and_of_each_peer() -> None:
    history, taken = LiveSwarm([]), summaries(3, every_s=SAMPLE_S / 2, number=9)
    for summary in taken:
        history.show(summary)
    names = [peer["peer_id"] for peer in taken[0]["peers"]]
    curves = history.curves([*names, "nobody"])
    assert curves["alive"] == [3] * 5
    assert [round(b - a) for a, b in pairwise(curves["time_s"])] == [10] * 4
    assert curves["swaps"] == [summary["totals"]["swaps"] for summary in taken[::2]]
    assert list(curves["losses"]) == names
    assert curves["losses"][names[1]] == pytest.approx([s["peers"][1]["loss"] for s in taken[::2]], abs=1e-4)


def test_the_time_left_follows_from_the_progress_of_the_last_ten_minutes() -> None:
    history, (summary,) = LiveSwarm([]), summaries(1, every_s=1.0, number=1)
    assert history.left_s() is None
    for tick in range(121):  # 0.1 % in each of the first ten minutes, and 1 % in each of the next ten
        progress = 0.001 * min(tick, 60) / 6 + 0.01 * max(0, tick - 60) / 6
        totals = {**summary["totals"], "progress": progress}
        history.show({**summary, "time_s": NOW_S + SAMPLE_S * tick, "totals": totals})
    assert history.left_s() == pytest.approx(60 * (1 - 0.11) / 0.01)


def test_the_curves_of_a_long_run_are_small_and_without_a_gap() -> None:
    history, (summary,) = LiveSwarm([]), summaries(2, every_s=1.0, number=1)
    num_ticks = 2 * 8_640  # two days
    for tick in range(num_ticks):
        history.show({**summary, "time_s": NOW_S + SAMPLE_S * tick})
    times = history.curves([])["time_s"]
    assert MAX_SAMPLES / 2 <= len(times) <= MAX_SAMPLES
    assert NOW_S + SAMPLE_S * num_ticks - times[-1] <= history.interval_s
    assert times[0] - NOW_S <= history.interval_s
    assert all(b - a == history.interval_s for a, b in pairwise(times))


def test_the_curves_of_many_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_LOSSES", 2_000)
    history, (summary,) = LiveSwarm([]), summaries(100, every_s=1.0, number=1)
    for tick in range(200):
        history.show({**summary, "time_s": NOW_S + SAMPLE_S * tick})
        assert len(history.curves([])["time_s"]) <= 20
    names = [peer["peer_id"] for peer in summary["peers"]]
    assert len(history.curves(names)["losses"]) == web.MAX_SERIES
