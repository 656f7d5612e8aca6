"""The comparison of KV layouts, on a model small enough to run it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.models import BenchModel
from benchmarks.kv_layouts import CASES, SHAPES, _lengths, _plan, _rows, measure_mapping, run

TINY = BenchModel(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "hidden_act": "silu", "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }
)  # fmt: skip
ARGUMENTS = argparse.Namespace(
    device="cpu", dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_memory="4MiB", model="tiny",
    requests=6, scale=32,
)  # fmt: skip


def test_every_layout_answers_the_same_requests(tmp_path: Path) -> None:
    lengths, folder = _lengths(ARGUMENTS), TINY.write(tmp_path)
    runs = [run(case, _plan(folder, ARGUMENTS, settings), lengths, 0) for case, settings in CASES["cpu"].items()]
    assert {each.output_tokens for each in runs} == {sum(pair.output for pair in lengths)}
    virtual = runs[-1]
    assert virtual.cost is not None
    assert virtual.cost.mapped > 0
    assert 0 < virtual.mapping_share < 1
    rows = _rows(CASES["cpu"], runs)
    assert [row[0] for row in rows] == list(CASES["cpu"])


def test_mapping_alone_is_measured_per_block() -> None:
    found = measure_mapping(1 << 16, torch.device("cpu"))
    assert all(each.map_us > 0 and each.unmap_us > 0 for each in found)


@pytest.mark.parametrize("model", ["small", "llama-3.1-8b"])
def test_the_shapes_it_offers_are_models(model: str) -> None:
    assert SHAPES[model].layer_parameters > 0
