"""A TLS handshake proves who calls, and that the called peer is the one that its record describes."""

from __future__ import annotations

import ssl
import tempfile
import time

import pytest
from harness.identities import identity_of
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation, invite
from noloco_p2p.net import session
from noloco_p2p.net.session import Session, authority, caller_in

ANSWERER, CALLER, THIEF = (Session(identity_of(name)) for name in ("answerer", "caller", "thief"))


def invitation(run: str) -> Invitation:
    return invite(identity_of(run), expires_at_s=time.time() + 1000, seed=bytes(32))


def shaken(
    caller_pem: bytes,
    *,
    key: bytes = CALLER.private_pem,
    to: Session = ANSWERER,
    as_named: str = "",
    trusts: bytes = b"",
) -> bytes:
    """Run a TLS handshake in memory, and return the certificate (DER) that the server has received.

    `to` answers. The caller expects the peer id `as_named`, and the session key `trusts`. Raises ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority(trusts or to.key).decode())
    if caller_pem:
        with tempfile.NamedTemporaryFile() as file:
            file.write(key + caller_pem)
            file.flush()
            context.load_cert_chain(file.name)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = context.wrap_bio(down, up, server_hostname=as_named or to.identity.peer_id)
    server = to.server_context().wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for end in (caller, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    server.do_handshake()
    return server.getpeercert(binary_form=True) or b""


def test_a_caller_is_who_it_proves_to_be() -> None:
    for caller in (CALLER, THIEF):
        certificate = shaken(caller.caller_pem, key=caller.private_pem)
        assert caller_in(certificate) == (caller.identity.peer_id, b"")


def test_a_member_also_proves_its_membership() -> None:
    member, answerer = (Session(identity_of(name), invitation("run")) for name in ("member", "answerer"))
    certificate = shaken(member.caller_pem, key=member.private_pem, to=answerer)
    assert caller_in(certificate) == (member.identity.peer_id, member.membership)


def test_a_certificate_of_another_is_useless_without_its_key() -> None:
    """Who is called sees the certificate of the caller, but cannot call others with it."""
    with pytest.raises(ssl.SSLError):
        shaken(CALLER.caller_pem, key=THIEF.private_pem)


@pytest.mark.parametrize("run", [None, "another run"])
def test_strangers_to_a_private_run_fail(run: str | None) -> None:
    stranger = Session(identity_of("stranger"), invitation(run) if run else None)
    with pytest.raises(ssl.SSLError):
        shaken(stranger.caller_pem, key=stranger.private_pem, to=Session(identity_of("a"), invitation("run")))


def test_who_has_no_certificate_fails() -> None:
    with pytest.raises(ssl.SSLError):
        shaken(b"")


def test_a_caller_notices_that_another_peer_or_another_start_of_it_answers() -> None:
    with pytest.raises(ssl.SSLError):
        shaken(CALLER.caller_pem, as_named=THIEF.identity.peer_id)
    with pytest.raises(ssl.SSLError):
        shaken(CALLER.caller_pem, trusts=Session(ANSWERER.identity).key)


def certificate_of(peer_id: str, signs: Identity, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a certificate that names `peer_id`, in which `signs` has signed the session key."""
    made = session._certificate
    monkeypatch.setattr(session, "_certificate", lambda subject, *rest, **named: made(peer_id, *rest, **named))
    certificate = Session(signs).caller_pem.decode()
    monkeypatch.undo()
    return ssl.PEM_cert_to_DER_cert(certificate)


def test_nobody_takes_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptPayload, match="not signed by the peer"):
        caller_in(certificate_of(CALLER.identity.peer_id, THIEF.identity, monkeypatch))


def test_one_peer_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and bans are by peer id, and the base58 decoder ignores blanks, so an alias must not verify."""
    with pytest.raises(CorruptPayload, match="not signed by the peer"):
        caller_in(certificate_of(CALLER.identity.peer_id + " ", CALLER.identity, monkeypatch))


@given(st.binary(max_size=200))
def test_nonsense_is_refused_in_words(certificate: bytes) -> None:
    with pytest.raises(CorruptPayload, match="cannot be read"):
        caller_in(certificate)
