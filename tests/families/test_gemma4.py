"""Gemma 4's text models against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import (
    PROMPTS,
    SIZES,
    change_config,
    check_parity,
    hf_model,
    load_bench,
    logits_of,
    num_calls,
    randomize,
)
from gguf_files import stored, write_gguf
from interpreter import HAS_TRITON
from quire.config.kv_cache import PLAIN
from quire.config.memory import kv_block_bytes
from quire.config.model import Heads
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.models.gemma4 import GEMMA4
from quire.types.errors import ModelLoadError
from window_bench import groups_of

transformers = pytest.importorskip("transformers")
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
BACKENDS = ["reference", "gather", "auto", *(["triton"] if HAS_TRITON else [])]
ROPE = {
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5_000.0, "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
SMALL = SIZES | {
    "head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": 6, "layer_types": KINDS,
    "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 0, "rope_parameters": ROPE,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LARGE = {  # fewer, larger heads in layers that see all: two of them share a plane
    "global_head_dim": 32, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
}  # fmt: skip
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}

MIXTURE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}


def gemma4(**changes: Any) -> Any:
    return transformers.Gemma4TextConfig(**(SMALL | changes))


def saved(folder: Path, **changes: Any) -> torch.nn.Module:
    """With scalars of layers that are not one."""
    model = hf_model(gemma4(**changes))
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.3 * number)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        *((attention, {"final_logit_softcapping": 3.0, "attention_bias": True}) for attention in BACKENDS),
        *((attention, {"attention_k_eq_v": True, "hidden_size_per_layer_input": 6}) for attention in BACKENDS[:3]),
        *((attention, MIXTURE) for attention in BACKENDS),
        *((attention, {**SHARED, "hidden_size_per_layer_input": 8}) for attention in BACKENDS[:3]),
        *((attention, {"global_head_dim": 32, **SHARED}) for attention in BACKENDS[:3]),
        *((attention, LARGE) for attention in BACKENDS),
    ],
)
def test_gemma_4(attention: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, **changes)
    check_parity(tmp_path, attention=attention, model=model)


@pytest.mark.parametrize("heads", [{}, LARGE | {"head_dim": 32, "global_head_dim": 64}])
@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_bfloat16_is_near_float32(attention: str, heads: dict[str, Any], tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "hidden_size_per_layer_input": 32, "attention_k_eq_v": True}
    saved(tmp_path, **(SHARED | changes | heads))
    wanted = logits_of(tmp_path, attention="reference")
    found = logits_of(tmp_path, attention=attention, dtype="bfloat16")
    for (_, logits), (_, near) in zip(wanted, found, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=0.1, atol=0.6)


def copied_keys(model: Any) -> int:
    """The weights of keys that are values too: they are stored once, and held twice."""
    sizes = {name: value.numel() for name, value in model.named_parameters() if ".self_attn." in name}
    return sum(
        size for name, size in sizes.items() if ".k_proj." in name and name.replace("k_proj", "v_proj") not in sizes
    )


def test_layers_say_how_many_weights_they_hold(tmp_path: Path) -> None:
    model = saved(tmp_path, **SHARED, hidden_size_per_layer_input=8, attention_k_eq_v=True)
    more = len(model.model.layers) + copied_keys(model)  # a scalar each
    assert copied_keys(model) > 0
    assert hf_model_config(tmp_path).num_parameters == sum(each.numel() for each in model.parameters()) + more


def test_a_mixture_runs_as_a_program_and_in_bfloat16(tmp_path: Path) -> None:
    """All experts are used: which are would depend on digits that bfloat16 has not."""
    saved(tmp_path, **(MIXTURE | {"top_k_experts": 5, "moe_intermediate_size": 32, "hidden_size": 64}))
    assert num_calls(load_bench(tmp_path)) == 0
    wanted, found = logits_of(tmp_path), logits_of(tmp_path, dtype="bfloat16")
    for (_, logits), (_, near) in zip(wanted, found, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=0.1, atol=0.6)


@pytest.mark.parametrize("count", [7, 12])
def test_what_gemma_4_takes_for_granted_is_what_transformers_does(count: int, tmp_path: Path) -> None:
    """It writes the numbers of layers with as many digits each."""
    theirs = transformers.Gemma4TextConfig(num_hidden_layers=count)
    theirs.save_pretrained(tmp_path)
    said = hf_model_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    silent = {key: value for key, value in values.items() if key in (*kept, "num_hidden_layers", "dtype")}
    tokens = {"bos_token_id": 2, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(silent | tokens))
    config = hf_model_config(tmp_path)
    assert config == said
    assert config.windows == {7: (*[512] * 5, None, None), 12: (*[512] * 5, None) * 2}[count]
    assert config.rope.kind == "proportional"
    assert config.per_layer_input == 256
    assert (config.heads, config.local_heads) == (Heads(8, 4, 512), Heads(8, 4, 256))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),  # and not of layer 3
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),  # that has a window
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.*full_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.*full_attention"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_scaling.*and nothing else"),
        ({"per_layer_config": []}, "per_layer_config.*only head_dim"),
        ({"per_layer_config": {layer: {"head_dim": 32} for layer in ("1", "3", "4")}}, "per_layer_config"),  # of 4
        ({"per_layer_config": {layer: {"head_dim": 32} for layer in ("1", "3", "01")}}, "per_layer_config"),
        ({"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 4}, "num_experts"),
        (MIXTURE | {"top_k_experts": 6}, "top_k_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0},
                }
            },
            "in .0, 1",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    gemma4().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=named):
        hf_model_config(tmp_path)


def test_positions_in_the_old_spelling_are_not_ignored(tmp_path: Path) -> None:
    gemma4().save_pretrained(tmp_path)
    said, path = hf_model_config(tmp_path), tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["rope_scaling"] = values.pop("rope_parameters")
    path.write_text(json.dumps(values))
    assert hf_model_config(tmp_path) == said
    assert transformers.Gemma4TextConfig.from_pretrained(tmp_path).rope_parameters == values["rope_scaling"]


def test_heads_are_those_of_transformers(tmp_path: Path) -> None:
    """However config.json says them: for all layers of a kind, or for each layer by its number."""
    published = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    gemma4(**published).save_pretrained(tmp_path)
    by_layer, path = hf_model_config(tmp_path), tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["per_layer_config"]
    path.write_text(json.dumps(values | published))
    config = hf_model_config(tmp_path)
    assert config == by_layer
    assert (config.heads, config.local_heads) == (Heads(4, 1, 32), Heads(4, 2, 16))
    change_config(tmp_path, attention_k_eq_v=False)
    assert hf_model_config(tmp_path).heads == Heads(4, 2, 32)
    change_config(tmp_path, layer_types=["full_attention"] * 4)
    config = hf_model_config(tmp_path)
    assert (config.heads, config.local_heads) == (Heads(4, 2, 32), None)


def test_layers_that_read_the_keys_of_others_keep_nothing(tmp_path: Path) -> None:
    gemma4(**SHARED, global_head_dim=32).save_pretrained(tmp_path)
    config = hf_model_config(tmp_path)
    assert [(spec.kind, spec.numbers) for spec in config.kv_specs] == [("window", 64), ("full", 128)]
    assert [config.place_of(config.kv_layer_of(layer)) for layer in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("changes", [LARGE, {"global_head_dim": 32, **SHARED}])
@pytest.mark.parametrize("split", [False, True])
def test_the_memory_plan_counts_what_is_allocated(changes: dict[str, Any], split: bool, tmp_path: Path) -> None:
    saved(tmp_path, **changes)
    bench = load_bench(tmp_path, split=split)
    config, groups = bench.model_config, groups_of(bench.model_config) if split else PLAIN
    cache = bench.worker.cache
    counted = kv_block_bytes(config, "float32", cache.block_size, groups) * cache.num_blocks
    assert cache.blocks.nbytes == counted
    kept = sum(layer.key.nbytes + layer.value.nbytes for layer in cache.layers)
    assert counted / 2 < kept / (1 + groups.num_window_blocks) <= counted


@pytest.mark.parametrize(("changes", "count"), [(LARGE, 2), ({"global_head_dim": 32, **SHARED}, 4)])
def test_the_first_layers_that_launch_all_kernels_have_all_kinds_of_heads(
    changes: dict[str, Any], count: int, tmp_path: Path
) -> None:
    saved(tmp_path, **changes)
    model: Any = load_bench(tmp_path).worker._runner._model
    assert model.num_varied == count


def wrapped(folder: Path, **changes: Any) -> torch.nn.Module:
    """A model for text, images and sound."""
    text = {key: value for key, value in (SMALL | changes).items() if key != "attn_implementation"}
    tower = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 3_360,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=tower, audio_config={"hidden_size": 16, "num_hidden_layers": 1},
        image_token_id=60, attn_implementation="eager",
    )  # fmt: skip
    model = randomize(transformers.Gemma4ForConditionalGeneration(config).eval().float())
    model.save_pretrained(folder)
    return model


def check_text(folder: Path, model: torch.nn.Module, **options: Any) -> None:
    for prompt, (_, logits) in zip(PROMPTS, logits_of(folder, **options), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[0], wanted, rtol=1e-3, atol=2e-4)


def test_a_model_for_text_images_and_sound_is_read_for_its_text(tmp_path: Path) -> None:
    """Published checkpoints hold keys and values of all layers, also of those that read the keys of others."""
    model = wrapped(tmp_path, **SHARED, global_head_dim=32, hidden_size_per_layer_input=8)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    assert any(name.startswith("model.audio_tower.") for name in tensors)
    path = "model.language_model.layers.3.self_attn"
    unread = {"k_proj.weight": (64, 32), "v_proj.weight": (64, 32), "k_norm.weight": (32,)}
    assert not any(f"{path}.{name}" in tensors for name in unread)
    save_file(tensors | {f"{path}.{name}": torch.ones(shape) for name, shape in unread.items()}, file)
    check_text(tmp_path, model)


@pytest.mark.parametrize(
    "name", ["model.smell_tower.weight", "model.language_model.layers.1.self_attn.v_norm.weight", "model.extra.weight"]
)
def test_weights_that_nobody_knows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    wrapped(tmp_path, **SHARED, global_head_dim=32)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(4)}, file)
    with pytest.raises(ModelLoadError, match="has no place"):
        load_bench(tmp_path)


GGUF_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


def gguf_file(path: Path, model: Any, kind: str = "F32", **changes: Any) -> Path:
    """As converters write it: what layers have of their own comes as lists, angles that never turn as a tensor."""
    assert GEMMA4.gguf is not None
    inner = {hf.removesuffix(".weight"): gguf for gguf, hf in GEMMA4.gguf.inner.items()}
    outer = {hf: gguf for gguf, hf in GEMMA4.gguf.outer.items()}
    tensors = []
    for theirs, tensor in model.state_dict().items():
        name = GEMMA4.rename(theirs)
        if name is None or name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            gguf = inner[rest.removesuffix(".weight").replace(".experts.", ".experts.*.")]
            place = f"blk.{number}.{gguf}" if gguf.endswith((".weight", ".scale")) else f"blk.{number}.{gguf}.weight"
        else:
            place = outer[name]
        tensors.append(stored(place, tensor.numpy(), kind if tensor.dim() > 1 else "F32"))
    config = model.config
    if config.num_kv_shared_layers:  # what nobody reads
        tensors += [stored(f"blk.3.attn_{name}.weight", np.ones((64, config.hidden_size))) for name in "kv"]
    turning = int(config.per_layer_config[1].head_dim * 0.25 / 2)
    rest = config.per_layer_config[1].head_dim // 2 - turning
    tensors.append(stored("rope_freqs.weight", np.array([1.0] * turning + [1e30] * rest)))
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    heads = [config.per_layer_config[layer].num_key_value_heads for layer in range(4)]
    wide = config.use_double_wide_mlp
    settings = {
        "context_length": 128, "embedding_length": config.hidden_size, "block_count": 4,
        "feed_forward_length": [48, 48, 96, 96] if wide else 48, "attention.head_count": 4,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
        "attention.value_length_swa": 16, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 6,
        "attention.sliding_window_pattern": windows, "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input, "rope.freq_base": 5_000.0,
        "rope.freq_base_swa": 100.0, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
        "final_logit_softcapping": 3.0,
    }  # fmt: skip
    if config.enable_moe_block:
        keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        numbers = (config.num_experts, config.top_k_experts, config.moe_intermediate_size)
        settings |= dict(zip(keys, numbers, strict=True))
    settings |= changes
    metadata = {"general.architecture": "gemma4"} | {f"gemma4.{key}": value for key, value in settings.items()}
    return write_gguf(path, metadata, tensors)


SMALL_FILE = {
    "global_head_dim": 32, **SHARED, "hidden_size_per_layer_input": 32, "rope_parameters": GGUF_ROPE,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
LARGE_FILE = LARGE | {"rope_parameters": GGUF_ROPE, "final_logit_softcapping": 3.0}


@pytest.mark.parametrize("changes", [SMALL_FILE, LARGE_FILE, LARGE_FILE | MIXTURE])
def test_gguf_files_are_read(changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, **changes)
    check_parity(gguf_file(tmp_path / "m.gguf", model), attention="auto", model=model)


def exact(model: Any, folder: Path) -> Any:
    """With matrices that Q8_0 stores without rounding."""
    for value in model.parameters():
        if value.dim() > 1:
            groups = value.data.mul_(256).round_().clamp_(-127, 127).view(-1, 32)
            groups[:, 0] = 127.0
            value.data.div_(256)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        SMALL_FILE | {"vocab_size_per_layer_input": 64},
        LARGE_FILE | MIXTURE | {"top_k_experts": 5, "moe_intermediate_size": 32},  # which are used depends on no digit
    ],
)
def test_quantized_gguf_files_are_read_as_they_are_stored(changes: dict[str, Any], tmp_path: Path) -> None:
    model = exact(saved(tmp_path, **(changes | {"intermediate_size": 64, "vocab_size": 64})), tmp_path)
    sizes = [64, 64, 128, 128] if model.config.use_double_wide_mlp else 64
    path = gguf_file(tmp_path / "m.gguf", model, "Q8_0", feed_forward_length=sizes)
    matrices = sum(value.numel() for value in model.parameters() if value.dim() > 1)
    assert open_checkpoint(files_at(path)).config.levels.parameters == matrices + copied_keys(model)
    found = logits_of(path, cpu_weights="integer16")
    for (_, logits), (_, near) in zip(logits_of(tmp_path), found, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention.head_count_kv": [2, 1, 1, 1]}, "head_count_kv"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"attention.sliding_window_pattern": [True] * 3}, "sliding_window_pattern"),
        ({"attention.value_length_swa": 8}, "value_length_swa"),
        ({"feed_forward_length": [48, 96, 96, 96]}, "feed_forward_length"),
        ({"attention.shared_kv_layers": 4}, "shared_kv_layers"),
        ({"expert_count": 4}, "expert_used_count"),
    ],
)
def test_gguf_settings_that_cannot_be_are_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", saved(tmp_path, **SMALL_FILE), **changes)
    with pytest.raises(ModelLoadError, match=named):
        load_bench(path)
