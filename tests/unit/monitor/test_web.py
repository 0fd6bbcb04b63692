from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from harness.crowd import Crowd
from harness.patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from recorded import changed

from noloco_p2p.monitor import web
from noloco_p2p.monitor.tables import Choice
from noloco_p2p.monitor.watcher import Health, Watcher
from noloco_p2p.monitor.web import MAX_SAMPLES, MEETINGS_SHOWN_S, PAGE_PEERS, SAMPLE_S, STATIC, LiveSwarm, app
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.http import serving
from noloco_p2p.telemetry.prometheus import STAGES, swarm_page
from noloco_p2p.ticket import Ticket

NOW_S = time.time()
TICKET = Ticket("crowd", "c0" * 32, ())


class Site:
    """What the page of a synthetic swarm shows."""

    def __init__(self, num_peers: int = 4) -> None:
        self.watcher, self.crowd = Watcher(TICKET), Crowd(num_peers, began_s=NOW_S - 2000)
        self.swarm = LiveSwarm(self.watcher.meetings)
        self.now_s = NOW_S
        self.look()

    def look(self, *peers: PeerRecord, after_s: float = 0.0) -> None:
        """Look at the swarm, which from now on consists of `peers` if there are any."""
        if peers:
            self.crowd.peers[:] = peers
            self.watcher.members.clear()
        self.now_s += after_s
        records = self.crowd.records(self.now_s)
        self.swarm.show(self.watcher.take(records, directory_age_s=0.5, now_s=self.now_s))

    def samples(self) -> list[Any]:
        text = swarm_page(self.swarm.summary, healths=list(Health)).decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def get(url: str, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_every_path_answers_and_nothing_can_be_changed() -> None:
    site = Site()

    def check(url: str) -> None:
        paths = ("", "static/page.js", "static/uPlot.iife.min.js", "static/page.css", "healthz", "metrics")
        odd = "api/page?page=99999999999&sort=none&words=%00"
        for path in (*paths, "api/page", odd, "api/status", "api/history"):
            status, body, headers = get(url + path)
            assert (status, bool(body)) == (200, True), path
            assert "default-src 'none'" in headers["content-security-policy"]
        assert get(url + "api/status", "POST")[0] == 405
        assert get(url + "static/../web.py")[0] == get(url + "static/..%2fweb.py")[0] == 404
        status = json.loads(get(url + "api/status")[1])
        assert (status["version"], status["run"], len(status["peers"])) == (1, "crowd", 4)
        assert "addresses" not in status["peers"][0]
        name = status["peers"][0]["peer_id"]
        curves = json.loads(get(url + f"api/history?id={name}&id=nobody")[1])
        assert list(curves["losses"]) == [name]
        assert len(curves["losses"][name]) == len(curves["time_s"]) == len(curves["apart"]) == 1
        first = json.loads(get(url + "api/page?sort=loss&descending=1&page=0&words=nobody")[1])
        assert first["rows"] == []
        site.swarm.looked_at_s -= 60.0
        assert get(url + "healthz")[0] == 503, "a blind monitor is not healthy"

    async def main() -> None:
        async with serving(app(site.swarm), host="127.0.0.1", port=0, flag="--listen") as port:
            await asyncio.to_thread(check, f"http://127.0.0.1:{port}/")

    asyncio.run(main())


def test_prometheus_gets_few_series_however_large_the_swarm() -> None:
    samples = Site(200).samples()
    assert len(samples) < 40
    assert sum(sample.value for sample in samples if sample.name == "noloco_swarm_peers") == 200
    assert not [sample for sample in samples if "stage" in sample.name], "peers hold whole models"


def test_prometheus_gets_one_series_for_each_stage() -> None:
    site = Site()
    head, inner, other, *_ = site.crowd.peers
    site.look(
        changed(head, stages=3, capacity=10.0, queue=2, microbatches=8, late_microbatches=1),
        replace(changed(inner, capacity=3.0, queue=1, lost_microbatches=4), stages=3, stage=1),
        replace(changed(other, capacity=4.0, queue=5, lost_microbatches=2), stages=3, stage=1),
        after_s=2.0,
    )
    found: dict[str, list[float]] = {family.key: [] for family in STAGES}
    keys = {family.full_name: family.key for family in STAGES}
    for sample in site.samples():
        if key := keys.get(sample.name):
            assert int(sample.labels["stage"]) == (2, 1, 0)[len(found[key])]
            found[key].append(sample.value)
    assert (found["peers"], found["capacity"], found["queue"]) == ([0, 2, 1], [0, 7, 10], [0, 6, 2])
    assert (found["late_microbatches"], found["lost_microbatches"]) == ([0, 0, 1], [0, 6, 0])
    assert all(found.values())


def test_the_page_is_told_its_text_and_who_has_just_swapped_with_whom() -> None:
    site = Site()
    for _ in range(60):
        site.look(after_s=4.0)
    page = site.swarm.page(Choice(), 0)
    assert {len(row["cells"]) for row in page["rows"]} == {len(page["columns"])}
    assert [value["name"] for value in page["values"]][:2] == ["peers alive", "loss"]
    assert page["values"][0]["text"] == "4"
    known = {peer["id"] for peer in page["graph"]}
    assert all(peer["label"] and peer["is_own"] is False for peer in page["graph"])
    assert 0 < len(page["meetings"]) < len(site.watcher.meetings)
    assert all({peer, partner} <= known for _, peer, partner in page["meetings"])
    assert all(0 <= site.now_s - at_s <= MEETINGS_SHOWN_S + 0.1 for at_s, _, _ in page["meetings"])
    assert page["curves"]["ids"] == sorted(known)


def test_a_name_in_the_graph_has_its_id_if_two_peers_have_it() -> None:
    site = Site(3)
    one, other, last = site.crowd.peers
    site.look(replace(one, name="Ada"), replace(other, name="Ada"), replace(last, name="Ben"), after_s=1.0)
    labels = [peer["label"] for peer in site.swarm.page(Choice(), 0)["graph"]]
    assert labels.count("Ben") == 1
    assert sorted(label.endswith(" Ada") for label in labels) == [False, True, True]


def test_the_page_is_sorted_searched_and_cut_by_the_monitor() -> None:
    swarm = Site(120).swarm

    def losses(page: dict[str, Any]) -> list[float]:
        place = [column["name"] for column in page["columns"]].index("loss")
        return [float(row["cells"][place]) for row in page["rows"]]

    by_loss = Choice("loss", descending=True)
    first, last = swarm.page(by_loss, 0), swarm.page(by_loss, 7)
    assert (first["num_rows"], first["num_pages"], first["page"], last["page"]) == (120, 3, 0, 2)
    assert (len(first["rows"]), len(last["rows"]), len(first["graph"])) == (PAGE_PEERS, 20, 120)
    assert losses(first) == sorted(losses(first), reverse=True)
    assert losses(first)[-1] >= losses(last)[0]
    assert first["curves"]["ids"] == [], "too many"
    name = first["rows"][3]["peer"]
    found = swarm.page(Choice(words=name[-5:].upper()), 0)
    assert sorted(row["peer"] for row in found["rows"]) == found["curves"]["ids"]
    assert name in found["curves"]["ids"], "beside those whose last partner it was"
    assert len(found["rows"]) < 10


def test_the_page_is_told_the_stages_and_who_sends_to_whom() -> None:
    site = Site()
    head, inner, *_ = site.crowd.peers
    sends_to = (inner.peer_id[-6:],)
    site.look(changed(head, stages=3, capacity=10.0, sends_to=sends_to), replace(inner, stages=3, stage=1), after_s=2.0)
    page = site.swarm.page(Choice(), 0)
    stages = [(row["cells"][:2], row["health"]) for row in page["stages"]]
    assert stages == [(["1", "1"], ""), (["2", "empty"], "empty"), (["0 (head)", "1"], "")]
    assert [(peer["stage"], [*peer["sends_to"]]) for peer in page["graph"]] == [(0, [*sends_to]), (1, [])]
    assert page["curves"]["ids"] == [head.peer_id], "other stages have no loss"
    assert page["notices"][0]["text"].startswith("No peer holds stage 2")


@pytest.mark.parametrize("name", ["index.html", "page.js", "charts.js", "page.css"])
def test_the_page_names_no_other_host(name: str) -> None:
    text = (STATIC / name).read_text()
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text.replace("http://www.w3.org/2000/svg", ""))
    assert 'href="/' not in text
    assert 'src="/' not in text, "a proxy may serve the page under any path"


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
    for tick in range(121):
        assert (history.left_s() is None) == (tick <= 12), "nothing is told before it has been measured for two minutes"
        # The progress is 0.1 % in each of the first ten minutes, and 1 % in each of the next ten.
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
