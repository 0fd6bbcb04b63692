"""docker/grafana.json asks for metrics and labels that /metrics has, and Grafana can draw every panel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noloco_p2p.telemetry import prometheus

FILE = Path(__file__).resolve().parents[3] / "docker" / "grafana.json"
FAMILIES = {family.full_name: family for family in prometheus.ALL}
OF_PROMETHEUS = {"instance", "job"}  # labels of every target
QUERY = re.compile(r"noloco_\w+")
MATCHED = re.compile(r"(\w+)=~")
SHOWN = re.compile(r"{{(\w+)}}")
RISES = ("rate(", "increase(")


def dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def targets() -> Iterator[dict[str, str]]:
    for panel in dashboard()["panels"]:
        yield from panel.get("targets", [])


def test_every_metric_and_label_of_the_dashboard_exists() -> None:
    asked = [(QUERY.findall(target["expr"]), target) for target in targets()]
    assert len(asked) > 30
    for names, target in asked:
        assert len(names) == 1, target
        assert names[0] in FAMILIES, f"{names[0]} is not at /metrics"
        labels = {*MATCHED.findall(target["expr"]), *SHOWN.findall(target["legendFormat"])}
        assert labels <= {*FAMILIES[names[0]].labels, *OF_PROMETHEUS}, target


def test_counters_are_shown_as_rates_and_gauges_are_not() -> None:
    for target in targets():
        is_counter = FAMILIES[QUERY.findall(target["expr"])[0]].kind == "counter"
        assert is_counter == target["expr"].startswith(RISES), target["expr"]


def test_the_variables_name_metrics_that_exist() -> None:
    asked = {name for each in dashboard()["templating"]["list"] for name in QUERY.findall(each["query"])}
    assert asked
    assert asked <= FAMILIES.keys()
