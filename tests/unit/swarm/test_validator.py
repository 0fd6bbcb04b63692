from __future__ import annotations

import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness.identities import identity_of
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.invitation import invite
from noloco_p2p.swarm.buckets import MAX_DEPTH, ROOT, Bucket, bucket_of, run_key
from noloco_p2p.swarm.kademlia.validator import RecordValidator
from noloco_p2p.swarm.records import DOMAIN, TTL_S, PeerRecord, encode_record

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


@pytest.mark.parametrize("in_s", [-1.0, 2 * TTL_S + 5])
def test_refuses_what_expired_or_expires_too_late(in_s: float) -> None:
    assert not accepts(stored(in_s=in_s))


def test_who_is_gone_is_out_of_the_directory_within_two_minutes() -> None:
    """Nodes refuse records that live for more than twice the usual time, which allows for differing clocks."""
    assert accepts(stored(in_s=60.0))
    assert not accepts(stored(in_s=125.0))


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


@given(st.binary(max_size=1100))
def test_never_raises(value: bytes) -> None:
    good = stored()
    assert not accepts(DHTRecord(good.key, good.subkey, value, good.expiration_time))
    assert not accepts(DHTRecord(good.key, good.subkey, good.value + value + b"x", good.expiration_time))
