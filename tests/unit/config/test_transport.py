"""The settings of prefill / decode disaggregation: what is read, and what is refused with field, reason and fix."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.parallel import ParallelConfig
from quire.config.sizes import GIB, MIB
from quire.config.transport import TransportConfig, check_transport
from quire.types.errors import ConfigError

SHM: dict[str, Any] = {"kv_role": "prefill", "kv_transport": "shm://kv"}
TCP: dict[str, Any] = {"kv_role": "decode", "kv_transport": "tcp://127.0.0.1:7000"}


def read(**settings: Any) -> TransportConfig | None:
    return read_arguments(EngineArguments(**settings)).tiers.transport


def test_roles_and_transports_are_read() -> None:
    assert read() is None
    assert read(**SHM) == TransportConfig("prefill", "kv", memory=GIB)
    assert read(**SHM | {"kv_transport_memory": "64MiB"}) == TransportConfig("prefill", "kv", memory=64 * MIB)
    assert read(**TCP) == TransportConfig("decode", "", (("127.0.0.1", 7000),))
    several = read(kv_role="decode", kv_transport="tcp://localhost:1,tcp://[::1]:2")
    assert several is not None
    assert several.addresses == (("localhost", 1), ("::1", 2))
    remote = read(**TCP | {"kv_transport": "tcp://10.0.0.7:7000", "kv_token_file": "token"})
    assert remote == TransportConfig("decode", "", (("10.0.0.7", 7000),), token_file="token")


def test_a_role_that_puts_writes_through_host_memory_and_there_is_some() -> None:
    tiers = [
        read_arguments(EngineArguments(**given)).tiers for given in (SHM, TCP, SHM | {"host_cache_memory": "2GiB"})
    ]
    assert [(each.write, each.host_blocks) for each in tiers] == [("through", GIB), ("back", GIB), ("through", 2 * GIB)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_role": "prefill"}, "kv_transport: is missing, and kv_role is given; add shm://NAME or tcp://HOST:PORT"),
        (
            {"kv_transport": "shm://kv"},
            "kv_role: is missing, and kv_transport is given; add one of prefill, decode, both",
        ),
        ({"kv_token_file": "x"}, "kv_token_file: has no effect without kv_transport"),
        ({"kv_transport_memory": "1GiB"}, "kv_transport_memory: has no effect without kv_transport"),
        (SHM | {"kv_role": "kv_producer"}, "kv_role: 'kv_producer' is unknown; use one of prefill, decode, both"),
        (SHM | {"kv_transport": "shm://../x"}, "kv_transport: '../x' is no name of shared memory"),
        (SHM | {"kv_transport": "nixl://x"}, "kv_transport: 'nixl://x' is unknown; use shm://NAME or tcp://HOST:PORT"),
        (SHM | {"kv_token_file": "x"}, "kv_token_file: is for tcp://"),
        (TCP | {"kv_transport": "tcp://127.0.0.1"}, "kv_transport: tcp://127.0.0.1 is no address"),
        (TCP | {"kv_transport": "tcp://127.0.0.1:70000"}, "kv_transport: port 70000 is above 65535"),
        (TCP | {"kv_transport": "tcp://127.0.0.1:0"}, "kv_transport: port 0 is no port of a peer"),
        (TCP | {"kv_transport": "tcp://10.0.0.7:7"}, "kv_transport: 10.0.0.7 can be reached from other machines"),
        (TCP | {"kv_role": "both"}, 'kv_role: "both" needs a store'),
        (
            {"kv_role": "prefill", "kv_transport": "tcp://127.0.0.1:1,tcp://127.0.0.1:2"},
            "kv_transport: a prefill engine listens at one address, got 2",
        ),
        (SHM | {"tier_write": "back"}, 'tier_write: "back" saves blocks when they are evicted, too late for kv_role'),
        (SHM | {"enable_prefix_caching": False}, "kv_transport: shares cached prompts with other engines, and"),
        (SHM | {"record": "run.jsonl"}, "record: cannot be replayed with kv_transport"),
        (SHM | {"swap_space": 0}, "kv_transport: needs host_cache_memory"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(**given)


RANKS = ParallelConfig(2, 2, executor="processes")


def test_every_rank_has_shared_memory_or_a_port_of_its_own() -> None:
    shared, tcp = TransportConfig("both", "kv"), TransportConfig("decode", "", (("a", 7000), ("b", 8000)))
    assert [shared.of_rank(rank).name for rank in range(3)] == ["kv", "kv~1", "kv~2"]
    assert tcp.of_rank(0) is tcp
    assert tcp.of_rank(3).addresses == (("a", 7003), ("b", 8003))
    assert tcp.of_rank(3).name == ""


@pytest.mark.parametrize(
    ("port", "parallel", "message"),
    [
        (65_533, RANKS, "consecutive ports, and 65533 is given as the first one; give a port in [1, 65532]"),
        (0, RANKS, "kv_transport: 4 ranks need as many consecutive ports, and 0 is given"),
        (7, replace(RANKS, executor="ray"), "kv_transport: needs all ranks of an engine on one machine"),
    ],
)  # fmt: skip
def test_ranks_without_a_transport_of_their_own_are_refused(port: int, parallel: ParallelConfig, message: str) -> None:
    transport = TransportConfig("prefill", "", (("127.0.0.1", port),))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_transport(transport, parallel)
    check_transport(transport, replace(parallel, tensor=1, pipeline=1))
    check_transport(replace(transport, addresses=(("127.0.0.1", 65_532),)), RANKS)
