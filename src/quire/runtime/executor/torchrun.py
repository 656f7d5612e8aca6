"""Ranks started by torchrun: each of them runs the same script, and so the same engine with its own worker."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch

from quire.config.environment import read_torchrun
from quire.config.parallel import ParallelConfig
from quire.runtime.device import torch_device
from quire.runtime.executor.plan_codec import PlanEncoder
from quire.runtime.executor.rank import config_of_rank
from quire.runtime.executor.ranked import RankJob
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.hardware import detect_hardware
from quire.runtime.loading.progress import Progress
from quire.runtime.parallel.make import backend_of, make_ranks
from quire.types.errors import ConfigError, EngineDead
from quire.types.step import StepPlan

_ROLL_CALL_SECONDS = 3.0  # that a rank may answer later than others when one is missed
_FAILED_RANKS = re.compile(r"Ranks? ([\d, ]+) failed")  # what torch's monitored barrier says on rank 0


class _NoCounter:
    """Implements Counter without counting: torchrun watches its processes itself."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class TorchrunExecutor(SingleExecutor):
    """Implements engine.executor.Executor. All ranks make the same plans, because they get the same requests and read
    the same `clock`. Before every step they compare their plans. No plan is sent."""

    def __init__(self, job: RankJob, progress: Progress | None) -> None:
        import torch.distributed as dist

        config = job.config
        started = read_torchrun()
        check_torchrun(config.parallel, None if started is None else started.num_ranks)
        assert started is not None
        if config.cache.tiers.enabled:
            reason = 'executor="torchrun" does not support tiers: transfers complete at different times on each rank'
            raise ConfigError("host_cache_memory", reason, 'leave it out, or use executor="processes"')
        if config.recording is not None:
            reason = 'every rank has an engine of its own with executor="torchrun"'
            raise ConfigError("record", reason, 'leave it out, or use executor="processes"')
        place = config.parallel.place(started.rank)
        index = started.local_rank if config.device.device == "cuda" else None
        own = config_of_rank(config, place, index, detect_hardware().cores)
        device = torch_device(own.device.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        seconds, backend = config.parallel.rank_timeout, backend_of(device)
        self._owns_world = not dist.is_initialized()  # otherwise the script owns it and may use it further
        if self._owns_world:
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        ranks = make_ranks(place, backend, seconds, _NoCounter())
        self._meeting: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._roll_call: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._encoder, self._now, self._num_ranks = PlanEncoder(), 0.0, config.parallel.num_ranks
        super().__init__(
            job.files,
            job.model,
            own,
            load_format=job.load_format,
            progress=progress if place.rank == 0 else None,
            draft_files=job.draft_files,
            ranks=ranks,
        )

    def clock(self) -> float:
        """Return the time in seconds at which rank 0 launched the last step. It is the same on all ranks."""
        return self._now

    def launch(self, plan: StepPlan) -> None:
        self._agree(plan)
        try:
            super().launch(plan)
        except RuntimeError as error:
            if "gloo" not in str(error).lower():  # an error of this rank alone
                raise
            raise EngineDead(self._name_missing(f"in step {plan.step}", error)) from None

    def _agree(self, plan: StepPlan) -> None:
        """Compare the plan with those of the other ranks. Raises EngineDead if they differ or a rank is gone."""
        import torch.distributed as dist

        digest = blake2b(self._encoder.encode(plan), digest_size=7).digest()
        own = torch.tensor([int.from_bytes(digest, "little"), time.monotonic_ns()])
        found = [torch.empty_like(own) for _ in range(self._num_ranks)]
        try:
            dist.all_gather(found, own, group=self._meeting)
        except RuntimeError as error:
            raise EngineDead(self._name_missing(f"before step {plan.step}", error)) from None
        for rank, theirs in enumerate(found):
            if theirs[0] != found[0][0]:
                reason = f"rank {rank} of {self._num_ranks} planned another step {plan.step} than rank 0"
                raise EngineDead(f"{reason}: all ranks must make the same calls in the same order")
        self._now = float(found[0][1]) / 1e9

    def _name_missing(self, when: str, error: RuntimeError) -> str:
        """Return a text that names the ranks that do not answer any more. Only rank 0 hears all others."""
        import torch.distributed as dist

        limit, why = timedelta(seconds=_ROLL_CALL_SECONDS), f": {' '.join(str(error).split())}"
        try:
            dist.monitored_barrier(group=self._roll_call, timeout=limit, wait_all_ranks=True)
        except RuntimeError as found:
            if (missing := _FAILED_RANKS.search(str(found))) is not None:
                ranks = missing[1].rstrip(", ")
                many = "," in ranks
                head = f"{'ranks' if many else 'rank'} {ranks} of {self._num_ranks} {'are' if many else 'is'} gone or"
                return f"{head} {'hang' if many else 'hangs'} {when}{why}"
            return f"a rank is gone or hangs {when}: rank 0 of {self._num_ranks} names it, or hangs itself{why}"
        return f"a collective failed {when}, and all {self._num_ranks} ranks still answer{why}"

    def close(self) -> None:
        """Release what this executor made. A process group of the script stays."""
        import torch.distributed as dist

        try:
            super().close()
        finally:
            meeting, self._meeting = self._meeting, None
            if meeting is not None:
                self.ranks.close()
                dist.destroy_process_group(self._roll_call)
                dist.destroy_process_group(meeting)
                if self._owns_world:
                    dist.destroy_process_group()


def check_torchrun(config: ParallelConfig, num_started: int | None) -> None:
    """Raise ConfigError unless torchrun has started as many processes as there are ranks."""
    command = f"torchrun --nproc-per-node {config.num_ranks} SCRIPT"
    if num_started is None:
        raise ConfigError("executor", '"torchrun" needs processes that torchrun has started', f"run `{command}`")
    if num_started != config.num_ranks:
        reason = f"torchrun started {num_started} processes, and there are {config.num_ranks} ranks"
        raise ConfigError("tensor_parallel_size", reason, f"run `{command}`")
