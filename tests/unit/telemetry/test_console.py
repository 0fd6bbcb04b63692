from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from noloco_p2p.telemetry.console import cells, count, duration, loss, mib, percent, report_line
from noloco_p2p.telemetry.metrics import METRICS, Metrics


@pytest.mark.parametrize(
    ("show", "texts"),
    [
        (mib, {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3_400_000: "3.2 MiB", 2**60: "1048576.0 TiB"}),
        (count, {0: "0", 999: "999", 1_000: "1k", 8_124: "8.12k", 1_234_567: "1.23M", 7e9: "7B", 999_700: "1M"}),
        (percent, {0.0: "0 %", 5e-5: "<0.01 %", 0.0039: "0.39 %", 0.021: "2.1 %", 1.5: "150 %"}),
        (duration, {0: "0 s", 59.4: "59 s", 95: "1 min 35 s", 7300: "2 h 1 min", 400_000: "4 d 15 h"}),
        (loss, {None: "-", 3.41249: "3.412"}),
        (cells, {"abc": 3, "東京": 4, "e\u0301": 1, "Ｗ": 2, "עדה": 3, "": 0}),
    ],
)
def test_formats(show: Callable[[Any], object], texts: dict[Any, object]) -> None:
    assert {value: show(value) for value in texts} == texts


def test_a_report_is_one_line() -> None:
    metrics = Metrics(step=1234, progress=0.123, loss=3.4123, tokens_per_s=8100, swaps_per_min=14.2)
    line = "step 1,234 | 12.3 % | loss 3.412 | 8.1k tokens/s | {}"
    assert report_line(metrics, num_live=1) == line.format("14 swaps/min | 2 peers")
    metrics.apart, metrics.age_steps, metrics.swaps_per_min = 0.0041, 1.26, 2.0
    assert report_line(metrics, num_live=7) == line.format("2.0 swaps/min, 1.3 steps old, 0.41 % apart | 8 peers")
    assert report_line(metrics, num_live=0) == line.format("training alone: no other live peer")


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    for name, about in METRICS.items():
        assert about.unit, name
        assert about.meaning, name
