"""The engine's own refusals, made at the edge: a request that waits in line will not be turned away at its end."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import cast

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import PolicyName
from quire.engine.submission import check_answer_size, check_request
from quire.serving.process.link import EngineReady
from quire.types.request import Submit


def check_door(engine: EngineReady, submits: Iterable[Submit]) -> None:
    """Raise InvalidRequest for what the engine would refuse. An engine that restarts with other sizes may differ."""
    cache_config, scheduler = _sections(engine)
    for submit in submits:
        check_request(submit, cache_config, scheduler, engine.vocab_size, has_text=True)
        check_answer_size(submit, scheduler, engine.vocab_size)


@lru_cache(maxsize=4)
def _sections(engine: EngineReady) -> tuple[CacheConfig, SchedulerConfig]:
    scheduler = SchedulerConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        policy=cast("PolicyName", engine.policy),
    )
    return CacheConfig(engine.block_size, engine.num_blocks), scheduler
