"""Families whose experts rank by sigmoids, and other mixtures: settings beside the tiny models of the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from family_bench import NUM_DECODED, PROMPTS, change_config, check_parity
from family_models import FamilyCase
from quire.config.arguments import EngineArguments
from quire.config.lengths import model_length, wanted_length, with_usable_indexer
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.serving.assembly import plan_engine
from quire.serving.llm import LLM
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.sampling import SamplingParams

pytest.importorskip("transformers")


def written(name: str, folder: Path, **changes: Any) -> FamilyCase:
    case = FamilyCase(name, folder, changes)
    assert case.model is not None  # its files are there
    return case


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "first_k_dense_replace": 0}),
        ("glm4_moe", {"norm_topk_prob": False, "head_dim": 24, "tie_word_embeddings": True}),
        ("solar_open", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0,
                                            "original_max_position_embeddings": 256}}),
        ("minimax_m2", {"rotary_dim": 16}),
        ("exaone_moe", {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}),
        ("glm4_moe_lite", {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
        ("mistral4", {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.0}),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "head_dim": 24, "tie_word_embeddings": False}),
        ("llama4_text", {"use_qk_norm": False, "moe_layers": None, "interleave_moe_layer_step": 2}),
        ("llama4_text", {"attention_bias": True, "no_rope_layers": [1, 1, 1]}),
        ("flex_olmo", {"norm_topk_prob": False, "num_key_value_heads": 4}),
        ("dots1", {"n_shared_experts": 2, "attention_bias": True, "norm_topk_prob": False}),
        ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
        ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    ],
)  # fmt: skip
def test_other_forms(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    case = written(name, tmp_path, **changes)
    check_parity(tmp_path, attention="auto", model=case.model)


def test_glm_leaves_out_the_layers_that_draft(tmp_path: Path) -> None:
    case = written("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {f"model.layers.3.{name}": tensors["model.norm.weight"].clone() for name in ("enorm.weight", "hnorm.weight")}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, num_nextn_predict_layers=1)
    check_parity(tmp_path, attention="auto", model=case.model)


def test_published_files_of_minimax_say_more_than_transformers_writes(tmp_path: Path) -> None:
    case = written("minimax_m2", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    change_config(
        tmp_path, rope_theta=5_000_000, rotary_dim=8, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True,
        qk_norm_type="per_layer", shared_intermediate_size=0, attn_type_list=[1, 1, 1], use_mtp=True, num_mtp_modules=3,
    )  # fmt: skip
    check_parity(tmp_path, attention="auto", model=case.model)


def nest(folder: Path, architecture: str, others: tuple[str, ...]) -> None:
    """Make the files those of a model for images with this text model."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    nested |= {f"{name}.weight": tensors["model.norm.weight"].clone() for name in others}
    save_file(nested, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("is_nested", [False, True])
def test_kimi_is_read_as_deepseek_v3(is_nested: bool, tmp_path: Path) -> None:
    """Kimi K2 says another model_type; K2.5 is the text model of a model for images, whose tower is not read."""
    case = written("deepseek_v3", tmp_path)
    change_config(tmp_path, model_type="kimi_k2")
    if is_nested:
        nest(tmp_path, "KimiK25ForConditionalGeneration", ("vision_tower.norm", "mm_projector.proj.0"))
    check_parity(tmp_path, attention="auto", model=case.model)


def test_mistral_4_is_published_within_mistral_3(tmp_path: Path) -> None:
    case = written("mistral4", tmp_path)
    nest(tmp_path, "Mistral3ForConditionalGeneration", ("vision_tower.norm", "multi_modal_projector.norm"))
    check_parity(tmp_path, attention="auto", model=case.model)


@pytest.mark.parametrize("attention", ["auto", "reference", "triton"])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}])
def test_mistral_4_scales_queries_beyond_the_original_length(
    attention: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    case = written("mistral4", tmp_path, **changes)
    config = open_checkpoint(files_at(tmp_path)).config
    assert config.context_limit is None
    assert dict(config.rope.scaling)["original_max_position_embeddings"] == 4 < NUM_DECODED + len(PROMPTS[0])
    check_parity(tmp_path, attention=attention, model=case.model)
    unscaled = json.loads((tmp_path / "config.json").read_text())["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
    change_config(tmp_path, rope_parameters=unscaled)
    with pytest.raises(AssertionError):
        check_parity(tmp_path, attention=attention, model=case.model)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"qk_nope_head_dim": 17}, "qk_nope_head_dim"), ({"rope_parameters": None}, "original_max_position_embeddings")],
)
def test_scaled_queries_of_mistral_4_need_an_even_size_and_the_original_length(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    written("mistral4", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = {name: value for name, value in values["rope_parameters"].items() if "original" not in name}
    change_config(tmp_path, **{name: value or rope for name, value in changes.items()})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


def test_published_files_of_hunyuan_list_a_number_for_each_layer(tmp_path: Path) -> None:
    case = written("hunyuan_v1_moe", tmp_path)
    each = {"moe_topk": [2, 2, 2], "moe_intermediate_size": [96, 96, 96], "num_shared_expert": [1, 1, 1]}
    change_config(tmp_path, **each, use_mla=False, use_cla=False, moe_layer_num_skipped=0)
    check_parity(tmp_path, attention="auto", model=case.model)


def test_llama_4_is_read_as_text(tmp_path: Path) -> None:
    case = written("llama4_text", tmp_path)
    nest(tmp_path, "Llama4ForConditionalGeneration", ("vision_model.norm", "multi_modal_projector.linear_1"))
    check_parity(tmp_path, attention="auto", model=case.model)


@pytest.mark.parametrize("attention", ["auto", "reference", "triton"])
@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"attn_temperature_tuning": False}, {"attention_chunk_size": None}),
        ({"attention_chunk_size": 64}, {"attn_temperature_tuning": False}),
        ({"attn_scale": 0.5}, {"attn_scale": 0.1}),
        ({"layer_types": ["chunked_attention"] * 3}, {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_llama_4_sees_its_chunk_and_scales_queries(
    attention: str, changes: dict[str, Any], least: dict[str, Any], tmp_path: Path
) -> None:
    short = {"attention_chunk_size": 8, "floor_scale": 4}
    case = written("llama4_text", tmp_path, **(short | changes))
    if "attn_temperature_tuning" not in changes:
        change_config(tmp_path, attn_temperature_tuning=4)  # as the first published files have it
    check_parity(tmp_path, attention=attention, model=case.model)
    change_config(tmp_path, **least)
    with pytest.raises(AssertionError):
        check_parity(tmp_path, attention=attention, model=case.model)


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize(
    ("name", "changes", "other"),
    [
        ("deepseek_v32", {"index_topk": 5, "index_head_dim": 8}, {"index_topk": 7}),
        ("glm_moe_dsa", {"index_topk": 5, "index_head_dim": 40, "index_topk_pattern": "FSF"}, {"index_topk": 12}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared"]}, {"index_topk": 5}),
    ],
)
def test_tokens_attend_to_those_that_the_indexer_chooses(
    name: str, changes: dict[str, Any], other: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    case = written(name, tmp_path, **changes)
    check_parity(tmp_path, attention=attention, model=case.model)
    change_config(tmp_path, **other)
    with pytest.raises(AssertionError):
        check_parity(tmp_path, attention=attention, model=case.model)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_triton_kernels_run_up_to_the_length_at_which_all_tokens_are_chosen(name: str, tmp_path: Path) -> None:
    whole = open_checkpoint(files_at(written(name, tmp_path, index_topk=128).directory)).config
    for args, device in ((EngineArguments(), "cpu"), (EngineArguments(attention_backend="gather"), "cuda")):
        assert with_usable_indexer(whole, args, device) is whole
        assert wanted_length(args, whole) == 512
    short = with_usable_indexer(whole, EngineArguments(max_model_len=128), "cpu")
    assert short.indexer is None
    model = with_usable_indexer(whole, EngineArguments(), "cuda")
    assert model_length(model) == wanted_length(EngineArguments(), model) == 128
    with pytest.raises(ConfigError, match=r"max_model_len: is 129, .*128 tokens.*index_topk.*set it to 128 or less"):
        wanted_length(EngineArguments(max_model_len=129), model)


@pytest.mark.parametrize("limit", [64, 128, None])
def test_a_served_model_has_its_indexer_where_sequences_may_be_long(limit: int | None, tmp_path: Path) -> None:
    case = written("glm_moe_dsa", tmp_path, index_topk=8 if limit is None else limit)
    options: dict[str, Any] = {"max_model_len": limit, "device": "cpu", "threads": 1, "kv_cache_memory": "8MiB"}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **options) as made:
        (found,) = made.generate([case.prompt(9)], params)
    assert list(found.outputs[0].token_ids) == case.expected(case.prompt(9))


@pytest.mark.parametrize(("name", "in_pairs"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_settings_of_rotary_positions_and_of_shared_choices_are_read(name: str, in_pairs: bool, tmp_path: Path) -> None:
    written(name, tmp_path, indexer_types=None, index_topk_freq=1)
    first = open_checkpoint(files_at(tmp_path)).config
    assert first.indexer is not None
    assert (first.indexer.in_pairs, first.rope.in_pairs, first.indexer.layers) == (in_pairs, True, (0, 1, 2))
    change_config(tmp_path, indexer_rope_interleave=not in_pairs, rope_interleave=False)
    change_config(tmp_path, indexer_types=["full", "shared", "full"])
    second = open_checkpoint(files_at(tmp_path)).config
    assert second.indexer is not None
    assert (second.indexer.in_pairs, second.rope.in_pairs, second.indexer.layers) == (not in_pairs, False, (0, 2))


def test_a_model_without_its_indexer_is_divided_where_its_layers_would_share_choices(tmp_path: Path) -> None:
    case = written("glm_moe_dsa", tmp_path, indexer_types=["full", "full", "shared"], index_topk=64)
    files = files_at(case.directory)
    arguments = EngineArguments(device="cpu", pipeline_parallel_size=2, max_model_len=64, kv_cache_memory="8MiB")
    assert plan_engine(files, arguments).config.parallel.pipeline == 2
    with pytest.raises(ConfigError, match="layer 2 reads the tokens"):
        plan_engine(files, replace(arguments, max_model_len=65))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("glm4_moe", "scoring_func", "softmax"),
        ("glm4_moe", "topk_method", "greedy"),
        ("glm4_moe", "n_group", 3),
        ("glm4_moe", "num_experts_per_tok", 9),
        ("glm4_moe", "use_sliding_window", True),
        ("glm4_moe", "first_k_dense_replace", -1),
        ("solar_open", "first_k_dense_replace", 1),
        ("solar_open", "use_qk_norm", True),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("minimax_m2", "shared_intermediate_size", 32),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "sliding_window", 128),
        ("exaone_moe", "mlp_layer_types", ["dense", "sparse"]),
        ("exaone_moe", "num_shared_experts", -1),
        ("ernie4_5_moe", "use_bias", True),
        ("ernie4_5_moe", "moe_norm_min", 0.5),
        ("ernie4_5_moe", "moe_k", 9),
        ("hunyuan_v1_moe", "num_experts", [4, 4, 8]),
        ("hunyuan_v1_moe", "moe_intermediate_size", 64),
        ("hunyuan_v1_moe", "num_shared_expert", 2),
        ("hunyuan_v1_moe", "moe_layer_num_skipped", 1),
        ("hunyuan_v1_moe", "use_cla", True),
        ("hunyuan_v1_moe", "use_mixed_mlp_moe", False),
        ("llama4_text", "num_experts_per_tok", 2),
        ("llama4_text", "moe_layers", 1),
        ("llama4_text", "layer_types", ["sliding_attention"] * 3),
        ("llama4_text", "floor_scale", 0),
        ("deepseek_v32", "index_topk", 0),
        ("deepseek_v32", "index_head_dim", 41),
        ("deepseek_v32", "index_head_dim", 7),
        ("deepseek_v32", "q_lora_rank", None),
        ("glm_moe_dsa", "indexer_types", ["shared", "full", "full"]),
        ("glm_moe_dsa", "indexer_types", ["full", "full"]),
        ("deepseek_v32", "attention_bias", True),
        ("glm4_moe_lite", "scoring_func", "softmax"),
        ("mistral4", "n_group", 2),
        ("mistral4", "rope_parameters", [1]),
        ("dots1", "layer_types", ["full_attention"]),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "num_experts", 0),
        ("granitemoe", "num_experts_per_tok", 5),
        ("granitemoeshared", "shared_intermediate_size", -1),
    ],
)
def test_what_would_change_the_output_is_refused(name: str, key: str, value: object, tmp_path: Path) -> None:
    change_config(written(name, tmp_path).directory, **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
