"""Which steps are captured on a GPU: by their number of rows when all decode, by their number of tokens otherwise."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig

GRAPH_ROWS = 1024  # decode rows of the largest graph
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, GRAPH_ROWS)
# Up to so many tokens, buckets lie so far apart: what padding wastes is small beside the step.
_TOKEN_BUCKETS = ((64, 16), (512, 64), (2048, 128), (8192, 512))
_LAUNCH_SECONDS = 600e-6  # of a layer that is launched kernel by kernel: twice what a quiet host beside an H200 takes
_FLOPS = 6e14  # of its products in large steps


def row_buckets(num_rows: int) -> tuple[int, ...]:
    """The numbers of decode rows that graphs are made for, where there are never more than `num_rows`."""
    return (*(bucket for bucket in _ROW_BUCKETS if bucket < num_rows), min(num_rows, GRAPH_ROWS))


def token_buckets(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    """The numbers of tokens that other steps are padded to and captured for: as long as launching their kernels would
    take longer than running them."""
    seconds_per_token = 2 * model.num_parameters / _FLOPS
    worth = model.num_layers * _LAUNCH_SECONDS / seconds_per_token
    most = min(int(worth), config.scheduler.max_num_batched_tokens)
    found, last = [], 0
    for limit, gap in _TOKEN_BUCKETS:
        found += [bucket for bucket in range(last + gap, limit + 1, gap) if bucket - gap < most]
        last = limit
    return tuple(found)
