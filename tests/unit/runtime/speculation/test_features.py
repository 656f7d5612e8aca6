"""The features that draft heads read belong to the memory of the cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from quire.config.engine import CacheConfig
from quire.runtime.speculation.features import BlockFeatures
from quire.runtime.standby.memory import HostMemory, using_memory


class NotedMemory(HostMemory):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def holding(self, kind: str) -> AbstractContextManager[None]:
        self.kinds.append(kind)
        return nullcontext()


def test_features_are_given_back_with_the_cache_while_an_engine_sleeps() -> None:
    memory = NotedMemory()
    with using_memory(memory):
        features = BlockFeatures(CacheConfig(16, 1_024), 64, torch.float32, torch.device("cpu"))
    assert memory.kinds == ["kv_cache"]
    features._lines.fill_(1.0)
    memory.sleep("kv_cache", keeps=False)
    assert features._lines.mean() < 0.01
    memory.close()
