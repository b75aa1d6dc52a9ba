"""How the two ends of a link prove to each other that they know the cluster key. Part of the handshake.

    P  HELLO ->        with `hmac-sha256` among its capabilities
    D  <- CHALLENGE    the version to speak, a nonce
    P  PROOF ->        a nonce of its own, and its MAC
    D  <- PROOF        its MAC
    D  <- WELCOME

Both MACs cover the whole HELLO (versions, both identities, model, layout, transport), the whole CHALLENGE and P's
nonce, and each says whose it is. So nothing of it can be replayed, reflected, used for another pair, or talked down to
an older version. D maps and allocates nothing before it has seen P's.

What follows is not protected: whoever can change bytes on the way needs no key.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from engine.cluster_key import ClusterKey
from engine.errors import HandshakeRefused, LinkClosed, ProtocolError
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import NONCE_BYTES, Challenge, Frame, Hello, Proof, encode

CAPABILITY = "hmac-sha256"
_PREFILL, _DECODE = b"prefill", b"decode"


class ProofLacking(Exception):
    """The prefill worker cannot prove that it knows the key; the message says how."""


def demand(connection: FrameSocket, key: ClusterKey, hello: Hello, protocol: int) -> None:
    """D's side, in answer to `hello`. Raises `ProofLacking`; `LinkClosed` and `ProtocolError` of the connection."""
    if CAPABILITY not in hello.capabilities:
        raise ProofLacking(
            f"a cluster key is set here, and {hello.worker_id} (protocol {hello.protocol}) offers no proof of it"
        )
    challenge = Challenge(protocol=protocol, nonce=secrets.token_bytes(NONCE_BYTES))
    connection.send(encode(challenge))
    proof = connection.receive()
    if proof is None:
        raise LinkClosed("no PROOF in time")
    if not isinstance(proof, Proof):
        raise ProtocolError(f"the answer to CHALLENGE is {type(proof).__name__}")
    if not hmac.compare_digest(proof.mac, _mac(key, _PREFILL, hello, challenge, proof.nonce)):
        raise ProofLacking(f"{hello.worker_id} has another cluster key")
    connection.send(encode(Proof(nonce=challenge.nonce, mac=_mac(key, _DECODE, hello, challenge, proof.nonce))))


def answer(connection: FrameSocket, key: ClusterKey, hello: Hello, challenge: Challenge) -> Frame | None:
    """P's side: prove, and have it proved. Returns the frame that follows, a refusal of ours included.

    Raises `HandshakeRefused` if the peer does not know the key.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(encode(Proof(nonce=nonce, mac=_mac(key, _PREFILL, hello, challenge, nonce))))
    proof = connection.receive()
    if not isinstance(proof, Proof):
        return proof
    if not hmac.compare_digest(proof.mac, _mac(key, _DECODE, hello, challenge, nonce)):
        raise HandshakeRefused(f"{hello.target_worker_id} does not know the cluster key")
    return connection.receive()


def _mac(key: ClusterKey, prover: bytes, hello: Hello, challenge: Challenge, nonce: bytes) -> bytes:
    # Each part says its length, or has a fixed one: no two handshakes have the same text.
    text = b"kvrelay link %d " % len(prover) + prover + encode(hello) + encode(challenge) + nonce
    return hmac.digest(key.secret, text, sha256)
