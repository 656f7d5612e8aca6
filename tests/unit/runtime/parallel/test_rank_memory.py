"""A rank holds its share of weights and KV cache, and reads no more of the files."""

from __future__ import annotations

import gc
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from family_bench import hf_checkpoint
from quire.config.model import Heads, Rope
from quire.config.parallel import ParallelConfig
from quire.config.weight_memory import weight_memory
from quire.runtime.hardware import detect_hardware
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model, count_rank_weights
from quire.runtime.parallel.group import ONE_RANK, OneRank
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.worker.worker import Worker
from tiny_models import GreedySampler, engine_config, random_checkpoint, tiny_config

SIZES: dict[str, Any] = {  # whose quarters fill the panels that compiled kernels pack weights into
    "vocab_size": 1536, "hidden_size": 192, "intermediate_size": 768, "heads": Heads(num_query=8, num_kv=4, dim=48),
    "rope": Rope(max_position=64),
}  # fmt: skip


class Silent(OneRank):
    """The group of a rank whose layers are loaded and not run."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


def ranks_of(size: int) -> list[Ranks]:
    if size == 1:
        return [ALONE]
    return [Ranks(ParallelConfig(tensor=size).place(rank), Silent(rank, size), ONE_RANK) for rank in range(size)]


def held_bytes(root: object) -> int:
    """Of all tensors and arrays that can be reached from an object."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    todo = [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray):
            storages[each.ctypes.data] = each.nbytes
        if isinstance(each, types.FunctionType):
            todo += each.__closure__ or ()
        else:
            todo += gc.get_referents(each)
    return sum(storages.values())


@pytest.mark.parametrize("attention", ["gather", "auto"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_share_of_weights_and_cache(attention: str, tied: bool, size: int) -> None:
    config = tiny_config(**SIZES, tie_word_embeddings=tied)
    checkpoint, engine = random_checkpoint(config), engine_config()
    weights, caches = [], []
    for ranks in (*ranks_of(1), *ranks_of(size)):
        device = replace(engine.device, attention_backend=attention)
        builder = LayerBuilder(device, config.heads, 4, ranks=ranks)
        model = build_model(config, builder)
        load_weights(model, checkpoint)
        weights.append(held_bytes(model))
        caches.append(Worker(model, builder.backend, GreedySampler(), config, engine, ranks=ranks).cache.blocks.nbytes)
    assert all(own * size == caches[0] for own in caches[1:])
    assert weights[0] >= 4 * config.weights.parameters
    assert all(own * size == pytest.approx(weights[0], rel=0.05) for own in weights[1:])


def test_the_counted_weights_of_a_rank_equal_its_weights() -> None:
    config = tiny_config(**SIZES)
    counted = count_rank_weights(config, ParallelConfig(tensor=2)).rank_weights
    assert counted is not None
    model = build_model(config, LayerBuilder(engine_config().device, config.heads, 4, ranks=ranks_of(2)[0]))
    load_weights(model, random_checkpoint(config))
    assert held_bytes(model) == pytest.approx(4 * counted.parameters, rel=0.02)


def test_random_weights_take_the_memory_planned_for_a_checkpoint_of_their_dtype() -> None:
    """Weights of a bfloat16 checkpoint are held in two bytes where rows are float32, and noise in place of them too."""
    config = tiny_config(**SIZES, dtype="bfloat16", tie_word_embeddings=True)
    device = engine_config().device
    planned = weight_memory(config, engine_config(), detect_hardware(), has_triton=False)
    held = []
    for dtype in (torch.bfloat16, None):
        model = build_model(config, LayerBuilder(device, config.heads, 4))
        randomize_weights(model, 3, dtype)
        held.append(held_bytes(model))
    assert held[0] == pytest.approx(planned, rel=0.05)
    if planned < 4 * config.num_parameters:  # by the CPU
        assert held[1] > 1.2 * planned


def test_random_weights_are_the_same_on_any_number_of_ranks() -> None:
    config = tiny_config(**SIZES)

    def noise(ranks: Ranks) -> BaseModel:
        device = replace(engine_config().device, attention_backend="reference")
        model = build_model(config, LayerBuilder(device, config.heads, 4, ranks=ranks))
        randomize_weights(model, seed=3)
        return model

    whole, parts = noise(ALONE), [noise(ranks) for ranks in ranks_of(2)]
    tables = [model.embedding.weight for model in (whole, *parts)]
    assert torch.equal(torch.cat(tables[1:]), tables[0])
    states = torch.randn(3, config.hidden_size)
    together = torch.cat([part.head_logits(states) for part in parts], dim=1)
    torch.testing.assert_close(together, whole.head_logits(states))


class ReadBytes(TorchDispatchMode):
    """Counts what operations read of some memory; views read nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[range] = []
        self.count = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        found = {out.untyped_storage().data_ptr()} if isinstance(out, Tensor) else set()
        for each in args:
            is_read = isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in found
            if is_read and any(each.data_ptr() in span for span in self.spans):
                self.count += each.nbytes
        return out


def _noted(counter: ReadBytes, whole: Tensor, own: Any) -> Tensor:
    counter.spans.append(range(whole.data_ptr(), whole.data_ptr() + whole.nbytes))
    found: Tensor = own(whole)
    return found


def test_a_rank_reads_its_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    path = hf_checkpoint(tmp_path, transformers.LlamaConfig(**settings, **heads))
    total = (path / "model.safetensors").stat().st_size
    counts = []
    for ranks in (*ranks_of(1), *ranks_of(2)):
        checkpoint, counter = open_checkpoint(files_at(path)), ReadBytes()
        read = checkpoint.read
        config = checkpoint.config

        def noted(name: str, *given: Any, read: Any = read, counter: ReadBytes = counter) -> Tensor:
            tensor: Tensor = read(name, lambda whole: _noted(counter, whole, given[0]))
            return tensor

        monkeypatch.setattr(checkpoint, "read", noted)
        model = build_model(config, LayerBuilder(engine_config().device, config.heads, 4, ranks=ranks))
        with counter:
            load_weights(model, checkpoint)
        counts.append(counter.count)
    assert counts[0] > total
    assert all(own * 2 == pytest.approx(counts[0], rel=0.05) for own in counts[1:])
