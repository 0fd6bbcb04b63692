from __future__ import annotations

import io
from typing import Any

import pytest
from recorded import changed
from rich.console import Console

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.tables import COLUMNS, Choice, headlines, plain, view
from noloco_p2p.monitor.watcher import Own, Watcher
from noloco_p2p.peer_name import MAX_CHARS
from noloco_p2p.spec import MAX_STAGES
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.ticket import Ticket

PROMISED = {"peer_id", "state", "progress", "swaps", "failed", "loss", "tokens_per_s", "age_s", "reachability"}
A = PeerRecord(
    "12D3KooWaaaaaa",
    "r",
    "0" * 64,
    sequence=1,
    metrics=Metrics(
        swaps=5,
        failed_slow=2,
        swaps_per_min=3.0,
        link_use=0.8,
        age_steps=2.14,
        apart=0.0031,
        loss=2.5,
        tokens_per_s=1500.0,
        progress=0.34,
        bytes_sent=3 << 20,
        last_partner="12D3KooWbbbbbb",
    ),
)
B = changed(A, peer_id="12D3KooWbbbbbb", state="leaving", tokens_per_s=9e9, loss=None, last_partner="")
HEAD = changed(A, stages=3, capacity=9000.0, microbatches=100, late_microbatches=10, queue=2)
INNER = changed(
    A, peer_id="12D3KooWiiiiii", stages=3, stage=1, capacity=4000.0, microbatches=50, lost_microbatches=2, loss=None
)
TICKET = Ticket("r", "0" * 64, ())


def swarm(*records: PeerRecord, age_s: float = 3.14159) -> dict[str, Any]:
    told = [(record, age_s) for record in records]
    return Watcher(TICKET).take(told, directory_age_s=0.5, now_s=1_800_000_000.0)


def stages(*records: PeerRecord) -> list[dict[str, Any]]:
    return swarm(*records)["stages"]


def crowd(number: int) -> dict[str, Any]:
    return swarm(*(changed(A, peer_id=f"12D3KooW{index:06d}", loss=1 + index / 1000) for index in range(number)))


