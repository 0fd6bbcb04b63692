"""Provide the TLS keys of a peer. A peer creates a new P-256 session key at every start, and publishes it in its signed
record.

gRPC's TLS does not accept Ed25519 certificates, and its Python API cannot check fingerprints. So for each call, the
caller creates a certificate authority from the session key in the record, and trusts no other authority. The server's
certificate is signed with its session key, so the handshake pins that key without fetching it first.

In a private run, callers also have a certificate. It is signed with a key that is derived from the members' secret.
Without such a certificate, the TLS handshake fails. `handshake.py` checks which peer is calling, and whether its
invitation is valid.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from base64 import b64encode
from datetime import datetime
from functools import lru_cache

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation

KEY_BYTES = 33  # a compressed point of P-256
SERVER_NAME = "noloco"  # the same in every certificate, because a peer is identified by its key
# Certificates do not expire. A session key lives as long as its process, and the clocks of strangers differ.
FROM, UNTIL = datetime(2020, 1, 1), datetime(2120, 1, 1)

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (SEC 2, version 2, 2.4.2)
_anyone = ec.generate_private_key(_CURVE)  # the signature of a directly trusted certificate is never checked


class Session:
    """The keys that a peer uses until it stops. `key` is a 33-byte public key, which the peer's record contains."""

    def __init__(self, identity: Identity, invitation: Invitation | None = None) -> None:
        self.identity = identity
        self.invitation = invitation
        self.membership = invitation.membership(identity.peer_id) if invitation else b""
        self.started_at_ms = int(time.time() * 1000)
        self._private_key = ec.generate_private_key(_CURVE)
        self.key = _point(self._private_key.public_key())
        self._certificate = _certificate(
            SERVER_NAME, _issuer(self.key), self._private_key.public_key(), self._private_key
        )
        self._members_key = _members_key(invitation) if invitation else None

    @property
    def key_text(self) -> str:
        """Return the key as text, in the form that the record uses."""
        return b64encode(self.key).decode()

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS settings of the server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # each call has its own connection, so none resumes another
        context.set_alpn_protocols(["h2"])
        with tempfile.NamedTemporaryFile() as file:  # Python reads keys only from files; only this user can read it
            file.write(self._private_pem() + self._certificate)
            file.flush()
            context.load_cert_chain(file.name)
        if self._members_key is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=authority(_point(self._members_key.public_key())).decode())
        return context

    def channel_credentials(self, candidate: Candidate) -> grpc.ChannelCredentials:
        """Return credentials for a connection that only the holder of the candidate's session key can answer.

        Raises Unreachable if the candidate's record has no valid session key.
        """
        try:
            server = authority(candidate.session_key)
            if self._members_key is None:
                return grpc.ssl_channel_credentials(server)
            return grpc.ssl_channel_credentials(server, self._private_pem(), self._members_certificate())
        except ValueError:
            raise Unreachable("its record has no valid session key", peer=candidate.peer_id) from None

    def _members_certificate(self) -> bytes:
        assert self._members_key is not None
        issuer = _issuer(_point(self._members_key.public_key()))
        return _certificate(SERVER_NAME, issuer, self._private_key.public_key(), self._members_key)

    def _private_pem(self) -> bytes:
        return self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@lru_cache(maxsize=1024)
def authority(key: bytes) -> bytes:
    """Return the certificate (PEM) of an authority with this session key. Creating it takes 0.7 ms.

    Raises ValueError for an invalid key.
    """
    public_key = ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, key)
    return _certificate(_issuer(key), _issuer(key), public_key, _anyone, is_authority=True)


def _certificate(
    subject: str,
    issuer: str,
    public_key: ec.EllipticCurvePublicKey,
    signed_by: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> bytes:
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_named(subject))
        .issuer_name(_named(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(signed_by, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _members_key(invitation: Invitation) -> ec.EllipticCurvePrivateKey:
    """Return the key that all members of the run share."""
    return ec.derive_private_key(int.from_bytes(invitation.tls_seed(), "big") % (_ORDER - 1) + 1, _CURVE)


def _issuer(key: bytes) -> str:
    """Return a distinct name for each key, so that TLS tries only the right one of many authorities."""
    return f"{SERVER_NAME} {key[:20].hex()}"


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
