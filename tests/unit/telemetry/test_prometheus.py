from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families

from noloco_p2p.errors import SettingsError
from noloco_p2p.telemetry.http import metrics_app, serving
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.telemetry.prometheus import ALL, Family, peer_page

ROOT = Path(__file__).resolve().parents[3]


def values(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_peer_tells_its_numbers_and_leaves_out_what_it_does_not_know() -> None:
    metrics = Metrics(swaps=7, failed_slow=1, bytes_sent=1 << 40, loss=2.5, last_partner="12D3Koo")
    page = values(peer_page(metrics, peer_id="me", run="r", live_peers=3))
    assert page["noloco_swaps_total"] == 7
    assert page["noloco_bytes_sent_total"] == 2.0**40
    assert page["noloco_failed_slow_total"] == 1
    assert (page["noloco_loss"], page["noloco_live_peers"], page["noloco_peer_info"]) == (2.5, 3, 1)
    assert "noloco_validation_loss" not in page
    assert not any("last_partner" in name for name in page), "its values are without end"


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return answer.read()


def test_the_page_is_served_on_a_loop_that_is_there_already() -> None:
    async def main() -> tuple[bytes, int]:
        app = metrics_app(lambda: b"noloco_x 1\n")
        async with serving(app, host="127.0.0.1", port=0, flag="--metrics") as port:
            answer = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
            with pytest.raises(SettingsError, match=r"--metrics 127.0.0.1:\d+: Address already in use"):
                async with serving(app, host="127.0.0.1", port=port, flag="--metrics"):
                    pass
        return answer, len(asyncio.all_tasks())

    assert asyncio.run(main()) == (b"noloco_x 1\n", 1)


def test_the_reference_is_what_the_tables_say() -> None:
    generator: dict[str, Any] = {"__file__": str(ROOT / "docs" / "generate.py"), "__name__": "generate"}
    exec((ROOT / "docs" / "generate.py").read_text(), generator)
    for name, page in generator["PAGES"].items():
        text = "\n".join(page()).rstrip() + "\n"
        assert (ROOT / name).read_text(encoding="utf-8") == text, "run python docs/generate.py"


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.full_name)
def test_names_and_units_are_those_that_promtool_accepts(family: Family) -> None:
    """These are the rules of `promtool check metrics`."""
    words = family.full_name.split("_")
    assert re.fullmatch(r"[a-z][a-z0-9_]*", family.full_name)
    assert (family.kind == "counter") == (words[-1] == "total")
    assert not {"count", "sum", "bucket"} & {words[-1]}, "these are parts of histograms"
    assert not {"gauge", "counter", "histogram", "summary"} & set(words), "a name without its kind"
    assert not {"s", "ms", "us", "ns", "sec", "min", "b", "kb", "mb", "gb", "tb", "m", "h", "d"} & set(words[1:])
    assert not {"minutes", "hours", "milliseconds", "kilobytes", "megabytes", "bits"} & set(words), "no base unit"
    assert family.meaning


def test_what_is_per_minute_elsewhere_is_per_second() -> None:
    page = values(peer_page(Metrics(swaps_per_min=30.0, blocked_s=7.0), peer_id="me", run="r", live_peers=3))
    assert (page["noloco_swaps_per_second"], page["noloco_blocked_seconds_total"]) == (0.5, 7.0)


def test_alerts_ask_for_metrics_that_exist_and_prometheus_reads_them() -> None:
    docker = ROOT / "docker"
    rules = yaml.safe_load((docker / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = {name for rule in rules for name in re.findall(r"noloco_\w+", rule["expr"])}
    assert len(rules) >= 5
    assert asked <= {family.full_name for family in ALL}
    assert all(rule["annotations"]["summary"] and rule["for"] for rule in rules)
    services = yaml.safe_load((docker / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert not volume.startswith("./") or (docker / volume.split(":")[0]).is_file(), volume
    [file] = yaml.safe_load((docker / "prometheus.yml").read_text())["rule_files"]
    assert f"./alerts.yml:{file}:ro" in services["prometheus"]["volumes"]
