"""How an engine is split over ranks: tensor parallel within a layer, pipeline parallel between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.types.errors import ConfigError

ExecutorName = Literal["single", "processes", "ray", "torchrun"]
EXECUTORS: dict[str, ExecutorName] = {  # Quire's names, then those of vLLM
    "single": "single",
    "processes": "processes",
    "ray": "ray",
    "torchrun": "torchrun",
    "uni": "single",
    "mp": "processes",
    "external_launcher": "torchrun",
}
EXECUTOR_NAMES = ("auto", "single", "processes", "ray", "torchrun")
DEFAULT_RANK_TIMEOUT = 60.0
DEFAULT_RANK_LOAD_TIMEOUT = 300.0
MAX_RANKS = 512


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How an engine is split over ranks. `tensor` ranks share every layer; each of `pipeline` stages has some of the
    layers. Ranks are numbered stage by stage, so the ranks of a stage are consecutive."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False  # expert parallel: each rank of a stage has some whole experts instead of a part of each
    executor: ExecutorName = "single"
    rank_timeout: float = DEFAULT_RANK_TIMEOUT  # seconds that the other ranks wait for a rank
    ray_address: str | None = None  # of the Ray cluster; None: the one on this machine, or a new one
    load_timeout: float = DEFAULT_RANK_LOAD_TIMEOUT  # seconds without progress after which a rank's load counts as hung

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> RankPlace:
        return RankPlace(rank, rank % self.tensor, rank // self.tensor, self)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The position of one rank: its stage, and its shard within the stage."""

    rank: int  # among all ranks
    shard: int  # among the ranks of its stage, from 0
    stage: int
    config: ParallelConfig

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.config.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage."""
        return share_of(num_layers, self.stage, self.config.pipeline)


NO_PARALLEL = ParallelConfig()


def share_of(count: int, index: int, size: int, multiple: int = 1) -> range:
    """Return which of `count` consecutive items the index-th of `size` owners gets. Shares begin at multiples of
    `multiple` and differ by at most one multiple; the first ones are larger."""
    units = -(-count // multiple)
    each, more = divmod(units, size)
    begin = index * each + min(index, more)
    end = begin + each + (index < more)
    return range(min(begin * multiple, count), min(end * multiple, count))


_MULTIPLES = (128, 64, 32, 16, 8, 4, 2)  # at which shares begin: sizes of tiles and of groups of quantized weights
_EVEN = 16  # shares of at least this many multiples are nearly equal
_GROUP = 32  # smallest group of quantized weights; a rank with part of a group must expand the matrix
_MOST = 1.1  # limit of largest share / mean share, to keep groups whole


def share_size(count: int, index: int, size: int) -> range:
    """Return a rank's share of an intermediate size or of a vocabulary. Shares begin at a multiple that suits the
    kernels, as long as they stay nearly equal."""
    multiple = next((each for each in _MULTIPLES if count % (each * size) == 0 or count >= _EVEN * each * size), 1)
    if multiple < _GROUP and count % _GROUP == 0 and len(share_of(count, 0, size, _GROUP)) * size <= _MOST * count:
        multiple = _GROUP
    return share_of(count, index, size, multiple)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of a rank: contiguous query heads, and the key/value heads that they read."""

    query: range
    kv: range


def share_heads(num_query: int, num_kv: int, index: int, size: int) -> HeadShare:
    """Return the heads of the index-th of `size` ranks. Raises ValueError if there are fewer query heads than ranks.

    With at least as many key/value heads as ranks, a rank gets whole groups: key/value heads with all their query
    heads. With fewer, several ranks hold the same key/value head and divide its query heads.
    """
    group = num_query // num_kv
    if size <= num_kv:
        kv = share_of(num_kv, index, size)
        return HeadShare(range(kv.start * group, kv.stop * group), kv)
    owner = next(head for head in range(num_kv) if index in share_of(size, head, num_kv))
    ranks = share_of(size, owner, num_kv)
    if len(ranks) > group:
        raise ValueError(f"{num_query} query heads cannot be shared by {size} ranks")
    own = share_of(group, index - ranks.start, len(ranks))
    return HeadShare(range(owner * group + own.start, owner * group + own.stop), range(owner, owner + 1))


