"""Gemma 2 and 3 against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from family_bench import (
    BACKENDS,
    PROMPTS,
    SIZES,
    check_parity,
    hf_checkpoint,
    hf_model,
    logits_of,
    needs_program,
    randomize,
)
from gguf_files import stored, write_gguf
from quire.config.model import Heads
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.models.gemma import GEMMA3
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, engine_config

transformers = pytest.importorskip("transformers")
SMALL = SIZES | {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6}


@pytest.mark.parametrize("attention", BACKENDS)
def test_gemma_2(attention: str, tmp_path: Path) -> None:
    more = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    check_parity(hf_checkpoint(tmp_path, transformers.Gemma2Config(**SMALL, **more)), attention=attention)


def gemma3(**changes: object) -> object:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"query_pre_attn_scalar": 24, "layer_types": kinds, "rope_parameters": rope}
    return transformers.Gemma3TextConfig(**(SMALL | more | changes))


@pytest.mark.parametrize("attention", BACKENDS)
def test_gemma_3(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, gemma3()), attention=attention)


def test_gemma_3_in_the_older_spelling(tmp_path: Path) -> None:
    model = hf_model(gemma3(layer_types=None, sliding_window_pattern=2))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    config |= {
        "rope_theta": 5_000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window_pattern": 2,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    check_parity(tmp_path, attention="auto", model=model)


def test_gemma_3_in_gguf(tmp_path: Path) -> None:
    """Files store norm weights plus one, and say little of windows and positions."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    more = {"layer_types": None, "num_hidden_layers": 7, "rope_parameters": rope, "query_pre_attn_scalar": 16}
    model = hf_model(gemma3(**more))
    assert GEMMA3.gguf is not None
    names = {hf: gguf for gguf, hf in {**GEMMA3.gguf.inner}.items()}
    outer = {hf: gguf for gguf, hf in GEMMA3.gguf.outer.items()}
    tensors = []
    for name, tensor in model.state_dict().items():
        values = (tensor + 1.0 if name.endswith("norm.weight") else tensor).numpy()
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            tensors.append(stored(f"blk.{number}.{names[rest.removesuffix('.weight')]}.weight", values))
        elif name != "lm_head.weight":
            tensors.append(stored(outer[name], values))
    settings = {
        "context_length": 128, "embedding_length": SIZES["hidden_size"], "block_count": 7,
        "feed_forward_length": SIZES["intermediate_size"], "attention.head_count": 2, "attention.head_count_kv": 1,
        "attention.key_length": 16, "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 6, "rope.freq_base": 1_000_000.0, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }  # fmt: skip
    metadata = {"general.architecture": "gemma3"} | {f"gemma3.{key}": value for key, value in settings.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    check_parity(path, attention="auto", model=model)


@pytest.mark.parametrize("attention", ["reference", "native"])
def test_norm_weights_keep_the_digits_that_one_more_would_cost_them(attention: str, tmp_path: Path) -> None:
    """In bfloat16, one plus a small number is one: its digits are kept, and used, in float32."""
    if attention == "native":
        needs_program()
    hf_checkpoint(tmp_path, gemma3())
    checkpoint = HfCheckpoint(tmp_path)
    bench = Bench(checkpoint, engine_config(dtype="bfloat16"), attention=attention)  # type: ignore[arg-type]
    norm = bench.worker._runner._model.model.norm  # type: ignore[attr-defined]
    x = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    with torch.inference_mode():
        found = norm(x).float().cpu()
    expected = F.rms_norm(x.float().cpu(), x.shape[1:], checkpoint.read("model.norm.weight").float() + 1.0, 1e-6)
    torch.testing.assert_close(norm.weight.cpu(), checkpoint.read("model.norm.weight").float() + 1.0)
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-3)
    bench.add(0, [5, 6, 7, 8])
    bench.run(chunks=[Chunk(0, 0, 4, (0,))])
    bench.run(decode=[0])


@pytest.mark.parametrize("old", [False, True])
def test_a_gemma_3_for_images_too_is_read_for_its_text(old: bool, tmp_path: Path) -> None:
    """Old exporters call the tensors otherwise."""
    text = gemma3().to_dict()  # type: ignore[attr-defined]
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    tokens = {"image_token_index": 60, "boi_token_index": 59, "eoi_token_index": 58}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, attn_implementation="eager", **tokens
    )
    model = randomize(transformers.Gemma3ForConditionalGeneration(config).eval().float())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any("vision_tower." in name for name in tensors)
    texts = {
        name.split("language_model.")[1].removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if "language_model." in name
    }
    others = {name.removeprefix("model."): value for name, value in tensors.items() if "language_model." not in name}
    places = ("language_model.model.", "") if old else ("model.language_model.", "model.")
    renamed = [
        {place + name: tensor for name, tensor in some.items()}
        for place, some in zip(places, (texts, others), strict=True)
    ]
    save_file(renamed[0] | renamed[1], file)
    for prompt, (_, logits) in zip(PROMPTS, logits_of(tmp_path), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[0], wanted, rtol=1e-3, atol=2e-4)


def test_published_gemma_3_models_for_images_leave_the_usual_sizes_out(tmp_path: Path) -> None:
    said = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2_560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1_024,
        },
        "vision_config": {
            "hidden_size": 1_152, "image_size": 896, "intermediate_size": 4_304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = hf_model_config(tmp_path)
    whole = transformers.Gemma3Config(text_config=dict(said["text_config"]))
    theirs, theirs_token = whole.text_config, whole.image_token_id
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (theirs.vocab_size, 2_560, 34)
    assert config.heads == Heads(theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert config.windows == tuple(1_024 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert (config.rope.kind, dict(config.rope.scaling)["factor"]) == ("linear", 8.0)
    assert config.eos_ids == (1, 106)
    assert config.vision is not None
    assert (config.vision.merge, config.vision.grid.unit, config.vision.grid.max_tokens) == (4, 56, 256)
    assert config.vision.grid.token_id == theirs_token
