"""Which steps are captured on a GPU: by their number of rows when all decode, by their number of tokens otherwise."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig

GRAPH_ROWS = 1024  # decode rows of the largest graph
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, GRAPH_ROWS)
# Up to so many tokens, buckets lie so far apart: what padding wastes is small beside the step.
_TOKEN_BUCKETS = ((64, 16), (512, 64), (2048, 128), (8192, 512))
# Host seconds of a layer that is launched kernel by kernel, and operations a second of its products in large steps.
# Launching a layer takes about 790 us beside an H200 (22 ms for a step of 28 layers), and the next step is planned on
# the same thread: the device idles unless its kernels take longer than both together, about 1.2 ms a layer. With 1,500
# short requests at once and steps that were not captured, it idled for half of the time at 1.5B and for 38 % at 3B.
# Float8 layers have more kernels and faster products.
_LAUNCH_SECONDS, _FLOPS = 1.2e-3, 6e14
_FLOAT8_LAUNCH_SECONDS, _FLOAT8_FLOPS = 1.8e-3, 1.2e15


def row_buckets(num_rows: int) -> tuple[int, ...]:
    """The numbers of decode rows that graphs are made for, where there are never more than `num_rows`."""
    return (*(bucket for bucket in _ROW_BUCKETS if bucket < num_rows), min(num_rows, GRAPH_ROWS))


def token_buckets(model: ModelConfig, config: EngineConfig) -> tuple[int, ...]:
    """The numbers of tokens that other steps are padded to and captured for: as long as launching their kernels would
    take longer than running them."""
    small = config.device.quantization == "fp8"
    flops, seconds = (_FLOAT8_FLOPS, _FLOAT8_LAUNCH_SECONDS) if small else (_FLOPS, _LAUNCH_SECONDS)
    worth = model.num_layers * seconds * flops / (2 * model.num_parameters)
    most = min(int(worth), config.scheduler.max_num_batched_tokens)
    found, last = [], 0
    for limit, gap in _TOKEN_BUCKETS:
        found += [bucket for bucket in range(last + gap, limit + 1, gap) if bucket - gap < most]
        last = limit
    return tuple(found)
