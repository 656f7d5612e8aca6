"""GGUF models: their config, their weights under Hugging Face's names, split files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gguf_files import (
    HEAD_DIM,
    HIDDEN,
    QUERY_HEADS,
    Stored,
    stored,
    tiny_metadata,
    tiny_weights,
    write_gguf,
    write_tiny_gguf,
)
from quire.config.model import Heads, ModelConfig, Rope
from quire.config.weight_counts import WeightCounts
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.config import _read_levels
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.model_config import read_model_config
from quire.types.errors import ModelLoadError

TINY = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    heads=Heads(4, 2, 8),
    rope=Rope(theta=10_000.0, max_position=256),
    norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="float32",
    bos_id=1,
    eos_ids=(2,),
    weights=WeightCounts(
        20_640,
        in_blocks=18_432,
        block_outputs=512,
        adapter_width=1_024 + 96,  # and the head
        adapter_parts=3,
        int4_parameters=18_432,
        int4_bytes=11_264,
    ),
)


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(files_at(path))


def config_with(path: Path, **extra: object) -> ModelConfig:
    return read_model_config(files_at(write_tiny_gguf(path / "m.gguf", **extra)))


def test_the_config_is_read_from_metadata_and_tensors(tmp_path: Path) -> None:
    assert config_with(tmp_path) == TINY
    assert opened(tmp_path / "m.gguf").config == TINY


def test_an_output_tensor_means_an_untied_head(tmp_path: Path) -> None:
    weights = tiny_weights() | {"output.weight": np.ones((64, 32), np.float32)}
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights))
    assert not checkpoint.config.tie_word_embeddings
    assert torch.equal(checkpoint.read("lm_head.weight"), torch.ones(64, 32))


def rows_in_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As converters store a rotary projection of a llama model: row i of a head's first half beside its partner."""
    half = weight.shape[0] // num_heads // 2
    order = [head * 2 * half + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_query_and_key_rows_of_llama_come_back_in_half_split_order(tmp_path: Path, kind: str) -> None:
    original = np.random.default_rng(5).normal(size=(QUERY_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    name = "blk.1.attn_q.weight"
    weights = tiny_weights() | {name: rows_in_pairs(original, QUERY_HEADS)}
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights, {name: kind}))
    read = checkpoint.read("model.layers.1.self_attn.q_proj.weight")
    torch.testing.assert_close(read, torch.from_numpy(original), atol=0.0 if kind == "F32" else 0.03, rtol=0.0)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_other_architectures_stay_as_stored(tmp_path: Path, architecture: str) -> None:
    weights = tiny_weights()
    for layer in range(2):
        for role in "qk":
            if architecture == "qwen3":
                weights[f"blk.{layer}.attn_{role}_norm.weight"] = np.ones(8, np.float32)
        if architecture == "qwen2":
            for role, size in (("q", 32), ("k", 16), ("v", 16)):
                weights[f"blk.{layer}.attn_{role}.bias"] = np.arange(size, dtype=np.float32)
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights, architecture=architecture))
    assert checkpoint.config.qk_norm == (architecture == "qwen3")
    assert checkpoint.config.qkv_bias == (architecture == "qwen2")
    stored_weight = torch.from_numpy(weights["blk.0.attn_k.weight"])
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.k_proj.weight"), stored_weight)


def test_biases_of_rotary_projections_are_reordered_too(tmp_path: Path) -> None:
    weights, bias = tiny_weights(), np.arange(32, dtype=np.float32)
    for layer in range(2):
        weights |= {f"blk.{layer}.attn_{role}.bias": np.zeros(16, np.float32) for role in "kv"}
        weights[f"blk.{layer}.attn_q.bias"] = rows_in_pairs(bias, QUERY_HEADS)
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights))
    assert checkpoint.read("model.layers.0.self_attn.q_proj.bias").tolist() == bias.tolist()


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)])
def test_floats_are_read_as_stored_and_quantized_weights_as_float32(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    name = "blk.0.ffn_up.weight"
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", kinds={name: kind}))
    read = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert read.dtype == dtype
    torch.testing.assert_close(read.float(), torch.from_numpy(tiny_weights()[name]), atol=0.03, rtol=0.01)
    assert checkpoint.source("model.layers.0.mlp.up_proj.weight") == str(tmp_path / "m.gguf")


def test_the_frequency_divisors_of_llama_3_files_are_carried_along(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 4.25, 8.0], np.float32)
    weights = tiny_weights() | {"rope_freqs.weight": factors}
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights))
    assert checkpoint.config.rope == replace(TINY.rope, frequency_factors=(1.0, 1.5, 4.25, 8.0))
    assert "rope_freqs.weight" not in checkpoint.names
    for wrong in (
        factors[:3],
        np.array([1.0, 0.0, 1.0, 1.0], np.float32),
        np.array([1.0, np.nan, 1.0, 1.0], np.float32),
    ):
        with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
            opened(write_tiny_gguf(tmp_path / "m.gguf", weights | {"rope_freqs.weight": wrong}))