def drawn(page: Any, *, width: int, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_peer_has_the_promised_keys() -> None:
    (peer,) = swarm(A)["peers"]
    assert peer.keys() >= PROMISED
    assert (peer["progress"], peer["swaps"], peer["loss"], peer["age_s"]) == (0.34, 5, 2.5, 3.1)
    assert peer["failed"] == {"unreachable": 0, "slow": 2, "corrupt": 0, "abandoned": 0}


def test_the_headline_counts_peers_and_the_speed_of_those_who_train() -> None:
    assert headlines(swarm(A, B)) == [
        "run r | peers alive 1 (1 leaving) | loss 2.500 (2.500 to 2.500) | tokens/s 1.5k | done 34.0 %",
        "apart 0.31 % (0.31 % to 0.31 %) | link in use 80 % (3.0 swaps/min per peer, 2.1 steps old) | "
        "sent 6.0 MiB (in 10 swaps)",
    ]
    silent = changed(A, peer_id="12D3KooWcccccc", loss=None)
    assert swarm(A, silent)["totals"]["loss"] == 2.5, "not the mean with a 0"
    assert headlines(swarm()) == ["run r | peers alive 0 | tokens/s 0", "sent 0 B (in 0 swaps)"]


def test_what_failed_lately_is_told_for_the_swarm_and_in_all_for_each_peer() -> None:
    watcher, summary = Watcher(TICKET), dict[str, Any]()
    for sequence, failed in ((1, 2), (2, 5)):
        peer = changed(A, sequence=sequence, swaps=sequence, failed_slow=failed, failed_corrupt=sequence)
        summary = watcher.take([(peer, 0.0)], directory_age_s=0.5, now_s=1_800_000_000.0 + sequence)
    lines = plain(summary)
    assert "failed swaps 80 % (3 slow, 1 corrupt)" in lines[1]
    assert lines[-1].endswith("5 slow, 2 corrupt")
    peer = changed(peer, sequence=3, swaps=4)
    summary = Watcher(TICKET).take([(peer, 0.0)], directory_age_s=0.5, now_s=1_800_000_000.0)
    summary["totals"]["lately"] = dict.fromkeys(summary["totals"]["lately"], 0) | {"swaps": 13}
    for lately_s, window in ((14.0, "14 s"), (600.0, "10 min")):
        summary["totals"]["lately_s"] = lately_s
        assert f"failed swaps 0 % (of 13 in {window})" in plain(summary)[1]


def test_plain_lines_are_aligned_one_a_peer() -> None:
    lines = plain(swarm(A, B))
    header = next(index for index, line in enumerate(lines) if line.startswith("peer"))
    assert lines[header + 1].split()[:4] == ["..aaaaaa", "training", "34", "%"]
    assert lines[header].index("state") == lines[header + 1].index("training") == lines[header + 2].index("leaving")
    assert len(lines) == header + 3


def test_a_name_stands_beside_the_id() -> None:
    named = changed(A, name="東京 Ada", trained_s=3 * 3600.0 + 65, tokens=3_410_000)
    lines = plain(swarm(named, B))
    header = next(index for index, line in enumerate(lines) if line.startswith("peer"))
    assert lines[header].split()[:2] == ["peer", "state"]
    assert lines[header + 1].split()[:4] == ["..aaaaaa", "東京", "Ada", "training"]
    assert lines[header + 2].split()[:2] == ["..bbbbbb", "leaving"]
    assert lines[header].index("state") == lines[header + 1].index("training") + 2, "two letters take two columns each"
    assert "3 h 1 min" in lines[header + 1]
    assert "3.41M" in lines[header + 1]
    for words in ("東京", "..aaaaaa", "..aaaaaa 東京 ada"):
        assert [peer["peer_id"] for peer in Choice(words=words).of(swarm(named, B)["peers"])] == [A.peer_id]
    partner = changed(B, sequence=2, last_partner=A.peer_id)
    assert "..aaaaaa 東京 Ada" in plain(swarm(named, partner))[-1], "the partner has the same name there"
    assert [peer["name"] for peer in Choice("peer").of(swarm(named, B)["peers"])] == ["東京 Ada", ""]


def test_the_peer_on_this_machine_the_model_and_the_data_are_named() -> None:
    watcher = Watcher(TICKET)
    watcher.about = "1,000 parameters, trained on stdlib"
    told = [(changed(A, name="Ada"), 1.0), (B, 1.0)]
    seen = watcher.take(told, directory_age_s=0.5, now_s=1_800_000_000.0, own=Own(A.peer_id))
    lines = plain(seen)
    assert headlines(seen)[2] == "1,000 parameters, trained on stdlib"
    assert [line for line in lines if "(here)" in line] == [lines[-2]]
    assert lines[-2].startswith("..aaaaaa Ada (here)  training")
    assert "1,000 parameters, trained on stdlib" in drawn(view(seen, Choice(), width=80, height=24), width=80)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_on_a_screen_of_80_columns(width: int) -> None:
    long = changed(A, name="x" * MAX_CHARS, state="paused", paused_by="in use")
    lines = drawn(view(swarm(long, B), Choice(), width=width, height=30), width=width)
    assert "…" not in "".join(lines)
    assert any(f"..aaaaaa {'x' * MAX_CHARS}" in line and "paused (in use)" in line for line in lines)


def test_what_a_peer_does_not_tell_is_no_zero() -> None:
    (peer,) = swarm(A)["peers"]
    assert (peer["tokens"], peer["trained_s"]) == (None, None)
    header, row = plain(swarm(A))[-2:]
    assert row[header.index("trained") :].split()[:2] == ["-", "-"]


def test_a_validation_loss_says_when_it_was_measured() -> None:
    evaluated = changed(A, validation_loss=2.41, validation_progress=0.3199)
    (peer,) = swarm(evaluated)["peers"]
    assert (peer["validation_loss"], peer["validation_progress"]) == (2.41, 0.3199)
    assert "  2.410 at 32 %  " in plain(swarm(evaluated))[-1]
    assert "  2.410  " in plain(swarm(changed(A, validation_loss=2.41)))[-1], "an older peer does not say it"


def test_a_paused_peer_says_why_while_it_is_alive() -> None:
    paused = changed(A, state="paused", paused_by="hours")
    assert "paused (hours)" in plain(swarm(paused))[-1]
    assert "paused (hours)" not in plain(swarm(paused, age_s=50.0))[-1]
    assert "paused " in plain(swarm(changed(A, state="paused")))[-1]
    assert swarm(changed(A, paused_by="hours"))["peers"][0]["paused_by"] == "", "it trains"


def test_stages_are_rows_and_the_one_with_the_least_capacity_comes_first() -> None:
    other = changed(INNER, peer_id="12D3KooWjjjjjj", capacity=4500.0, microbatches=150, tokens_per_s=500.0)
    rows = stages(HEAD, INNER, other)
    assert [(row["stage"], row["peers"], row["capacity"]) for row in rows] == [
        (2, 0, 0),
        (1, 2, 8500.0),
        (0, 1, 9000.0),
    ]
    empty, inner, head = rows
    assert (empty["microbatches"], empty["late_share"], empty["lost_share"], empty["apart"]) == (0, None, None, None)
    assert (inner["microbatches"], inner["lost_share"], inner["late_share"]) == (200, 0.02, 0.0)
    assert (inner["tokens_per_s"], inner["apart"]) == (2000.0, 0.0031)
    assert (head["queue"], head["late_share"]) == (2, 0.1)
    assert swarm(HEAD, INNER)["totals"]["tokens_per_s"] == 1500.0, "a token that passes all stages is counted once"


def test_most_peers_say_how_many_stages_there_are() -> None:
    liar = changed(INNER, peer_id="12D3KooWllllll", stages=MAX_STAGES, stage=60)
    early = changed(INNER, peer_id="12D3KooWeeeeee", stages=0)
    assert len(stages(HEAD, INNER, liar)) == 3
    assert len(stages(HEAD, early)) == 3, "one that has not begun says 0"
    assert stages(A, B, changed(liar, stages=10**15)) == stages(A, changed(A, peer_id="c"), liar) == []


@pytest.mark.parametrize("width", [40, 80, 200])
def test_stages_are_shown_with_the_stage_of_each_peer(width: int) -> None:
    seen = swarm(HEAD, INNER)
    for lines in (plain(seen), drawn(view(seen, Choice(), width=width, height=24), width=width)):
        first = next(index for index, line in enumerate(lines) if line.startswith("stage "))
        assert lines[first].split()[:3] == ["stage", "peers", "capacity"]
        assert [line.split()[0] for line in lines[first + 1 : first + 4]] == ["2", "1", "0"]
        assert lines[first + 1].split()[1] == "empty"
        assert any("No peer holds stage 2" in line for line in lines)
    whole = plain(seen)
    row = next(line.split() for line in whole if line.startswith("1 "))
    assert row == ["1", "1", "4k", "1.5k", "0", "50", "0", "%", "4", "%", "0.31", "%"]
    header = next(index for index, line in enumerate(whole) if line.startswith("peer"))
    assert [line.split()[::2][:2] for line in whole[header:]] == [
        ["peer", "stage"],
        ["..aaaaaa", "0"],
        ["..iiiiii", "1"],
    ]
    assert [peer["stage"] for peer in Choice("stage", descending=True).of(seen["peers"])] == [1, 0]


def test_many_stages_leave_room_for_peers() -> None:
    lines = drawn(view(swarm(changed(HEAD, stages=MAX_STAGES)), Choice(), width=80, height=24), width=80)
    assert len(lines) < 24
    assert any("..aaaaaa" in line for line in lines)
    assert any(line.strip() == "and 56 more stages with more capacity" for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_page_fits_its_terminal(width: int) -> None:
    lines = drawn(view(crowd(3000), Choice(), width=width, height=24), width=width)
    assert len(lines) < 24
    assert max(map(len, lines)) <= width
    assert any("..000000" in line for line in lines)
    assert any("more: use --filter" in line for line in lines)
    header = next(line for line in lines if line.startswith("peer"))
    assert {"state", "heard"} <= set(header.split())
    if width >= 80:
        assert {"done", "loss", "tokens/s", "swaps/min", "apart", "link"} <= set(header.split())
    if width == 200:
        assert all(column.name in header for column in COLUMNS)
    tall = "\n".join(drawn(view(crowd(30), Choice(), width=width, height=60), width=width, height=60))
    assert all(f"..{index:06d}" in tall for index in range(30))
    assert "more" not in tall
    assert ("columns that need a wider window" in tall) == (width < 200)


def test_sorting_and_filtering() -> None:
    peers = swarm(A, B, changed(A, peer_id="12D3KooWcccccc", loss=1.0))["peers"]
    assert [peer["loss"] for peer in Choice("loss").of(peers)] == [1.0, 2.5, None]
    assert [peer["loss"] for peer in Choice("loss", descending=True).of(peers)] == [2.5, 1.0, None]
    assert [peer["peer_id"][-6:] for peer in Choice(words="LEAVING").of(peers)] == ["bbbbbb"]
    assert [peer["state"] for peer in Choice().of(peers)] == ["training", "training", "leaving"]
    assert Choice(words="nothing").of(peers) == []
    with pytest.raises(SettingsError, match=r"--sort 'speed' is not a column; choose one of: peer, state, .*tokens/s"):
        Choice("speed")
