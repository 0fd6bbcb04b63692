"""Arbitrary bytes stored under a run's key: the validator accepts what a peer has signed, and refuses the rest."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.swarm.buckets import ROOT, run_key
from noloco_p2p.swarm.kademlia.validator import RecordValidator
from noloco_p2p.swarm.records import DOMAIN, TTL_S, PeerRecord, RecordError, decode_record, encode_record

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ME = Identity(peer_id_of(KEY.public_key().public_bytes_raw()), KEY.public_key().public_bytes_raw(), KEY)
RECORD = PeerRecord(ME.peer_id, "demo", "ab" * 32, addresses=("203.0.113.5:4000",))
dumps = MSGPackSerializer.dumps


def stored() -> DHTRecord:
    record = replace(RECORD, expires_at_s=time.time() + TTL_S)
    key = DHTID.generate(ROOT.key(run_key(record.spec_digest))).to_bytes()
    return DHTRecord(key, dumps(record.peer_id), dumps(encode_record(record, ME)), record.expires_at_s)


@settings(max_examples=300)
@given(st.binary(max_size=1200), st.binary(max_size=80), st.floats(allow_nan=True))
def test_any_bytes_are_refused(value: bytes, subkey: bytes, expires_at_s: float) -> None:
    good = stored()
    for record in (
        DHTRecord(good.key, good.subkey, value, good.expiration_time),
        DHTRecord(good.key, good.subkey, dumps(value), good.expiration_time),
        DHTRecord(good.key, subkey, good.value, good.expiration_time),
        DHTRecord(good.key, good.subkey, good.value, expires_at_s),
    ):
        assert not RecordValidator().validate(record)


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_record_with_one_bit_wrong_is_refused(position: int, bit: int) -> None:
    good = stored()
    value = bytearray(good.value)
    value[position % len(value)] ^= 1 << bit
    assert not RecordValidator().validate(DHTRecord(good.key, good.subkey, bytes(value), good.expiration_time))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = json.loads(encode_record(replace(RECORD, expires_at_s=2e9), ME)[64:])


@settings(max_examples=120)
@given(st.sampled_from([*sorted(FIELDS), "new"]), anything)
def test_a_peer_may_sign_anything_and_a_reader_says_so_in_words(field: str, value: object) -> None:
    """A reader gets a record or a RecordError, whatever a field contains."""
    body = json.dumps({**FIELDS, field: value}).encode()
    with contextlib.suppress(RecordError):
        assert isinstance(decode_record(ME.sign(DOMAIN + body) + body), PeerRecord)


@given(st.binary(max_size=2000))
def test_what_is_signed_and_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(ME.sign(DOMAIN + body) + body)
