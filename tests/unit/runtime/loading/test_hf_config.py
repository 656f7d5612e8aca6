"""config.json: what transformers writes is read as transformers means it; what cannot be obeyed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.model import Heads, ModelConfig, Rope
from quire.config.weight_counts import WeightCounts
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.model_config import read_model_config
from quire.types.errors import ModelLoadError

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(folder: Path, changes: dict[str, object], generation: object | None = None) -> ModelConfig:
    values = {key: item for key, item in (LLAMA | changes).items() if item != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(ModelFiles("tiny", folder, "hf"))


def rope(folder: Path, **changes: object) -> Rope:
    return read(folder, changes).rope


def test_a_llama_config_is_read_whole(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        heads=Heads(4, 2, 8),
        rope=Rope(theta=500_000.0, max_position=512),
        norm_eps=1e-5,
        dtype="bfloat16",
        bos_id=1,
        eos_ids=(2,),
        weights=WeightCounts(
            21_920,
            in_blocks=15_360,
            block_outputs=448,
            adapter_width=928 + 32 + 112,  # and the head, whose 100 outputs are padded
            adapter_parts=3,
            int4_parameters=15_360,
            int4_bytes=11_520,
            plain_linears=3_200,  # the head
        ),
    )


def test_llama_biases_follow_their_settings(tmp_path: Path) -> None:
    config = read(tmp_path, {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_qwen2_has_biases_where_its_model_has_them(tmp_path: Path) -> None:
    config = read(
        tmp_path, {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 131_072}
    )
    assert (config.architecture, config.qkv_bias, config.o_bias, config.qk_norm) == ("qwen2", True, False, False)


def test_qwen3_has_norms_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24})
    assert (config.heads.dim, config.qk_norm, config.qkv_bias) == (24, True, False)
    assert read(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}).heads.dim == 128


def test_mistral_without_a_window_or_with_one_that_never_closes_is_read(tmp_path: Path) -> None:
    for window in (None, 512, 4096):
        config = read(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": window})
        assert config.architecture == "mistral"
        assert config.windows == (() if window is None else (window,) * config.num_layers)


def test_missing_settings_are_what_transformers_takes_them_for(tmp_path: Path) -> None:
    config = read(
        tmp_path, dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta", "torch_dtype"), "absent")
    )
    assert (config.heads.num_kv, config.norm_eps, config.rope.theta, config.dtype) == (4, 1e-6, 10_000.0, "float32")


def test_the_model_type_decides_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, {"architectures": None, "model_type": "qwen2"}).architecture == "qwen2"


def test_remote_code_is_never_looked_at(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('was run')")
    config = read(tmp_path, {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    assert config.architecture == "llama"


@pytest.mark.parametrize("generation", [{"eos_token_id": [5, 6, 5]}, {"eos_token_id": 7}, {"temperature": 0.6}, {}])
def test_generation_config_decides_the_end_of_text_where_it_speaks(
    tmp_path: Path, generation: dict[str, object]
) -> None:
    expected = {"[5, 6, 5]": (5, 6), "7": (7,)}.get(str(generation.get("eos_token_id")), (2,))
    assert read(tmp_path, {}, generation).eos_ids == expected


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = rope(tmp_path, rope_scaling={"rope_type": "llama3", **llama3})
    older = rope(tmp_path, rope_scaling={"type": "llama3", **llama3})
    new = rope(tmp_path, rope_theta="absent", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert old == older == new
    assert (old.theta, old.kind, dict(old.scaling)) == (500_000.0, "llama3", {k: float(v) for k, v in llama3.items()})


def test_every_parameter_of_yarn_is_carried_along(tmp_path: Path) -> None:
    given = {
        "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.1, "beta_fast": 24,
        "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False,
    }  # fmt: skip
    assert dict(rope(tmp_path, rope_scaling={"rope_type": "yarn", **given}).scaling) == {
        k: float(v) for k, v in given.items()
    }
    least = dict(rope(tmp_path, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128}).scaling)
    assert least == {"factor": 4.0, "original_max_position_embeddings": 128.0, "truncate": 1.0}


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_rope_have_a_factor(tmp_path: Path, kind: str) -> None:
    found = rope(tmp_path, rope_scaling={"type": kind, "factor": 2})
    assert (found.kind, found.scaling) == (kind, (("factor", 2.0),))


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": (
        {"architectures": ["Zamba2ForCausalLM"]},
        "Zamba2ForCausalLM is not supported; supported are Mamba2ForCausalLM, .* and others; docs/reference/models.md",
    ),
    "model type": ({"architectures": None, "model_type": "zamba2"}, "model_type: 'zamba2' is not supported"),
    "no architecture": ({"architectures": []}, "must name one architecture"),
    "quantized": (
        {"quantization_config": {"quant_method": "aqlm"}},
        "quantization_config: aqlm weights of llama models are not supported",
    ),
    "missing": ({"hidden_size": "absent"}, "hidden_size: is missing"),
    "text": ({"hidden_size": "32"}, "hidden_size: must be a whole number, is '32'"),
    "truth": ({"hidden_size": True}, "hidden_size: must be a whole number, is True"),
    "negative": ({"num_hidden_layers": -1}, r"num_layers: must be in \[1"),
    "huge": ({"vocab_size": 10**30}, r"vocab_size: must be in \[1"),
    "uneven heads": ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    "no heads": ({"num_attention_heads": 0}, "must be at least 1"),
    "no kv heads": ({"num_key_value_heads": 0}, r"heads\.num_kv: must be in \[1"),
    "odd head": ({"head_dim": 7}, "cannot be rotated in pairs"),
    "unknown head size": ({"hidden_size": 33}, "is not a multiple of 4 heads"),
    "activation": ({"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
    "dtype": ({"torch_dtype": "int8"}, "'int8' is not supported"),
    "window": ({"use_sliding_window": True}, "sliding-window attention is not supported"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention layers"),
    "mistral window": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        "sliding_window: must be at least 1, is 0",
    ),
    "qwen layer types": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["sliding_attention"]},
        "must be sliding_attention or full_attention for each of",
    ),
    "longrope factors": ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling.short_factor: is missing"),
    "rope kind": (
        {"rope_scaling": {"type": "ntk", "factor": 2}},
        "'ntk' is not supported; supported: default",
    ),
    "rope key": (
        {"rope_scaling": {"type": "linear", "factor": 2, "zest": 1}},
        r"rope_scaling\.zest: is not a parameter",
    ),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: is missing"),
    "rope zero": ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "must be above 0"),
    "rope order": (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "must be above low_freq_factor",
    ),
    "rope layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "one set of parameters for all layers",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "only whole heads can be rotated"),
    "theta": ({"rope_theta": -1.0}, r"rope\.theta: must be above 1"),
    "infinite": ({"rms_norm_eps": 10**400}, "must be a finite number"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id: must be a token id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be_obeyed_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(tmp_path, changes)
    assert caught.value.file == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS.*git lfs pull"),
        (b"[]", "must hold a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": ' + b"[" * 100_000, "is not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        read_model_config(ModelFiles("tiny", tmp_path, "hf"))


def test_a_config_that_was_saved_on_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{\r\n}\r\n")
    assert read_json(tmp_path / "config.json") == {}


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: No such file"):
        read_model_config(ModelFiles("tiny", tmp_path, "hf"))


@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_what_is_read(tmp_path: Path, name: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6, "original_max_position_embeddings": 32}
    extra = {"sliding_window": None} if name == "MistralConfig" else {}
    saved = getattr(transformers, name)(
        vocab_size=90, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_parameters=rope_parameters, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, architectures=[name.replace("Config", "ForCausalLM")], dtype="float16", **extra,
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    config = read_model_config(ModelFiles("tiny", tmp_path, "hf"))
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (90, 64, 3)
    assert config.heads == Heads(4, 2, getattr(saved, "head_dim", None) or 16)
    assert (config.rope.theta, config.rope.kind, config.rope.max_position) == (1e6, "yarn", 64)
    assert (config.tie_word_embeddings, config.dtype, config.eos_ids) == (tied, "float16", (2,))


def test_a_text_model_has_the_dtype_and_the_ends_of_the_whole_model(tmp_path: Path) -> None:
    inner = {key: item for key, item in LLAMA.items() if key not in ("architectures", "torch_dtype")}
    inner |= {"head_dim": 8, "eos_token_id": None, "dtype": None}
    changes = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "eos_token_id": [1, 96]}
    config = read(tmp_path, changes)
    assert (config.dtype, config.eos_ids) == ("bfloat16", (1, 96))


def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is_causal.*attention to later tokens is not supported"):
        read(tmp_path, {"is_causal": False})
