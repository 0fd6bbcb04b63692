from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from recorded import changed

from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.peer_name import MAX_CHARS
from noloco_p2p.swarm.buckets import MAX_DEPTH
from noloco_p2p.swarm.records import (
    DOMAIN,
    KEYS,
    MAX_RECORD_BYTES,
    PeerRecord,
    RecordError,
    decode_record,
    encode_record,
)
from noloco_p2p.telemetry.metrics import CONTRIBUTION, FAILED, LARGEST, RECORDED, Metrics


def identity(seed: int = 0) -> Identity:
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32))
    public_key = key.public_key().public_bytes_raw()
    return Identity(peer_id_of(public_key), public_key, key)


ME = identity()
RECORD = PeerRecord(
    ME.peer_id,
    "demo",
    "ab" * 32,
    addresses=("203.0.113.5:4000", "192.168.1.2:4000"),
    multiaddrs=(f"/ip4/203.0.113.5/tcp/4001/p2p/{ME.peer_id}",),
    sequence=1_800_000_000_000,
    expires_at_s=1_800_000_060.5,
    metrics=Metrics(
        progress=0.25,
        swaps=10,
        failed_slow=2,
        inner_steps_per_s=3.5,
        tokens_per_s=1234.5,
        loss=2.25,
        last_partner=identity(1).peer_id,
        bytes_sent=2**40,
        bytes_received=2**40,
    ),
)
FULL = changed(
    RECORD,
    addresses=("203.0.113.55:40000",),
    multiaddrs=tuple(f"/ip4/203.0.113.{n}/tcp/40001/p2p/{ME.peer_id}" for n in range(100, 104)),
    **dict.fromkeys(FAILED, 10_000),
    swaps=1_234_567,
    swaps_per_min=123.4,
    link_use=0.987,
    age_steps=12.3,
    apart=0.00123,
    progress=0.123456789,
    inner_steps_per_s=12.3456,
    tokens_per_s=12345.6,
    loss=2.34567,
    validation_loss=2.34567,
    validation_progress=0.123,
    blocked_s=12.345,
    reachability="outbound-only",
    session_key="A" * 44,
    started_at_ms=1_800_000_000_000,
)
counts = st.integers(0, 2**53)
numbers = (
    st.floats(-LARGEST, LARGEST).map(lambda value: float(f"{value:.6g}")).filter(lambda value: abs(value) <= LARGEST)
)
records = st.builds(
    changed,
    st.just(RECORD),
    state=st.sampled_from(["training", "paused", "leaving", "done"]),
    swaps=counts,
    sequence=counts,
    progress=numbers,
    loss=st.none() | numbers,
    run_name=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
)


def sealed(**changes: Any) -> bytes:
    """Return a record with these raw fields changed and a valid signature."""
    values = json.loads(encode_record(RECORD, ME)[64:]) | changes
    body = json.dumps(values).encode()
    return ME.sign(DOMAIN + body) + body


@given(records)
def test_round_trip_within_the_limit(record: PeerRecord) -> None:
    data = encode_record(record, ME)
    assert decode_record(data) == record
    assert len(data) <= MAX_RECORD_BYTES


def test_a_usual_record_leaves_room() -> None:
    assert len(encode_record(RECORD, ME)) < 750


@given(st.data())
def test_no_changed_byte_is_accepted(data: st.DataObject) -> None:
    record = bytearray(encode_record(RECORD, ME))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        decode_record(bytes(record))


