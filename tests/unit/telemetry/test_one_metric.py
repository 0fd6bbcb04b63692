"""A new metric takes one line in `Metrics`; everything that shows metrics then includes it."""

from __future__ import annotations

import json
import subprocess
import sys

# A process of its own runs the source with the added line, so that the package needs no hook for this test.
PROGRAM = """
import importlib.util, sys
from pathlib import Path

spec = importlib.util.find_spec("noloco_p2p.telemetry.metrics")
shown = 'Shown(key="new", column="new", rank=20, total="sum")'
line = f'    new: float = _gauge("bytes", "made for a test", {shown})\\n'
place = "    last_partner: str"
source = Path(spec.origin).read_text().replace(place, line + place)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(source, spec.origin, "exec"), module.__dict__)

import json
from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.monitor.tables import Choice, plain
from noloco_p2p.monitor.watcher import Health, Watcher
from noloco_p2p.monitor.web import LiveSwarm
from noloco_p2p.swarm.records import PeerRecord, decode_record, encode_record
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.telemetry.prometheus import peer_page, swarm_page
from noloco_p2p.ticket import Ticket
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

key = Ed25519PrivateKey.from_private_bytes(bytes(32))
public = key.public_key().public_bytes_raw()
me = Identity(peer_id_of(public), public, key)
record = PeerRecord(me.peer_id, "r", "0" * 64, sequence=1, metrics=Metrics(new=3072.0))
heard = decode_record(encode_record(record, me))
swarm, watcher = LiveSwarm([]), Watcher(Ticket("r", "0" * 64, ()))
summary = watcher.take([(heard, 1.0)], directory_age_s=0.0, now_s=1_800_000_000.0)
swarm.show(summary)
print(json.dumps({
    "record": heard.metrics.new,
    "status": Metrics(new=1.0).as_dict()["new"],
    "json": summary["peers"][0]["new"],
    "total": summary["totals"]["new"],
    "terminal": "new" in plain(summary, Choice("new"))[-2].split() and "3.0 KiB" in plain(summary)[-1],
    "page": [column["name"] for column in swarm.page(Choice(), 0)["columns"]].index("new") > 0,
    "curve": swarm.curves([])["new"],
    "own metrics": "noloco_new 7.0" in peer_page(Metrics(new=7.0), peer_id="a", run="r", live_peers=1).decode(),
    "swarm metrics": "noloco_swarm_new 3072.0" in swarm_page(summary, healths=list(Health)).decode(),
}))
"""


def test_a_line_is_all_that_a_new_metric_takes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kib = 3072.0
    assert json.loads(done.stdout) == {
        "record": kib,
        "status": 1.0,
        "json": kib,
        "total": kib,
        "terminal": True,
        "page": True,
        "curve": [kib],
        "own metrics": True,
        "swarm metrics": True,
    }
