"""Makes the groups of this process's rank by torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.config.parallel import ParallelConfig, RankPlace
from quire.runtime.parallel.counted import CountedGroup, Counter
from quire.runtime.parallel.group import ONE_RANK, RankGroup, TorchGroup
from quire.runtime.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_JOINING_SECONDS = 300.0  # from the start of the first rank to that of the last


def backend_of(device: torch.device, *, shares_device: bool = False) -> str:
    """Return the torch.distributed backend: NCCL if each rank has a GPU, else Gloo."""
    return "gloo" if device.type == "cpu" or shares_device else "nccl"


def join_ranks(
    place: RankPlace, store: Store, backend: str, seconds: float, counter: Counter, *, on_cpu: bool
) -> Ranks:
    """Meet the other ranks through a store, and make the groups. Called once by every rank's process. `seconds` is the
    timeout of every wait for another rank except the first one, since ranks may start at different times. A rank
    without others joins no group."""
    import torch.distributed as dist

    config = place.config
    if config.num_ranks == 1:
        return Ranks(place, ONE_RANK, ONE_RANK)
    limit = timedelta(seconds=max(seconds, _JOINING_SECONDS))
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=config.num_ranks, timeout=limit, device_id=device
    )
    return make_ranks(place, backend, seconds, counter, store if on_cpu else None)


def make_ranks(place: RankPlace, backend: str, seconds: float, counter: Counter, store: Store | None = None) -> Ranks:
    """Make the groups of a rank whose process has met the others. With a `store` (for CPUs), ranks of a stage share
    memory if they are on one machine."""
    config = place.config
    stages = [range(stage * config.tensor, (stage + 1) * config.tensor) for stage in range(config.pipeline)]
    shards = [range(shard, config.num_ranks, config.tensor) for shard in range(config.tensor)]
    tensor = _own_group(stages, place.rank, backend, seconds, counter)
    if store is not None and config.tensor > 1:
        shared = _share_memory(place, store, seconds)
        tensor = tensor if shared is None else CountedGroup(shared, counter)
    pipeline, tokens = (_own_group(shards, place.rank, backend, seconds, counter) for _ in range(2))
    return Ranks(place, tensor, pipeline, tokens)


def _own_group(groups: list[range], rank: int, backend: str, seconds: float, counter: Counter) -> RankGroup:
    """Make all these groups, as every rank of the world must, and return the one that contains `rank`. Groups of one
    rank are ONE_RANK."""
    import torch.distributed as dist

    own: RankGroup = ONE_RANK
    for members in groups:
        if len(members) == 1:
            continue
        if rank in members:
            own = CountedGroup(TorchGroup(members, backend, seconds), counter)
        else:
            dist.new_group(list(members), timeout=timedelta(seconds=seconds), backend=backend)
    return own


def _share_memory(place: RankPlace, store: Store, seconds: float) -> RankGroup | None:
    """Return the shared-memory group of a stage, or None on all of its ranks if one of them cannot share memory. The
    first rank makes an anonymous file, and the others open it through that process's /proc folder."""
    from quire.kernels.native.loader import why_not_native

    config, first = place.config, place.rank - place.shard
    ranks = range(first, first + config.tensor)
    able = why_not_native(torch.float32, torch.device("cpu")) is None and hasattr(os, "memfd_create")
    store.set(f"machine {place.rank}", _machine() if able else f"none {place.rank}")
    if len({store.get(f"machine {rank}") for rank in ranks}) > 1:
        return None
    from quire.runtime.parallel.shared_group import SharedGroup, make_shared_memory

    if place.shard == 0:
        descriptor = make_shared_memory(config.tensor)
        store.set(f"memory {place.stage}", f"/proc/{os.getpid()}/fd/{descriptor}")
    else:
        descriptor = os.open(store.get(f"memory {place.stage}").decode(), os.O_RDWR | os.O_CLOEXEC)
    return SharedGroup(descriptor, place.shard, config.tensor, seconds)  # the first rank's stays open for the others


def _machine() -> str:
    """Return an identifier of this machine and its PID namespace. Processes with the same one can open each other's
    files under /proc."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def ranks_share_device(config: ParallelConfig, device: str) -> bool:
    """Whether all ranks use one GPU: the configured device has an index, such as "cuda:0"."""
    return config.num_ranks > 1 and device.startswith("cuda:")
