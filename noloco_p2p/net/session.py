"""Provide the TLS keys of a peer, and authenticate both peers of a connection by them.

A peer creates a new P-256 session key at every start, and publishes it in its signed record. gRPC's TLS does not accept
Ed25519 certificates, and its Python API cannot check fingerprints. So for each call, the caller creates a certificate
authority from the session key in the record, and trusts no other authority. The server's certificate is signed with its
session key, and names its peer id, so the handshake succeeds only with the process that the record describes.

The caller's certificate contains its session key, its peer id, and the peer's signature over that key. TLS proves that
the caller has the key, on this connection and to this server, so nobody can replay a certificate or pass it on. It is
signed by the authority of the run's callers. In a private run, the key of this authority is derived from the members'
secret, so the handshake with a stranger fails. In a public run, everybody knows it.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from base64 import b64encode
from datetime import datetime
from functools import lru_cache

import grpc
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from noloco_p2p.errors import CorruptPayload, Refused, Unreachable
from noloco_p2p.gossip.frames import Hello, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity, short_id, verify
from noloco_p2p.invitation import Invitation, NotInvited

KEY_BYTES = 33  # a compressed point of P-256
SIGNATURE_BYTES = 64  # of Ed25519
CALLER = b"noloco_p2p caller 2\x00"
PUBLIC = b"noloco_p2p callers of public runs 1"
PROOF = x509.ObjectIdentifier("2.25.305741896214023876119047162158403211")  # an arc that needs no registration
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
        seed = invitation.tls_seed() if invitation else blake3(PUBLIC).digest()
        callers_key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, _CURVE)
        private_key = ec.generate_private_key(_CURVE)
        own = private_key.public_key()
        self.key = _point(own)
        self.private_pem = private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        proof = identity.sign(CALLER + self.key) + self.membership
        self.caller_pem = _certificate(
            identity.peer_id, _point(callers_key.public_key()), own, callers_key, proof=proof
        )
        self._server_pem = _certificate(identity.peer_id, self.key, own, private_key)
        self._callers = authority(_point(callers_key.public_key()))

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
            file.write(self.private_pem + self._server_pem)
            file.flush()
            context.load_cert_chain(file.name)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._callers.decode())
        return context

    def channel_credentials(self, candidate: Candidate) -> grpc.ChannelCredentials:
        """Return credentials for a connection that only the holder of the candidate's session key can answer.

        Raises Unreachable if the candidate's record has no valid session key.
        """
        try:
            return grpc.ssl_channel_credentials(authority(candidate.session_key), self.private_pem, self.caller_pem)
        except ValueError:
            raise Unreachable("its record has no valid session key", peer=candidate.peer_id) from None

    def check_membership(self, membership: bytes, peer_id: str) -> None:
        """Raise Refused if the run is private and the peer is not invited."""
        if self.invitation:
            try:
                self.invitation.check(membership, peer_id=peer_id, now_s=time.time())
            except NotInvited as error:
                raise Refused(str(error), code=RefuseCode.NOT_INVITED.name, peer=peer_id) from None


def caller_in(certificate: bytes) -> tuple[str, bytes]:
    """Return the peer id and the membership in the certificate (DER) with which a caller has ended its TLS handshake.

    Raises CorruptPayload if that peer has not signed the key of the certificate.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        [name] = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        proof: bytes = parsed.extensions.get_extension_for_oid(PROOF).value.public_bytes()
        key, peer_id = _point(parsed.public_key()), str(name.value)
    except Exception as error:  # noqa: BLE001 - anybody can sign such a certificate, and the library has many errors
        raise CorruptPayload(f"the caller's certificate cannot be read: {type(error).__name__}") from None
    if not verify(peer_id, CALLER + key, proof[:SIGNATURE_BYTES]):
        raise CorruptPayload("the caller's certificate is not signed by the peer that it names")
    return peer_id, proof[SIGNATURE_BYTES:]


def check_name(proven: str, hello: Hello) -> None:
    """Raise CorruptPayload if the peer id in a caller's Hello is not the authenticated one."""
    if proven and hello.peer_id != proven:
        raise CorruptPayload(f"the caller is ..{short_id(proven)} but claims to be another peer", peer=proven)


@lru_cache(maxsize=1024)
def authority(key: bytes) -> bytes:
    """Return the certificate (PEM) of an authority with this P-256 key. Creating it takes 0.7 ms.

    Raises ValueError for an invalid key.
    """
    return _certificate(_named(key), key, ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, key), _anyone)


def _certificate(
    subject: str,
    issuer: bytes,
    public_key: ec.EllipticCurvePublicKey,
    signed_by: ec.EllipticCurvePrivateKey,
    *,
    proof: bytes = b"",
) -> bytes:
    """Return a certificate (PEM) that is issued by the authority with the key `issuer`."""
    is_authority = subject == _named(issuer)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _named(issuer))]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
    if proof:
        builder = builder.add_extension(x509.UnrecognizedExtension(PROOF, proof), critical=False)
    return builder.sign(signed_by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(key: bytes) -> str:
    """Return a distinct name for each authority, so that TLS tries only the right one of many."""
    return f"noloco {key[:20].hex()}"


def _point(key: object) -> bytes:
    """Return the compressed point of a public key. Raises ValueError for another kind of key."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not a key of an elliptic curve")
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
