"""The frames of the TCP transport, and the greeting in which both ends prove that they know the token. A frame is a
header of fixed size with its kind and length, followed by that many bytes. Nothing is unpickled."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from typing import NamedTuple

from quire.runtime.transport.base import TransportError, seconds_left
from quire.runtime.transport.sealed import KEY_BYTES, SEAL_BYTES

HEAD = struct.Struct("<4sBQ")  # magic, kind, bytes that follow
MAGIC = b"QKT1"
HELLO, PROOF, WELCOME, HAS, GET, FOUND, BLOCK, MISSING = range(8)
NONCE_BYTES = 32
MAX_KEYS = 1 << 16  # per HAS frame: a million tokens with blocks of 16
GREETING_SECONDS = 2.0


class Frame(NamedTuple):
    kind: int
    body: bytes


def send(sock: socket.socket, kind: int, parts: tuple[bytes | memoryview, ...], deadline: float, peer: str) -> None:
    """Send one frame. Raises TransportError."""
    head = HEAD.pack(MAGIC, kind, sum(len(part) for part in parts))
    try:
        for part in (head, *parts):
            sock.settimeout(seconds_left(deadline, peer))
            sock.sendall(part)
    except OSError as error:
        raise _broken(error, peer) from error


def receive_head(sock: socket.socket, deadline: float, peer: str) -> tuple[int, int]:
    """Receive the header of a frame. Returns its kind, and how many bytes follow. Raises TransportError."""
    head = bytearray(HEAD.size)
    receive_into(sock, memoryview(head), deadline, peer)
    magic, kind, length = HEAD.unpack(head)
    if magic != MAGIC:
        raise TransportError("io", f"{peer} does not speak this protocol")
    return kind, length


def receive(sock: socket.socket, most: int, deadline: float, peer: str) -> Frame:
    """Receive one frame of at most `most` bytes. Raises TransportError."""
    kind, length = receive_head(sock, deadline, peer)
    if length > most:
        raise TransportError("io", f"{peer} sent {length} bytes, but at most {most} are expected")
    body = bytearray(length)
    receive_into(sock, memoryview(body), deadline, peer)
    return Frame(kind, bytes(body))


def receive_into(sock: socket.socket, data: memoryview, deadline: float, peer: str) -> None:
    try:
        while len(data):
            sock.settimeout(seconds_left(deadline, peer))
            count = sock.recv_into(data)
            if not count:
                raise TransportError("io", f"{peer} closed the connection")
            data = data[count:]
    except OSError as error:
        raise _broken(error, peer) from error


def _broken(error: OSError, peer: str) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportError("timeout", f"{peer} did not answer in time")
    return TransportError("io", f"the connection to {peer} failed: {error}")


def greet(sock: socket.socket, token: bytes, deadline: float, peer: str) -> None:
    """Greet a server. Both ends prove that they know the token without sending it. Raises TransportError."""
    mine = secrets.token_bytes(NONCE_BYTES)
    send(sock, HELLO, (mine,), deadline, peer)
    kind, body = receive(sock, 2 * NONCE_BYTES, deadline, peer)
    theirs, proof = body[:NONCE_BYTES], body[NONCE_BYTES:]
    if kind != HELLO or not hmac.compare_digest(proof, _proof(token, b"server", mine, theirs)):
        raise TransportError("io", f"{peer} has another kv_token_file")
    send(sock, PROOF, (_proof(token, b"client", mine, theirs),), deadline, peer)
    if receive(sock, 0, deadline, peer).kind != WELCOME:
        raise TransportError("io", f"{peer} does not speak this protocol")


def answer_greeting(sock: socket.socket, token: bytes, deadline: float, peer: str) -> None:
    """Greet a client. Raises TransportError if it does not know the token."""
    kind, theirs = receive(sock, NONCE_BYTES, deadline, peer)
    if kind != HELLO or len(theirs) != NONCE_BYTES:
        raise TransportError("io", f"{peer} does not speak this protocol")
    mine = secrets.token_bytes(NONCE_BYTES)
    send(sock, HELLO, (mine, _proof(token, b"server", theirs, mine)), deadline, peer)
    kind, proof = receive(sock, NONCE_BYTES, deadline, peer)
    if kind != PROOF or not hmac.compare_digest(proof, _proof(token, b"client", theirs, mine)):
        raise TransportError("io", f"{peer} has another kv_token_file")
    send(sock, WELCOME, (), deadline, peer)


def _proof(token: bytes, side: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, b"quire kv " + side + client + server, "sha256")


def split_keys(body: bytes) -> list[bytes]:
    """Return the keys of a HAS or GET. Raises TransportError if the size is not a multiple of a key's."""
    if len(body) % KEY_BYTES:
        raise TransportError("io", f"the size of the keys is not a multiple of {KEY_BYTES} bytes")
    return [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]


def block_frame_bytes(block_bytes: int) -> int:
    """Return how many bytes follow the header of a BLOCK frame."""
    return SEAL_BYTES + block_bytes
