"""Sums over NCCL inside captured graphs, with the one rank that a single GPU has room for. An engine of one rank sums
nothing: here its worker is told to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreter import HAS_TRITON
from quire.config.model import Experts, Heads
from quire.runtime.parallel.group import TorchGroup
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.worker.decode_graphs import DecodeGraphs
from tiny_models import DEVICE, family_checkpoint, tiny_config
from worker_executor import TinyEngine

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not HAS_TRITON, reason="no triton"),
    pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="NCCL needs a GPU: set QUIRE_TEST_DEVICE=cuda"),
]


@pytest.fixture
def summing() -> Iterator[Ranks]:
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield replace(ALONE, tensor=TorchGroup([0], "nccl", 60.0))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gemma3_text"])
def test_captured_sums_give_the_tokens_of_a_worker_without_sums(name: str, summing: Ranks) -> None:
    more: dict[str, Any] = {"experts": Experts(4, 2, 32)} if name == "mixtral" else {}
    model = tiny_config(name, heads=Heads(4, 2, 16), hidden_size=64, num_layers=2, **more)
    checkpoint, prompts = family_checkpoint(model), [[5, 9, 2, 11, 7], [4, 17]]
    alone, summed = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=16, rows=2, max_len=64, ranks=ranks)
        for ranks in (ALONE, summing)
    )
    assert summed.answers(prompts, max_tokens=12) == alone.answers(prompts, max_tokens=12)
    graphs = summed.executor.worker._graphs
    assert isinstance(graphs, DecodeGraphs)
    assert graphs._graphs
