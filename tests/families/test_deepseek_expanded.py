"""A worker whose prompt chunks expand latents gives the tokens and logits of one in the absorbed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from family_bench import SIZES, hf_checkpoint
from family_models import FamilyCase
from quire.config.model import Heads, Latent
from quire.runtime.attention.expanded import ExpandedScratch
from quire.runtime.attention.triton_latent import LatentTritonAttention
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.worker import forward_graphs, parts
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.forward_graphs import ForwardGraphs
from tiny_models import DEVICE, Bench, Chunk, compare_steps, engine_config, mix_steps
from worker_executor import TinyEngine

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    sizes = SIZES | {
        "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
        "q_lora_rank": 10, "moe_intermediate_size": 20, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "num_hidden_layers": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    folder = hf_checkpoint(tmp_path_factory.mktemp("deepseek"), transformers.DeepseekV3Config(**sizes))
    return open_checkpoint(files_at(folder))


def expand(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Make chunks of at least 3 tokens expand latents in so many passes; 0: never."""
    monkeypatch.setattr(parts, "scratch_tokens", lambda *_: 256)
    monkeypatch.setattr(
        ExpandedScratch, "passes", lambda _, spans, __: passes if len(spans) and spans[:, 2].max() > 2 else 0
    )


def bench(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, passes: int, kv_dtype: str = "float32") -> Bench:
    expand(monkeypatch, passes)
    return Bench(checkpoint, engine_config(max_len=64, kv_dtype=kv_dtype), attention="triton")  # type: ignore[arg-type]


def test_scaled_queries_read_expanded_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FamilyCase("mistral4", tmp_path).model is not None
    scaled = open_checkpoint(files_at(tmp_path))
    assert scaled.config.rope.scales_queries
    absorbed, expanded = (mix_steps(bench(scaled, monkeypatch, passes)) for passes in (0, 1))
    compare_steps(expanded, absorbed)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8"])
def test_expanded_chunks_give_the_tokens_and_logits_of_the_absorbed_form(
    kv_dtype: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)
    absorbed, expanded = (mix_steps(bench(checkpoint, monkeypatch, passes, kv_dtype)) for passes in (0, 1))
    compare_steps(expanded, absorbed)
    graphs = expanded.worker._runner._forward
    assert isinstance(graphs, ForwardGraphs)
    assert set(graphs._graphs) == {
        StepShape(16, False, True, False, scratch=True),
        StepShape(16, True, True, False, scratch=True),
        StepShape(16, True, True, False),
        StepShape(16, False, True, False),
        StepShape(16, True, False, False),
    }


def test_steps_of_several_passes_are_not_padded(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)
    found = []
    for passes in (0, 2):
        made = bench(checkpoint, monkeypatch, passes)
        made.add(0, list(range(3, 20)))
        made.run(chunks=[Chunk(0, 0, 17, (0,))])
        made.run(decode=[0])
        graphs = made.worker._runner._forward._graphs  # type: ignore[attr-defined]
        found.append((made.tokens, any(shape.chunks for shape in graphs)))
    assert found[0][0] == found[1][0]
    assert [is_captured for _, is_captured in found] == [True, False]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU captures no sums of threads")
def test_two_ranks_expand_the_heads_that_each_holds(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    expand(monkeypatch, 1)
    prompts, heads, attend = [[5, 9, 2, 11, 7], [4, 17, 3]], [], ExpandedScratch.attend

    def counted(self: ExpandedScratch, query: Any, *args: Any, **named: Any) -> None:
        heads.append(query.shape[1])
        attend(self, query, *args, **named)

    monkeypatch.setattr(ExpandedScratch, "attend", counted)
    alone, shared = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=tensor)  # type: ignore[arg-type]
        for tensor in (1, 2)
    )
    wanted, all_heads = alone.answers(prompts, max_tokens=2), heads[0]
    heads.clear()
    assert shared.answers(prompts, max_tokens=2) == wanted
    assert set(heads) == {all_heads // 2}


def test_preparation_expands_for_the_shapes_whose_chunks_are_expanded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = bench(checkpoint, monkeypatch, 1).worker._runner._batches
    shapes = batches.usual_shapes()  # type: ignore[attr-defined]
    assert {shape.scratch for shape in shapes if shape.tokens == 16} == {True}
    blank = batches.blank(shapes[0])  # type: ignore[attr-defined]
    assert blank.step.attention.prefill is None
    assert blank.step.attention.expanded.plan.pages[0, :2].tolist() == [0, 0]


def test_preparation_compiles_the_absorbed_form_too(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = bench(checkpoint, monkeypatch, 1).worker._runner._batches
    others = batches.other_shapes()  # type: ignore[attr-defined]
    assert [(shape.decodes, shape.scratch) for shape in others] == [(False, False), (True, False)]
    for shape in others:
        attention = batches.blank(shape).step.attention  # type: ignore[attr-defined]
        assert attention.expanded is None
        assert attention.prefill is not None
    absorbed_only = bench(checkpoint, monkeypatch, 0).worker._runner._batches
    forms = {shape.scratch for shape in absorbed_only.other_shapes()}  # type: ignore[attr-defined]
    assert forms == {True}


def test_heads_too_large_for_the_kernels_are_never_expanded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = bench(checkpoint, monkeypatch, 0).worker.cache.layers[0]
    for value_dim, expands in ((512, False), (12, True)):
        made = LatentTritonAttention(Heads(2, 1, 20, 16), torch.float32, layer.key.device, dependent_rows=1 << 30)
        made.accept_latent(Latent(rank=16, nope_dim=8, rope_dim=4, value_dim=value_dim), torch.float32)
        made.reserve([layer], 8, 512)
        assert made.has_scratch == expands
