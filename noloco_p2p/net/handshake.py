"""Authenticate both peers of a call.

Each peer signs data that only this call, on this connection, to this session can contain:

    caller   -> Greet(nonce)
    answerer -> challenge, signature over (ANSWERER, nonce, challenge, session key, answerer)
    caller   -> the call; in its metadata a Proof: signature over (CALLER, nonce, challenge, session key, both ids)

A proof is valid for one call. The challenge is bound to the network address of the connection, and is accepted only
once. It expires according to the monotonic clock of the peer that created it. The proof also covers the answerer's
session key, so the answerer cannot forward the proof to another peer and pose as the caller. From then on, TLS protects
the call.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from noloco_p2p.errors import CorruptPayload, PeerError, Refused
from noloco_p2p.gossip.frames import Hello, RefuseCode
from noloco_p2p.identity import short_id, verify
from noloco_p2p.invitation import NotInvited
from noloco_p2p.net.convert import text
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

PROOF_KEY = "noloco-proof-bin"
NONCE_BYTES = 16
CHALLENGE_S = 10.0
# The time of issue in ms, random bytes, and a tag that shows that the challenge was issued here.
CHALLENGE_BYTES = 8 + NONCE_BYTES + 16
CALLER, ANSWERER = b"noloco_p2p caller 1\x00", b"noloco_p2p answerer 1\x00"

Metadata = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Greeting:
    """The data that a caller keeps between Greet and its call."""

    nonce: bytes
    peer_id: str  # of the called peer
    session_key: bytes

    @classmethod
    def to(cls, peer_id: str, session_key: bytes) -> Greeting:
        return cls(secrets.token_bytes(NONCE_BYTES), peer_id, session_key)

    def request(self) -> pb.GreetRequest:
        return pb.GreetRequest(nonce=self.nonce)

    def prove(self, reply: pb.GreetReply, session: Session) -> Metadata:
        """Return the metadata of the call. Raises PeerError if a different peer has answered."""
        if len(reply.challenge) != CHALLENGE_BYTES:
            raise CorruptPayload("its reply to the greeting has no valid challenge", peer=self.peer_id)
        words = _words(ANSWERER, self.nonce, reply.challenge, self.session_key, self.peer_id)
        if not verify(self.peer_id, words, reply.signature):
            raise PeerError("the signature is invalid, so another peer may have answered", peer=self.peer_id)
        check_membership(session, reply.membership, self.peer_id)
        own_id = session.identity.peer_id
        words = _words(CALLER, self.nonce, reply.challenge, self.session_key, self.peer_id + own_id)
        proof = pb.Proof(
            peer_id=own_id,
            nonce=self.nonce,
            challenge=reply.challenge,
            signature=session.identity.sign(words),
            membership=session.membership,
        )
        return ((PROOF_KEY, proof.SerializeToString()),)


class Challenges:
    """The challenges of the answering peer. This class stores nothing about callers except accepted challenges, which
    it forgets when they expire.
    """

    def __init__(self, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._taken: dict[bytes, float] = {}  # challenge -> when it was accepted, oldest first

    def answer(self, request: pb.GreetRequest, address: str) -> pb.GreetReply:
        """Answer a greeting. `address` is gRPC's name for the connection. Raises CorruptPayload for a nonce of the
        wrong size.
        """
        if len(request.nonce) != NONCE_BYTES:
            raise CorruptPayload(f"the nonce of a greeting must be {NONCE_BYTES} bytes long")
        given = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(NONCE_BYTES)
        challenge = given + self._mark(given, request.nonce, address)
        identity = self._session.identity
        words = _words(ANSWERER, request.nonce, challenge, self._session.key, identity.peer_id)
        signature = identity.sign(words)
        return pb.GreetReply(challenge=challenge, signature=signature, membership=self._session.membership)

    def check(self, proof: pb.Proof, address: str) -> str:
        """Return the peer id of the caller. Raises Refused if authentication fails."""
        challenge, now_s = proof.challenge, self._clock()
        given, mark = challenge[:-16], challenge[-16:]
        if len(challenge) != CHALLENGE_BYTES or not secrets.compare_digest(
            mark, self._mark(given, proof.nonce, address)
        ):
            raise not_proven("the challenge was not issued by this peer on this connection")
        if now_s - int.from_bytes(given[:8], "big") / 1000 > CHALLENGE_S:
            raise not_proven(f"the challenge is older than {CHALLENGE_S:g} s")
        if challenge in self._taken:
            raise not_proven("the challenge has already been used, and a proof is valid for only one call")
        self._take(challenge, now_s)  # a failed proof also uses up the challenge
        own = self._session
        words = _words(CALLER, proof.nonce, challenge, own.key, own.identity.peer_id + proof.peer_id)
        if not verify(proof.peer_id, words, proof.signature):
            raise not_proven(f"the signature was not made by ..{short_id(text(proof.peer_id))} for this peer")
        check_membership(own, proof.membership, proof.peer_id)
        return proof.peer_id

    def _take(self, challenge: bytes, now_s: float) -> None:
        while self._taken and now_s - next(iter(self._taken.values())) > CHALLENGE_S:
            del self._taken[next(iter(self._taken))]
        self._taken[challenge] = now_s

    def _mark(self, given: bytes, nonce: bytes, address: str) -> bytes:
        return blake3(given + nonce + address.encode(), key=self._secret).digest(16)


def check_membership(session: Session, membership: bytes, peer_id: str) -> None:
    """Raise Refused if the run is private and the peer is not invited."""
    if session.invitation:
        try:
            session.invitation.check(membership, peer_id=peer_id, now_s=time.time())
        except NotInvited as error:
            raise Refused(str(error), code=RefuseCode.NOT_INVITED.name, peer=peer_id) from None


def check_name(proven: str, hello: Hello) -> None:
    """Raise CorruptPayload if the peer id in a caller's Hello is not the authenticated one."""
    if proven and hello.peer_id != proven:
        raise CorruptPayload(f"the caller is ..{short_id(proven)} but claims to be another peer", peer=proven)


def _words(role: bytes, nonce: bytes, challenge: bytes, session_key: bytes, ids: str) -> bytes:
    """Return the bytes to sign. They are unambiguous because all parts but the last, and the peer ids in the last part,
    have a fixed length.
    """
    return role + nonce + challenge + session_key + ids.encode()


def not_proven(sentence: str) -> Refused:
    return Refused(f"caller authentication failed: {sentence}", code=RefuseCode.NOT_PROVEN.name, retry_after_s=1.0)
