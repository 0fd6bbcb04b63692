from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from harness.patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families

from noloco_p2p.errors import SettingsError
from noloco_p2p.telemetry.http import metrics_app, serving
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.telemetry.prometheus import peer_page

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