def read_parallel(
    tensor: object, pipeline: object, expert: object, executor: object, ray_address: object, rank_timeout: object
) -> ParallelConfig:
    """Parse the settings of ranks. Raises ConfigError for values that are wrong on every machine and with every
    model."""
    for name, value in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", pipeline)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(name, f"must be a whole number, got {value!r:.80}")
        if not 1 <= value <= MAX_RANKS:
            raise ConfigError(name, f"must be in [1, {MAX_RANKS}], got {value}", "one rank per GPU is usual")
    if not isinstance(expert, bool):
        raise ConfigError("enable_expert_parallel", f"must be true or false, got {expert!r:.80}")
    if isinstance(rank_timeout, bool) or not isinstance(rank_timeout, int | float) or not 1 <= rank_timeout <= 86_400:
        raise ConfigError("rank_timeout", f"must be in [1, 86400] s, got {rank_timeout!r:.80}", "leave it out")
    if ray_address is not None and (not isinstance(ray_address, str) or not ray_address.strip()):
        raise ConfigError("ray_address", f"must be a text, got {ray_address!r:.80}", 'use "auto" or "host:port"')
    assert isinstance(tensor, int)
    assert isinstance(pipeline, int)
    name = _read_executor(executor, tensor * pipeline, ray_address)
    config = ParallelConfig(tensor, pipeline, expert, name, float(rank_timeout), ray_address)
    if expert and tensor == 1:
        raise ConfigError("enable_expert_parallel", "shares experts among ranks, and there is one", _MORE_RANKS)
    return config


_MORE_RANKS = "leave it out, or raise tensor_parallel_size"


def _read_executor(given: object, num_ranks: int, ray_address: object) -> ExecutorName:
    if given in (None, "auto"):
        if ray_address is not None:
            raise ConfigError("ray_address", "is for ranks in a Ray cluster", 'add executor="ray", or leave it out')
        return "single" if num_ranks == 1 else "processes"
    found = EXECUTORS.get(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError("executor", f"{given!r:.80} is unknown", f"choose one of {', '.join(EXECUTOR_NAMES)}")
    if found == "single" and num_ranks > 1:
        raise ConfigError("executor", f'"single" has one rank, and {num_ranks} are asked for', "leave it out")
    if found != "ray" and ray_address is not None:
        raise ConfigError("ray_address", f'is for executor="ray", and it is {found!r}', "leave it out")
    return found


def check_parallel(config: ParallelConfig, device: str, num_devices: int, layout: str, is_mixture: bool) -> None:
    """Raise ConfigError for settings that do not work on this machine, together, or with this model."""
    check_devices(config, device, num_devices)
    check_together(config, layout, is_mixture=is_mixture)


def check_devices(config: ParallelConfig, device: str, num_devices: int) -> None:
    """Raise ConfigError if this machine has fewer GPUs than ranks. A device with a number, such as "cuda:0", is shared
    by all ranks, which then communicate over Gloo: slow, for tests."""
    if device != "cuda" or config.executor != "processes" or config.num_ranks <= num_devices:
        return
    name = "tensor_parallel_size" if config.tensor > 1 else "pipeline_parallel_size"
    reason = f"{config.num_ranks} ranks need as many CUDA devices, and {num_devices} were found"
    raise ConfigError(name, reason, f'lower it, or set device="cpu" or device="{device}:0" (shared, for tests)')


def check_together(config: ParallelConfig, layout: str, *, is_mixture: bool) -> None:
    """Raise ConfigError for settings that do not work with several ranks, or with this model."""
    if config.num_ranks > 1 and layout != "paged":
        raise ConfigError("kv_layout", f"{layout!r} is for one rank, and there are {config.num_ranks}", 'use "paged"')
    if config.expert and not is_mixture:
        raise ConfigError("enable_expert_parallel", "the model has no experts", "leave it out")


def check_encoder(config: ParallelConfig) -> None:
    """Raise ConfigError for settings of ranks that do not work with an encoder."""
    if config.pipeline > 1:
        reason = f"is {config.pipeline}, and an encoder is not divided into stages"
        raise ConfigError("pipeline_parallel_size", reason, "leave it out, or raise tensor_parallel_size")
    if config.executor not in ("single", "processes"):
        reason = f"is {config.executor!r}, and the ranks of an encoder are processes of one machine"
        raise ConfigError("executor", reason, "leave it out")
