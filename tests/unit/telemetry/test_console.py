from __future__ import annotations

import pytest

from noloco_p2p.telemetry.console import count, loss, mib, percent, report_line
from noloco_p2p.telemetry.metrics import METRICS, Metrics


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3_400_000, "3.2 MiB"),
        (2**40, "1.0 TiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert mib(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1_000, "1k"), (8_124, "8.12k"), (1_234_567, "1.23M"), (7e9, "7B"), (999_700, "1M")],
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


def test_loss() -> None:
    assert (loss(None), loss(3.41249)) == ("-", "3.412")


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (5e-5, "<0.01 %"), (0.0039, "0.39 %"), (0.021, "2.1 %"), (1.5, "150 %")]
)
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_report_is_one_line() -> None:
    metrics = Metrics(step=1234, progress=0.123, loss=3.4123, tokens_per_s=8100, swaps_per_min=14.2)
    line = "step 1,234 | 12.3 % | loss 3.412 | 8.1k tokens/s | {}"
    assert report_line(metrics, num_live=0) == line.format("14 swaps/min | 1 peer")
    metrics.apart, metrics.age_steps, metrics.swaps_per_min = 0.0041, 1.26, 2.0
    assert report_line(metrics, num_live=7) == line.format("2.0 swaps/min, 1.3 steps old, 0.41 % apart | 8 peers")


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    for name, about in METRICS.items():
        assert about.unit, name
        assert about.meaning, name
