from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import IdentityError
from noloco_p2p.identity import PRIVATE_PREFIX, Identity, peer_id_of, public_key_of, verify

# The Ed25519 example of the libp2p specification (peer-ids.md, "Test vectors").
SPEC_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC_KEY = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def test_reads_the_key_of_the_libp2p_specification(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SPEC_PRIVATE_KEY)
    assert Identity.load(path).public_key == SPEC_PUBLIC_KEY[4:]


def test_a_new_identity_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    created = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert created.peer_id.startswith("12D3Koo")
    assert "private" not in repr(created).lower()
    assert Identity.load_or_create(path).peer_id == created.peer_id
    assert os.listdir(path.parent) == ["key"]


def test_two_who_create_at_once_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        identities = list(pool.map(Identity.load_or_create, [tmp_path / "key"] * 32))
    assert len({identity.peer_id for identity in identities}) == 1


def test_a_signature_holds_for_its_signer_and_its_data_only(tmp_path: Path) -> None:
    one, other = (Identity.load_or_create(tmp_path / name) for name in "ab")
    signature = one.sign(b"data")
    assert verify(one.peer_id, b"data", signature)
    assert not verify(one.peer_id, b"date", signature)
    assert not verify(other.peer_id, b"data", signature)
    assert not verify(one.peer_id, b"data", signature[:-1])


@given(st.text(max_size=60))
def test_no_text_makes_verify_raise(peer_id: str) -> None:
    assert not verify(peer_id, b"data", bytes(64))


def test_a_long_id_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding an id of 5,500 characters took 18 ms."""
    decoded: list[str] = []
    monkeypatch.setattr("base58.b58decode", decoded.append)
    assert not verify("z" * 5500, b"data", bytes(64))
    assert not decoded


@given(st.binary(min_size=32, max_size=32))
def test_the_public_key_is_in_the_id(public_key: bytes) -> None:
    assert public_key_of(peer_id_of(public_key)) == public_key


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a libp2p Ed25519 private key"),
        (SPEC_PRIVATE_KEY[:-1], "67 bytes, expected 68"),
        (b"\x08\x00\x12\x40" + bytes(64), "not an Ed25519 key"),
        (PRIVATE_PREFIX + bytes(64), "two halves"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(IdentityError, match=words) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


def test_missing_and_unwritable_are_told(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="noloco id"):
        Identity.load(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="--state-dir"):
        Identity.load_or_create(tmp_path / "file" / "key")
