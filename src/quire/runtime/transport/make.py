"""Builds the KV transport that a configuration asks for."""

from __future__ import annotations

from quire.config.keys import read_key_file
from quire.config.transport import TransportConfig
from quire.runtime.transport.base import KVTransport
from quire.runtime.transport.shared_memory import SharedMemoryTransport
from quire.runtime.transport.tcp_peers import TcpPeer, TcpPeers
from quire.runtime.transport.tcp_store import TcpStore


def make_transport(config: TransportConfig, layout: bytes, block_bytes: int) -> KVTransport:
    """Open a transport. Raises ConfigError if it cannot be used. A peer that is not running yet is not an error."""
    if config.name:
        return SharedMemoryTransport(config.name, config.memory, layout, block_bytes)
    token = read_token(config)
    if config.role == "prefill":
        ((host, port),) = config.addresses
        return TcpStore(host, port, token, config.memory, layout, block_bytes)
    return TcpPeers([TcpPeer(host, port, token, layout) for host, port in config.addresses])


def read_token(config: TransportConfig) -> bytes:
    """Return the secret that both ends know; empty without a file. Raises ConfigError."""
    return read_key_file("kv_token_file", config.token_file)[0].encode() if config.token_file else b""