def test_another_peer_cannot_sign() -> None:
    with pytest.raises(RecordError, match="cannot be signed"):
        encode_record(RECORD, identity(1))
    body = encode_record(RECORD, ME)[64:]
    with pytest.raises(RecordError, match="not signed"):
        decode_record(identity(1).sign(DOMAIN + body) + body)
    with pytest.raises(RecordError, match="not signed"):
        decode_record(ME.sign(body) + body)  # a signature for another purpose


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "asleep"}, "unknown state"),
        ({"swaps": "1"}, "swaps"),
        ({"swaps": True}, "swaps"),
        ({"fs": -1}, "failed_slow in the record is not a valid count"),
        ({"st": -1}, "stage"),
        ({"cap": "fast"}, "capacity"),
        ({"to": "xjL4p5"}, "short list"),
        ({"swaps": -1}, "swaps"),
        ({"swaps": 2**53 + 1}, "swaps"),
        ({"tps": 1.7e308}, "tokens_per_s"),
        ({"loss": math.nan}, "not valid JSON"),
        ({"loss": "low"}, "loss"),
        ({"prog": 10**30}, "progress"),
        ({"run": "demo\x1b[2J"}, "printable"),
        ({"at": [0, MAX_DEPTH + 1]}, "depth"),
        ({"grpc": "203.0.113.5:1"}, "short list"),
        ({"grpc": ["a:1"] * 9}, "short list"),
        ({"with": ["a"]}, "short printable string"),
        ({"with": "a" * 321}, "short printable string"),
        ({"id": 5}, "peer_id"),
        ({"sw": "x" * 2000}, "limit"),
    ],
)
def test_wrong_values_are_refused_though_signed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        decode_record(sealed(**changes))


def test_missing_and_unknown_fields() -> None:
    assert decode_record(sealed(colour="of a later version")) == RECORD
    body = json.dumps({"id": ME.peer_id, "spec": "ab" * 32, "exp": 1, "run": "demo"}).encode()
    assert decode_record(ME.sign(DOMAIN + body) + body).state == "training"
    body = json.dumps({"id": ME.peer_id, "spec": "ab" * 32, "exp": 1}).encode()
    with pytest.raises(RecordError, match="name of its run"):
        decode_record(ME.sign(DOMAIN + body) + body)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_peer_that_diverges_is_heard_of(value: float) -> None:
    diverged = changed(RECORD, loss=value, validation_loss=value, tokens_per_s=value)
    assert decode_record(encode_record(diverged, ME)) == changed(RECORD, loss=None, tokens_per_s=0.0)


def test_metrics_travel_with_the_digits_that_are_shown() -> None:
    told = decode_record(encode_record(changed(RECORD, loss=2.123456789, apart=0.00123456), ME))
    assert (told.metrics.loss, told.metrics.apart) == (2.12346, 0.00123)


def test_the_least_useful_addresses_make_room() -> None:
    long = tuple(f"/dns4/{n}{'a' * 120}.example/tcp/4001/p2p/{ME.peer_id}" for n in range(20))
    fitted = decode_record(encode_record(changed(RECORD, multiaddrs=long), ME))
    assert fitted.multiaddrs == long[: len(fitted.multiaddrs)]
    assert 1 <= len(fitted.multiaddrs) < 4
    assert fitted.addresses == RECORD.addresses


def test_addresses_are_those_of_the_peer_itself() -> None:
    with pytest.raises(RecordError, match="does not end in"):
        encode_record(changed(RECORD, multiaddrs=(f"/ip4/1.2.3.4/tcp/1/p2p/{identity(1).peer_id}",)), ME)


def test_wire_names_are_distinct() -> None:
    own = [field.name for field in fields(PeerRecord) if field.name != "metrics"]
    names = [KEYS.get(name, name) for name in (*own, *RECORDED)]
    assert len(set(names)) == len(names)
    assert set(json.loads(encode_record(FULL, ME)[64:])) <= set(names)


def test_empty_fields_do_not_travel() -> None:
    values = json.loads(encode_record(changed(RECORD, failed_slow=0, loss=None, last_partner=""), ME)[64:])
    assert not {"loss", "with", "state", "fs", "apart"} & set(values)


def test_a_full_record_fits_with_all_its_addresses() -> None:
    addresses = tuple(f"203.0.113.{n}:40000" for n in range(100, 104))
    assert decode_record(encode_record(changed(FULL, addresses=addresses), ME)) == changed(FULL, addresses=addresses)


