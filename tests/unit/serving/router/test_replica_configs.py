"""How the settings of one server are divided among its replicas."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.arguments import EngineArguments
from quire.config.keys import KeySources
from quire.config.server import AccessConfig, ListenConfig, ModelSource, ServerConfig
from quire.serving.http.key_ring import KeyRing
from quire.serving.router.replica_configs import gpu_shares, replica_config, visible_gpus, with_router_key
from quire.serving.router.replicated import ReplicatedServer
from quire.types.errors import ConfigError


def config(replicas: int = 2, **engine: Any) -> ServerConfig:
    return ServerConfig(source=ModelSource(model="m"), engine=EngineArguments(**engine), replicas=replicas)


def test_threads_are_divided_unless_they_are_given(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert replica_config(config(2), 0, tmp_path).engine.threads == max(1, cores // 2)
    assert replica_config(config(2, threads=7), 1, tmp_path).engine.threads == 7


def test_every_replica_has_folders_and_a_socket_of_its_own(tmp_path: Path) -> None:
    given = replace(config(disk_cache_path=str(tmp_path / "disk"), record=str(tmp_path / "run")),
                    files_dir=str(tmp_path / "files"), listen=ListenConfig(root_path="/llm", tls_cert="x"))  # fmt: skip
    one, other = (replica_config(given, place, tmp_path) for place in (0, 1))
    for field in ("files_dir", "listen"):
        assert getattr(one, field) != getattr(other, field)
    assert one.engine.disk_cache_path == str(tmp_path / "disk/replica-0")
    assert other.engine.record == str(tmp_path / "run.1")
    assert (tmp_path / "files/replica-1/files").is_dir()
    assert (one.listen.root_path, one.listen.tls_cert, one.replicas) == ("/llm", None, 1)


def test_gpus_are_dealt_in_turn() -> None:
    assert gpu_shares(config(3), ["0", "1", "2"]) == [{"CUDA_VISIBLE_DEVICES": name} for name in "012"]
    shared = gpu_shares(config(3, gpu_memory_utilization=0.4), ["4", "5"])
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shared] == ["4", "5", "4"]
    assert gpu_shares(config(2, device="cpu"), ["0"]) == [{}, {}]
    assert gpu_shares(config(2), []) == [{}, {}]


def test_replicas_that_would_fill_the_same_gpu_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas: .* need 2, 1 are visible; .*--gpu-memory-utilization 0.45"):
        gpu_shares(config(2), ["0"])


def test_the_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc,-1")
    assert visible_gpus() == ["2", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_an_admin_listener_of_its_own_is_refused() -> None:
    given = replace(config(), listen=ListenConfig(admin_port=9000))
    with pytest.raises(ConfigError, match="admin_port: cannot be given together with replicas"):
        ReplicatedServer(given, keys=KeySources())


def test_the_routers_own_key_opens_a_replica_and_is_no_clients() -> None:
    sources = KeySources(api_keys=("ann", "bob"), admin_keys=("admin",))
    given = replace(config(), access=AccessConfig(**sources.digests()._asdict()))
    keys, (replica,) = with_router_key(sources, [given], "own")
    assert keys.digests()._asdict().items() <= asdict(replica.access).items()
    ring = KeyRing(replica.access)
    assert ring.owner({b"authorization": b"Bearer own"}, is_admin=False) is not None
    assert ring.client_digests == sources.digests().key_digests
