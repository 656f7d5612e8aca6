"""Makes the executor of a configuration with several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.engine import DeviceConfig
from quire.config.parallel import ParallelConfig
from quire.engine.executor import Executor
from quire.runtime.executor.links import ProcessLauncher, RankLauncher
from quire.runtime.executor.ranked import RankedExecutor, RankJob
from quire.runtime.loading.progress import Progress


def make_executor(job: RankJob, progress: Progress | None) -> Executor:
    """Start the ranks and load the model. Raises ConfigError, ModelLoadError or EngineDead."""
    config, launcher = job.config, None
    if config.parallel.executor == "torchrun":
        from quire.runtime.executor.torchrun import TorchrunExecutor

        return TorchrunExecutor(job, progress)
    if config.parallel.executor == "ray":
        from quire.runtime.executor.ray_ranks import RayLauncher

        launcher = RayLauncher(config.parallel, on_gpus=config.device.device != "cpu")
    chosen: RankLauncher = launcher or ProcessLauncher(config.parallel, devices_of(config.device, config.parallel))
    return RankedExecutor(job, chosen, progress=progress)


def devices_of(device: DeviceConfig, parallel: ParallelConfig) -> Sequence[int] | None:
    """Return the GPU of each rank of this machine, or None if all ranks use the device that the configuration names."""
    return range(parallel.num_ranks) if device.device == "cuda" else None
