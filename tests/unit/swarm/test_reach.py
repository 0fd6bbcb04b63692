from __future__ import annotations

import pytest

from noloco_p2p.swarm.addresses import any_public, is_public
from noloco_p2p.swarm.reach import OUTBOUND_ONLY, REACHED, SILENT_ROUNDS, UNKNOWN, Reach, judge

PRIVATE, PUBLIC = "172.17.0.2:31337", "8.8.8.8:31337"
PEER = "12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"


def reach(
    announced: str = PRIVATE,
    *,
    others: tuple[str, ...] = (),
    entrances: tuple[str, ...] = (),
    num_calls: int = 0,
    rounds_here: int = 0,
) -> Reach:
    return judge(announced, others=others, entrances=entrances, num_calls=num_calls, rounds_here=rounds_here)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", True),
        ("[2001:4860:4860::8888]", True),
        ("peer.example.org", True),
        ("172.17.0.2", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("::1", False),
        ("bootstrap", False),
        ("noloco-0.noloco.default.svc.cluster.local", False),
        ("", False),
    ],
)
def test_public_hosts(host: str, expected: bool) -> None:
    assert is_public(host) is expected


def test_one_public_address_is_enough() -> None:
    private = ["/ip4/10.0.0.1/tcp/1", f"/dns4/bootstrap/tcp/1/p2p/{PEER}", "/unix/tmp/socket"]
    assert not any_public(private)
    assert any_public([*private, f"/dns4/peer.example.org/tcp/1/p2p/{PEER}"])


@pytest.mark.parametrize(("others", "entrances"), [((PUBLIC,), ()), ((), (f"/ip4/8.8.8.8/tcp/31338/p2p/{PEER}",))])
def test_a_private_address_in_a_public_swarm_is_outbound_only(
    others: tuple[str, ...], entrances: tuple[str, ...]
) -> None:
    found = reach(others=others, entrances=entrances)
    assert found.state == OUTBOUND_ONLY
    assert "172.17.0.2 is a private address" in found.sentence
    assert "--announce" in found.sentence
    assert reach("8.8.4.4:31337", others=others, entrances=entrances).state == UNKNOWN


def test_private_addresses_among_each_other_are_fine() -> None:
    assert reach(others=("172.17.0.3:31337",), entrances=(f"/dns4/bootstrap/tcp/31338/p2p/{PEER}",)).state == UNKNOWN


def test_a_call_that_came_in_is_proof() -> None:
    assert reach(others=(PUBLIC,), num_calls=1, rounds_here=100).state == REACHED


def test_long_silence_among_several_peers_tells_of_closed_ports() -> None:
    others = ("1.1.1.1:1", "9.9.9.9:1")
    assert reach(PUBLIC, others=others, rounds_here=SILENT_ROUNDS - 1).state == UNKNOWN
    assert reach(PUBLIC, others=others[:1], rounds_here=SILENT_ROUNDS).state == UNKNOWN
    found = reach(PUBLIC, others=others, rounds_here=SILENT_ROUNDS)
    assert found.state == OUTBOUND_ONLY
    assert "8.8.8.8:31337 seems closed" in found.sentence