def test_divisors_give_the_frequencies_that_the_llama3_formula_gives(tmp_path: Path) -> None:
    from quire.runtime.layers.rotary import frequencies

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0}
    by_formula, _ = frequencies(Rope(10_000.0, "llama3", tuple(scaling.items()), 512), HEAD_DIM)
    plain, _ = frequencies(Rope(10_000.0, max_position=512), HEAD_DIM)
    weights = tiny_weights() | {"rope_freqs.weight": (plain / by_formula).numpy()}
    config = opened(write_tiny_gguf(tmp_path / "m.gguf", weights)).config
    by_divisors, _ = frequencies(config.rope, HEAD_DIM)
    torch.testing.assert_close(by_divisors, by_formula)


def test_rope_scalings_in_metadata_are_understood(tmp_path: Path) -> None:
    linear = config_with(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}).rope
    assert (linear.kind, dict(linear.scaling)) == ("linear", {"factor": 4.0})
    assert config_with(tmp_path, **{"rope.scale_linear": 2.0}).rope.scaling == (("factor", 2.0),)
    assert config_with(tmp_path, **{"rope.scaling.type": "none"}).rope.kind == "default"
    settings = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 64,
        "yarn_beta_fast": 16.0,
        "attn_factor": 2.0,
    }
    yarn = config_with(tmp_path, **{f"rope.scaling.{key}": item for key, item in settings.items()}).rope
    assert yarn.kind == "yarn"
    assert dict(yarn.scaling) == {
        "factor": 4.0,
        "original_max_position_embeddings": 64.0,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(2.0 * (1 + 0.1 * math.log(4.0))),
    }


REFUSED_SETTINGS: dict[str, tuple[dict[str, object], str]] = {
    "architecture": (
        {"architecture": "rwkv7"},
        "architecture 'rwkv7' is not supported; supported in GGUF: llama, qwen2",
    ),
    "missing": ({"block_count": None}, r"llama\.block_count: is missing"),
    "wrong kind": ({"block_count": "two"}, r"llama\.block_count: must be a whole number, is 'two'"),
    "unknown": ({"logit_scale": 2.0}, r"llama\.logit_scale: is not a known setting of this architecture"),
    "experts": ({"architecture": "qwen2", "expert_count": 8}, r"qwen2\.expert_count: mixtures of experts"),
    "window": ({"attention.sliding_window": 128}, "a window of 128 tokens is not supported"),
    "rope kind": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' is not supported"),
    "rope factor": ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "must be above 0"),
    "partial rope": ({"rope.dimension_count": 4}, r"only whole heads \(8\) can be rotated"),
    "value size": ({"attention.value_length": 4}, "keys and values of different sizes"),
    "uneven heads": ({"attention.head_count_kv": 3}, "4 query heads cannot share 3"),
    "no heads": ({"attention.head_count": 0}, "must be at least 1"),
    "no kv heads": ({"attention.head_count_kv": 0}, r"heads\.num_kv: must be in \[1"),
    "no layers": ({"block_count": 0}, r"num_layers: must be in \[1"),
    "many layers": ({"block_count": 1 << 30}, r"num_layers: must be in \[1"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": 0.0}, r"norm_eps: must be in \(0, 1\)"),
    "epsilon nan": ({"attention.layer_norm_rms_epsilon": math.nan}, "must be a finite number"),
    "theta": ({"rope.freq_base": 0.0}, r"rope\.theta: must be above 1"),
    "vocabulary": ({"vocab_size": 65}, "is 65, token_embd.weight has 64 rows"),
    "not causal": ({"attention.causal": False}, "only causal models"),
}


