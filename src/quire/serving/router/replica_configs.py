"""Divides one server's settings among its replicas: threads, GPUs, folders and sockets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.config.environment import child_environment
from quire.config.keys import KeySources
from quire.config.server import ListenConfig, ServerConfig
from quire.types.errors import ConfigError

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def replica_config(config: ServerConfig, place: int, directory: Path) -> ServerConfig:
    """Return the settings of one replica: its UNIX socket in `directory`, its threads, and separate folders. Raises
    ConfigError if a folder cannot be made."""
    name, engine = f"replica-{place}", config.engine
    changes: dict[str, object] = {}
    if engine.threads is None:
        changes["threads"] = max(1, len(os.sched_getaffinity(0)) // config.replicas)
    if engine.disk_cache_path is not None:
        changes["disk_cache_path"] = _folder(Path(engine.disk_cache_path).expanduser() / name)
    if engine.record is not None:
        changes["record"] = f"{engine.record}.{place}"
    files = None if config.files_dir is None else _folder(Path(config.files_dir) / name)
    if files is not None:
        _folder(Path(files) / "files")
    listen = ListenConfig(uds=str(directory / f"{name}.sock"), root_path=config.listen.root_path)
    return replace(
        config,
        engine=replace(engine, **changes),  # type: ignore[arg-type]
        listen=listen,
        files_dir=files,
        replicas=1,
    )


def with_router_key(
    keys: KeySources, configs: Sequence[ServerConfig], key: str
) -> tuple[KeySources, list[ServerConfig]]:
    """Add `key`, which the router uses for its own requests, to the keys of all replicas. Returns the new key sources
    and configurations. As a router key it belongs to no client, so no prompt is pinned for it."""
    keys = replace(keys, router_keys=(key,))
    digests = keys.digests()._asdict()
    return keys, [replace(config, access=replace(config.access, **digests)) for config in configs]


def _folder(path: Path) -> str:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("replicas", f"{path} cannot be made: {error.strerror}", "choose another folder") from None
    return str(path)


def gpu_shares(config: ServerConfig, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return for each replica the environment variable that assigns its GPUs, round robin, one GPU for each rank.
    Raises ConfigError if there are too few GPUs, or if replicas share a GPU and --gpu-memory-utilization does not leave
    memory for all of them."""
    count = config.replicas
    if not gpus or config.engine.device == "cpu":
        return [{} for _ in range(count)]
    needed = _ranks(config)
    if needed > len(gpus):
        raise ConfigError(
            "tensor_parallel_size", f"one replica needs {needed} GPUs, {len(gpus)} are visible", "lower it"
        )
    share = config.engine.gpu_memory_utilization or 1.0
    on_one_gpu = -(-count * needed // len(gpus))
    if on_one_gpu > 1 and share * on_one_gpu > 1.0:
        reason = f"{count} replicas of {needed} GPUs need {count * needed}, {len(gpus)} are visible"
        fix = f"lower it, or let them share a GPU with --gpu-memory-utilization {0.9 / on_one_gpu:.2f}"
        raise ConfigError("replicas", reason, fix)
    return [
        {GPU_VARIABLE: ",".join(gpus[(place * needed + rank) % len(gpus)] for rank in range(needed))}
        for place in range(count)
    ]


def _ranks(config: ServerConfig) -> int:
    """Return the ranks of one engine: tensor parallel size times pipeline stages."""
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        ranks *= getattr(config.engine, name, None) or 1
    return ranks


def visible_gpus() -> list[str]:
    """Return the indices or names of the GPUs that this process may use, without initializing a driver."""
    given = child_environment().get(GPU_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1"]
    return [str(place) for place in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
