"""A node accepts what a peer has signed about itself, and refuses any other bytes. A reader says why in words."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness.identities import identity_of
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.invitation import invite
from noloco_p2p.swarm.buckets import MAX_DEPTH, ROOT, Bucket, bucket_of, run_key
from noloco_p2p.swarm.kademlia.storage import RecordValidator
from noloco_p2p.swarm.records import DOMAIN, TTL_S, PeerRecord, RecordError, decode_record, encode_record

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ME = Identity(peer_id_of(KEY.public_key().public_bytes_raw()), KEY.public_key().public_bytes_raw(), KEY)
RECORD = PeerRecord(ME.peer_id, "demo", "ab" * 32, addresses=("203.0.113.5:4000",))
dumps = MSGPackSerializer.dumps


def stored(record: PeerRecord = RECORD, *, in_s: float = TTL_S) -> DHTRecord:
    record = replace(record, expires_at_s=time.time() + in_s)
    key = DHTID.generate(ROOT.key(run_key(record.spec_digest))).to_bytes()
    return DHTRecord(key, dumps(record.peer_id), dumps(encode_record(record, ME)), record.expires_at_s)


def accepts(record: DHTRecord) -> bool:
    return RecordValidator().validate(record)


def test_accepts_what_a_peer_says_about_itself() -> None:
    assert accepts(stored())
    short = PeerRecord(ME.peer_id, "x", "ab" * 32, software="")
    assert accepts(stored(short))


def test_who_is_gone_is_out_of_the_directory_within_two_minutes() -> None:
    """Nodes refuse records that live for more than twice the usual time, which allows for differing clocks."""
    assert accepts(stored(in_s=60.0))
    assert not accepts(stored(in_s=125.0))
    assert not accepts(stored(in_s=-1.0)), "it has expired"


def test_refuses_another_subkey_key_or_expiry() -> None:
    good = stored()
    assert not accepts(DHTRecord(good.key, dumps(peer_id_of(bytes(32))), good.value, good.expiration_time))
    assert not accepts(DHTRecord(good.key, dumps(None), good.value, good.expiration_time))
    assert not accepts(DHTRecord(DHTID.generate("x").to_bytes(), good.subkey, good.value, good.expiration_time))
    assert not accepts(DHTRecord(good.key, good.subkey, good.value, good.expiration_time + 1))


def in_bucket(bucket: Bucket) -> DHTRecord:
    good = stored()
    return DHTRecord(
        DHTID.generate(bucket.key(run_key(RECORD.spec_digest))).to_bytes(),
        good.subkey,
        good.value,
        good.expiration_time,
    )


def test_a_peer_may_be_in_its_own_bucket_at_any_depth_and_in_no_other() -> None:
    for depth in range(MAX_DEPTH + 1):
        own = bucket_of(ME.peer_id, depth)
        assert accepts(in_bucket(own))
        if depth:
            assert not accepts(in_bucket(Bucket(depth, own.index ^ 1)))
    assert not accepts(in_bucket(bucket_of(ME.peer_id, MAX_DEPTH + 1)))


def test_a_state_of_the_future_is_stored_for_those_who_know_it() -> None:
    expires_at_s = time.time() + TTL_S
    key = DHTID.generate(ROOT.key(run_key(RECORD.spec_digest))).to_bytes()
    body = encode_record(replace(RECORD, expires_at_s=expires_at_s), ME)[64:].replace(b'"training"', b'"dreaming"')
    value = ME.sign(DOMAIN + body) + body
    assert accepts(DHTRecord(key, dumps(ME.peer_id), dumps(value), expires_at_s))


def test_a_private_run_takes_what_a_member_has_marked() -> None:
    listing = invite(identity_of("run key"), expires_at_s=2e9, seed=bytes(32)).listing("ab" * 32)
    member = replace(RECORD, run_name="", spec_digest=listing.view)
    assert accepts(stored(replace(member, mark=listing.mark(ME.peer_id))))
    for mark in ("", listing.mark(identity_of("other").peer_id), listing.mark(ME.peer_id)[:-3]):
        assert not accepts(stored(replace(member, mark=mark)))


@settings(max_examples=300)
@given(st.binary(max_size=1200), st.binary(max_size=80), st.floats(allow_nan=True))
def test_any_bytes_are_refused(value: bytes, subkey: bytes, expires_at_s: float) -> None:
    good = stored()
    for record in (
        DHTRecord(good.key, good.subkey, value, good.expiration_time),
        DHTRecord(good.key, good.subkey, dumps(value), good.expiration_time),
        DHTRecord(good.key, good.subkey, good.value + value + b"x", good.expiration_time),
        DHTRecord(good.key, subkey, good.value, good.expiration_time),
        DHTRecord(good.key, good.subkey, good.value, expires_at_s),
    ):
        assert not accepts(record)


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