@pytest.mark.parametrize("case", REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_obeyed_is_refused_by_name(tmp_path: Path, case: str) -> None:
    extra, message = REFUSED_SETTINGS[case]
    with pytest.raises(ModelLoadError, match=message):
        config_with(tmp_path, **extra)


def test_a_special_token_outside_the_vocabulary_is_as_good_as_none(tmp_path: Path) -> None:
    metadata = tiny_metadata() | {"tokenizer.ggml.eos_token_id": 64, "tokenizer.ggml.eot_token_id": 3}
    path = write_gguf(tmp_path / "m.gguf", metadata, [stored(name, item) for name, item in tiny_weights().items()])
    assert read_model_config(files_at(path)).eos_ids == (3,)


def damaged(change: str) -> dict[str, np.ndarray]:
    weights = tiny_weights()
    name = "blk.1.ffn_down.weight"
    if change == "missing":
        del weights[name]
    elif change == "misshapen":
        weights[name] = weights[name].T.copy()
    elif change == "unknown":
        weights["blk.1.attn_sinks.weight"] = np.ones(4, np.float32)
    elif change == "beyond":
        weights["blk.2.ffn_down.weight"] = weights[name]
    elif change == "nan":
        weights[name][3, 3] = np.nan
    elif change == "blank":
        weights[name][:] = 0.0
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"m\.gguf: model\.layers\.1\.mlp\.down_proj\.weight: is missing"),
        ("misshapen", r"has shape \(64, 32\), the config says \(32, 64\)"),
        ("unknown", r"blk\.1\.attn_sinks\.weight: has no place in a llama model"),
        ("beyond", r"model\.layers\.2\.mlp\.down_proj\.weight: has no place"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_at_opening(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        opened(write_tiny_gguf(tmp_path / "m.gguf", damaged(change)))


@pytest.mark.parametrize(("change", "message"), [("nan", "not finite numbers"), ("blank", "bytes are zero")])
def test_damaged_numbers_are_refused_when_read(tmp_path: Path, change: str, message: str) -> None:
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", damaged(change)))
    with pytest.raises(ModelLoadError, match=message) as caught:
        checkpoint.read("model.layers.1.mlp.down_proj.weight")
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "m.gguf"), "blk.1.ffn_down.weight")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["output_norm.weight"] = np.ones(32, np.int32)
    checkpoint = opened(write_tiny_gguf(tmp_path / "m.gguf", weights, {"output_norm.weight": "I32"}))
    with pytest.raises(ModelLoadError, match=r"output_norm\.weight: has type I32, not a weight's"):
        checkpoint.read("model.norm.weight")


def write_split(folder: Path, count: int = 3, **first: object) -> Path:
    tensors: list[Stored] = [stored(name, item) for name, item in tiny_weights().items()]
    paths = []
    for number in range(count):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        metadata = (tiny_metadata() if number == 0 else {}) | split | (first if number == 0 else {})
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, metadata, tensors[number::count]))
    return paths[0]


def test_a_split_model_is_one_model_whichever_file_is_named(tmp_path: Path) -> None:
    whole = opened(write_tiny_gguf(tmp_path / "m.gguf"))
    write_split(tmp_path)
    split = opened(tmp_path / "tiny-00002-of-00003.gguf")
    assert split.config == whole.config
    assert split.names == whole.names
    assert all(torch.equal(split.read(name), whole.read(name)) for name in whole.names)
    assert {Path(split.source(name)).name[:10] for name in split.names} == {"tiny-00001", "tiny-00002", "tiny-00003"}


def test_a_split_model_with_a_file_missing_or_swapped_is_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path)
    second, third = (tmp_path / f"tiny-0000{number}-of-00003.gguf" for number in (2, 3))
    third.rename(tmp_path / "aside")
    with pytest.raises(ModelLoadError, match=r"tiny-00003-of-00003\.gguf: is missing; the model has 3 files"):
        opened(first)
    second.rename(third)
    (tmp_path / "aside").rename(second)
    with pytest.raises(ModelLoadError, match=r"split\.no: is 2, expected 1"):
        opened(first)


def test_a_split_model_that_announces_other_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="announces 7 tensors"):
        opened(write_split(tmp_path, **{"split.tensors.count": 7}))
    with pytest.raises(ModelLoadError, match=r"split\.count: is 4, but 3 files"):
        opened(write_split(tmp_path, **{"split.count": 4}))


def test_the_memory_of_levels_is_that_of_the_layers_that_hold_them(tmp_path: Path) -> None:
    """Queries of 4 bits beside values of 8 are held with 8, but with integer products; a GPU expands the embedding
    table."""
    weights = tiny_weights(layers=1)
    kinds = {"token_embd.weight": (8, 34), "blk.0.attn_q.weight": (2, 18), "blk.0.attn_v.weight": (14, 210),
             "blk.0.ffn_down.weight": (12, 144), "blk.0.ffn_up.weight": (16, 66)}  # fmt: skip
    shapes = {"blk.0.ffn_down.weight": (32, 256), "blk.0.attn_v.weight": (16, 256), "blk.0.ffn_up.weight": (64, 256)}
    tensors = []
    for name, values in weights.items():
        shape = shapes.get(name, values.shape)
        if name not in kinds:
            tensors.append(stored(name, values))
            continue
        number, size = kinds[name]
        data = b"\1" * (math.prod(shape) // (32 if size < 60 else 256) * size)
        tensors.append(Stored(name, shape, number, data))
    model = GgufModel(write_gguf(tmp_path / "m.gguf", tiny_metadata(layers=1), tensors))
    levels = _read_levels(model)
    query, value, down, table = 32 * 32, 16 * 256, 32 * 256, 64 * 32
    assert levels.parameters == query + value + down + table
    assert levels.num_bytes == (query + value + table) * 36 // 32 + down * 20 // 32
    assert levels.integer_bytes == query * 18 // 32 + value * 28 // 32 + table * 34 // 32 + down * 20 // 32
    assert levels.gpu_parameters == query + value + down
    assert levels.gpu_bytes == (query + value) * 18 // 16 + down * 20 // 32
    model.close()
