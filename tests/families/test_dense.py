"""Dense decoders in the forms of their published settings, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import BACKENDS, PROMPTS, SIZES, change_config, check_parity, hf_checkpoint, hf_model, logits_of
from family_models import FamilyCase
from quire.config.model import QUERY_SCALE, Rope
from quire.runtime.layers.rotary import Rotaries
from quire.runtime.layers.weights import Placement
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
MORE = {"num_hidden_layers": 4, "sliding_window": 5}


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("apertus", "hidden_act", "silu"),
        ("apertus", "post_norm", True),
        ("cohere2", "layer_types", ["sliding_attention", "chunked_attention", "full_attention"]),
        ("cohere2", "sliding_window_pattern", 0),
        ("exaone4", "sliding_window", None),
        ("glm4", "rope_scaling", {"rope_type": "spiral"}),
        ("ministral", "layer_types", ["full_attention"]),
        ("olmo", "clip_qkv", -1.0),
        ("gemma", "use_bidirectional_attention", True),
        ("nemotron", "hidden_act", "xielu"),
        ("llama", "hidden_act", "relu2"),
        ("ministral3", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_alpha": 0.1}),
        ("ministral3", "rope_parameters", {"rope_type": "default", "llama_4_scaling_beta": 0.1}),
        ("mistral", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}),
        ("hunyuan_v1_dense", "rope_scaling", {"type": "dynamic", "alpha": -1.0}),
        ("gptj", "rotary_dim", 18),
        ("gpt_bigcode", "scale_attn_weights", False),
        ("seed_oss", "use_sliding_window", True),
        ("ernie4_5", "hidden_act", "tanh"),
    ],
)
def test_what_would_change_the_output_is_refused(family: str, key: str, value: object, tmp_path: Path) -> None:
    case = FamilyCase(family, tmp_path)
    assert case.model is not None  # its files are there
    change_config(tmp_path, **{key: value}, **({"layer_types": None} if key == "sliding_window_pattern" else {}))
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize("kind", ["Cohere2Config", "Olmo3Config", "Exaone4Config"])
def test_layers_that_the_settings_do_not_list_follow_the_usual_pattern(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**(SIZES | MORE))
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    change_config(tmp_path, layer_types=None)
    assert [window is None for window in hf_model_config(tmp_path).windows] == [False, False, False, True]
    check_parity(tmp_path, attention="auto", model=model)


def test_old_settings_of_olmo_3_scale_the_positions_of_layers_without_a_window(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}
    model = hf_model(transformers.Olmo3Config(**(SIZES | MORE), rope_scaling=scaling | {"rope_type": "yarn"}))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling, "rope_theta": 500_000.0}))
    check_parity(tmp_path, attention="auto", model=model)


def test_a_small_exaone_has_positions_in_every_layer(tmp_path: Path) -> None:
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    check_parity(hf_checkpoint(tmp_path, transformers.Exaone4Config(**SIZES, **whole)), attention="auto")


@pytest.mark.parametrize("is_new", [False, True])
def test_a_mistral_for_images_is_read_for_its_text(is_new: bool, tmp_path: Path) -> None:
    """Exporters call the tensors in two ways."""
    model: Any = FamilyCase("mistral3", tmp_path).model
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("vision_tower.") for name in tensors)
    if is_new:
        places = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "": "model."}
        renamed = {}
        for name, tensor in tensors.items():
            place = next(place for place in places if name.startswith(place))
            renamed[places[place] + name.removeprefix(place)] = tensor
        save_file(renamed, file)
    for prompt, (_, logits) in zip(PROMPTS, logits_of(tmp_path), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[0], wanted, rtol=1e-3, atol=2e-4)


def test_the_first_gemmas_call_their_activation_gelu(tmp_path: Path) -> None:
    model = FamilyCase("gemma", tmp_path).model
    change_config(tmp_path, hidden_act="gelu", hidden_activation=None)
    check_parity(tmp_path, attention="auto", model=model)


@pytest.mark.parametrize("attention", BACKENDS)
def test_the_positions_of_hunyuan_have_a_larger_base(attention: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1_000.0, "factor": 1.0}
    config = transformers.HunYuanDenseV1Config(**SIZES, head_dim=16, rope_parameters=rope)
    check_parity(hf_checkpoint(tmp_path, config), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_ministral_3_inside_a_model_for_images_scales_its_queries(attention: str, tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 3, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
        "max_position_embeddings": 128,
    }  # fmt: skip
    text = {**SIZES, "model_type": "ministral3", "head_dim": 16, "rope_parameters": rope}
    case = FamilyCase("mistral3", tmp_path, {"text_config": text})
    check_parity(tmp_path, attention=attention, model=case.model)


@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_queries_of_ministral_3_are_scaled_with_every_kind_of_rope(kind: dict[str, Any], tmp_path: Path) -> None:
    more = {"rope_theta": 1e4, "original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.5}
    case = FamilyCase("ministral3", tmp_path, {"rope_parameters": {**kind, **more}})
    check_parity(tmp_path, attention="auto", model=case.model)


def test_queries_are_scaled_from_the_original_length_on() -> None:
    rope = Rope(kind="yarn", scaling=(("original_max_position_embeddings", 4.0), (QUERY_SCALE, 0.5)), max_position=64)
    scale = Rotaries(Placement(torch.float32, torch.device("cpu"))).query_scale(rope, 8)
    assert scale is not None
    angles = scale.angles(16)
    wanted = 1 + 0.5 * torch.log(1 + torch.arange(16).div(4, rounding_mode="floor"))
    torch.testing.assert_close(angles[:16, :4], wanted[:, None].expand(-1, 4))
    assert not angles[:, 4:].any()


def test_another_text_model_inside_mistral_3_is_refused(tmp_path: Path) -> None:
    assert FamilyCase("mistral3", tmp_path).model is not None
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"text_config\.model_type"):
        open_checkpoint(files_at(tmp_path))
