from __future__ import annotations

from typing import Any

from rich.console import Console

from noloco_p2p.monitor.collect import describe
from noloco_p2p.monitor.terminal import COLUMNS, plain, table, title
from noloco_p2p.swarm.records import PeerRecord

PROMISED = {"peer_id", "state", "round", "swaps", "alone", "loss", "tokens_per_s", "age_s", "reachability"}
A = PeerRecord(peer_id="12D3KooWaaaaaa", run_name="r", spec_digest="0" * 64, round=7, swaps=5, alone=2, loss=2.5)
B = PeerRecord(peer_id="12D3KooWbbbbbb", run_name="r", spec_digest="0" * 64, state="leaving", tokens_per_s=9e9)


def swarm(*records: PeerRecord) -> dict[str, Any]:
    return {"run": "r", "spec_digest": "0" * 64, "peers": [describe(record, 3.14159) for record in records]}


def test_a_peer_has_the_promised_keys() -> None:
    peer = describe(A, 3.14159)
    assert peer.keys() >= PROMISED
    assert (peer["round"], peer["swaps"], peer["alone"], peer["loss"], peer["age_s"]) == (7, 5, 2, 2.5, 3.1)


def test_the_title_counts_states_and_the_speed_of_those_who_train() -> None:
    assert title(swarm(A, B)) == "run r: 1 training, 1 leaving | 0 tokens/s"
    assert title(swarm()) == "run r: no peer heard of | 0 tokens/s"


def test_plain_lines_are_aligned_one_a_peer() -> None:
    lines = plain(swarm(A, B))
    assert len(lines) == 4
    assert lines[2].split()[:6] == ["..aaaaaa", "training", "7", "5", "2", "2.500"]
    assert lines[1].index("state") == lines[2].index("training") == lines[3].index("leaving")


def test_the_table_shows_every_column() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as drawn:
        console.print(table(swarm(A, B)))
    assert all(column in drawn.get() for column in COLUMNS)
    assert "..bbbbbb" in drawn.get()