OF_A_STAGE = {
    "stage": 7,
    "stages": 8,
    "capacity": 12345.6,
    "queue": 12,
    "microbatches": 123_456_789,
    "lost_microbatches": 12_345,
    "late_microbatches": 1_234_567,
    "sends_to": ("xjL4p5", "qixA5H", "wQ4VAp", "bmqX7u"),
}


NAMED = {"name": "東京 Lovelace, Ada & Comp.", "trained_s": 1.23457e6, "tokens": 123_456_789_012}


def test_in_the_fullest_record_addresses_give_way_first_then_whom_it_sends_to_then_the_name() -> None:
    assert len(str(NAMED["name"])) == MAX_CHARS
    named = changed(FULL, **NAMED)
    assert decode_record(encode_record(named, ME)) == named
    staged = changed(named, **OF_A_STAGE, addresses=("203.0.113.55:40000", f"{'a' * 28}.example:40000"))
    assert decode_record(encode_record(staged, ME)) == changed(staged, multiaddrs=staged.multiaddrs[:2])
    long = changed(staged, addresses=(f"{'a' * 120}.example:40000",))
    assert decode_record(encode_record(long, ME)) == changed(long, multiaddrs=long.multiaddrs[:1], sends_to=())
    longest = changed(staged, addresses=(f"{'a' * 160}.example:40000",))
    rest = changed(longest, multiaddrs=longest.multiaddrs[:1], sends_to=(), name="")
    assert decode_record(encode_record(longest, ME)) == rest


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("x" * 300, "x" * MAX_CHARS),
        ("a\x1b[2J", ""),
        ("a\u202eb", ""),
        (5, ""),
        (["a"], ""),
        (None, ""),
        ("ＡＤＡ", "ADA"),
    ],
)
def test_an_unfit_name_is_cut_or_left_out_and_the_peer_stays(told: object, name: str) -> None:
    assert decode_record(sealed(name=told)) == changed(RECORD, name=name)


def test_a_name_is_signed() -> None:
    data = encode_record(changed(RECORD, name="Ada"), ME)
    with pytest.raises(RecordError, match="not signed"):
        decode_record(data.replace(b'"name":"Ada"', b'"name":"Bob"'))


def test_a_reason_for_a_pause_that_only_later_versions_know_is_no_reason() -> None:
    assert decode_record(sealed(state="paused", pause="hours")).paused_by == "hours"
    for other in ("on Mars", 5, ["hours"]):
        assert decode_record(sealed(state="paused", pause=other)) == changed(RECORD, state="paused")


def test_hours_and_tokens_that_are_not_told_are_not_known() -> None:
    """A peer may hide them. A newcomer starts with zero."""
    metrics = changed(RECORD, trained_s=3600.0, tokens=5).metrics
    hidden = replace(RECORD, metrics=replace(metrics, **dict.fromkeys(CONTRIBUTION)))
    assert decode_record(encode_record(hidden, ME)) == RECORD
    newcomer = changed(RECORD, trained_s=0.0, tokens=0)
    assert decode_record(encode_record(newcomer, ME)) == newcomer
    with pytest.raises(RecordError, match="tokens in the record is not a valid count"):
        decode_record(sealed(tk=-1))


def test_neither_hivemind_nor_torch_is_imported() -> None:
    modules = "noloco_p2p.swarm.records, noloco_p2p.swarm.directory, noloco_p2p.identity, noloco_p2p.ticket"
    check = f"import sys, {modules}; sys.exit(str({{'torch', 'hivemind'}} & sys.modules.keys() or 0))"
    done = subprocess.run(
        [sys.executable, "-c", check.replace("sys.exit(str(", "print(str(")], capture_output=True, text=True
    )
    assert done.stdout.strip() == "0", done.stdout + done.stderr
