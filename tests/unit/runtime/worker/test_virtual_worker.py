"""The virtual layout under the real engine gives the outputs of the paged layout."""

from __future__ import annotations

import gc
import json
import math
import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.runtime.worker.virtual_cache import VirtualCache
from quire.runtime.worker.virtual_ranges import RowRanges
from quire.types.step import Chunk
from tiny_models import DEVICE, VOCAB, Bench, engine_config, random_checkpoint, tiny_config
from worker_executor import TinyEngine, similar_checkpoint

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="blocks of a tiny model fill no page of a GPU")
CONFIG = tiny_config()
TOKEN = 2 * CONFIG.num_layers * CONFIG.heads.kv_size * 4  # bytes
SIZE = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, TOKEN)  # the smallest block that is whole pages
CHECKPOINT = random_checkpoint(CONFIG)


def engine(layout: str, **settings: Any) -> TinyEngine:
    attention = "virtual" if layout == "virtual" else "auto"
    usual = {"block_size": SIZE, "num_blocks": 64}
    return TinyEngine(CHECKPOINT, layout=layout, attention=attention, **{**usual, **settings})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Some begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(3 * SIZE + 3)]
    cut = [stem[: rng.randrange(len(stem))] if rng.random() < 0.5 else [] for _ in range(count)]
    return [part + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2 * SIZE))] for part in cut]


def both(load: list[list[int]], sampling: dict[str, Any], **settings: Any) -> TinyEngine:
    """The virtual engine, after it said the same as the paged one, from ranges of addresses."""
    paged, virtual = engine("paged", **settings), engine("virtual", **settings)
    assert virtual.answers(load, **sampling) == paged.answers(load, **sampling)
    for name, message in paged.finished.items():
        for one, other in zip(message.samples, virtual.finished[name].samples, strict=True):
            assert len(one.logprobs) == (len(one.token_ids) if "logprobs" in sampling else 0)
            for wanted, found in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
                np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)
    assert ranges_of(virtual).cost.mapped > len(load)
    virtual.executor.worker.check()
    return virtual


def ranges_of(virtual: TinyEngine) -> RowRanges:
    cache = virtual.executor.worker.cache
    assert isinstance(cache, VirtualCache)
    return cache.ranges


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_equal_those_of_the_paged_layout(depth: int) -> None:
    load, length = prompts(8), SIZE + 9
    virtual = both(load, {"max_tokens": length, "logprobs": 2, "temperature": 0.7, "seed": 3}, depth=depth)
    assert [len(message.samples[0].token_ids) for message in virtual.finished.values()] == [length] * 8
    held = sum(-(-(len(prompt) + length - 1) // SIZE) for prompt in load)  # blocks; a last token is never written
    assert ranges_of(virtual).cost.mapped >= held


def test_samples_map_a_shared_prompt_in_their_own_ranges() -> None:
    virtual = both(prompts(4), {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": SIZE + 5}, rows=6)
    assert any(plan.copies for plan in virtual.executor.plans)


def test_prompts_found_in_the_prefix_cache_are_mapped_and_not_computed() -> None:
    load = prompts(10, seed=4)
    virtual = both(load, {"max_tokens": 4})
    again = engine("paged").answers(load, max_tokens=4)
    assert virtual.answers(load, max_tokens=4) == again
    assert virtual.core.stats().prefix_hits > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_resume_with_the_same_tokens(depth: int) -> None:
    settings = {"num_blocks": 10, "max_len": 9 * SIZE, "depth": depth}
    virtual = both(prompts(5, seed=2), {"max_tokens": 3 * SIZE}, **settings)
    assert virtual.core.stats().preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "self_draft", "draft_model"])
def test_drafts_are_made_and_verified_over_the_virtual_layout(method: str) -> None:
    asked = {"method": method} | ({"model": "draft"} if method == "draft_model" else {})
    draft = similar_checkpoint(CHECKPOINT, 0.02) if method == "draft_model" else None
    load = [prompt * 2 for prompt in prompts(5, seed=7)]
    virtual = engine("virtual", num_blocks=96, speculative_config=asked, draft=draft)
    paged = engine("paged", num_blocks=96)
    assert virtual.answers(load, max_tokens=SIZE + 9) == paged.answers(load, max_tokens=SIZE + 9)
    assert virtual.core.stats().drafts > 0


def test_as_many_pages_are_mapped_as_rows_hold_blocks() -> None:
    bench = Bench(CHECKPOINT, engine_config(block_size=SIZE, num_blocks=16, layout="virtual"), attention="virtual")
    cache = bench.worker.cache
    assert isinstance(cache, VirtualCache)
    bench.add(0, list(range(2 * SIZE)))
    bench.run(chunks=[Chunk(0, 0, 2 * SIZE, (0,))])
    assert cache.ranges.num_mapped == 2
    bench.run(decode=[0])
    assert cache.ranges.num_mapped == 3
    bench.add(1, bench.tokens[0], parent=0)
    bench.unshare_tail(1)
    bench.run(decode=[0, 1])
    assert cache.ranges.num_mapped == 6
    bench.release(0)
    bench.run(decode=[1])
    assert cache.ranges.num_mapped == 3
    bench.release(1)
    bench.run()
    bench.add(0, [5])
    bench.run(chunks=[Chunk(0, 0, 1, (0,))])
    assert cache.ranges.num_mapped == 1
    assert cache.ranges.cost.waits == 0


def test_closing_the_llm_releases_all_mappings(tmp_path: Path) -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:quire-kv")

    model, before, answers = write_tiny(tmp_path), mapped(), []
    for layout in ("virtual", "paged"):
        with LLM(
            model,
            kv_layout=layout,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            device="cpu",
            block_size=SIZE,
            num_kv_blocks=32,
            max_model_len=8 * SIZE,
        ) as llm:
            outputs = llm.generate(prompts(4), SamplingParams(temperature=0.0, max_tokens=SIZE), use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert (mapped() > before) == (layout == "virtual")
        assert mapped() == before
    assert answers[0] == answers[1]


def write_tiny(folder: Path) -> Path:
    heads = CONFIG.heads
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size, "num_hidden_layers": CONFIG.num_layers, "hidden_act": "silu",
        "num_attention_heads": heads.num_query, "num_key_value_heads": heads.num_kv, "head_dim": heads.dim,
        "vocab_size": VOCAB, "max_position_embeddings": 8 * SIZE, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return folder
