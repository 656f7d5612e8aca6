"""Whether settings of released checkpoints are read as transformers reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.rotary import frequencies
from quire.runtime.loading.hf.config import _read_family, _unfold
from quire.runtime.models.registry import find_family
from released_dense import DENSE
from released_encoders import ENCODERS
from released_mixtures import MIXTURES
from released_others import OTHERS
from released_rare import RARE

AutoConfig = pytest.importorskip("transformers").AutoConfig
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
RELEASED = DENSE | OTHERS | MIXTURES | RARE


def read(settings: dict[str, Any]) -> ModelConfig:
    config = Fields("config.json", settings)
    family = find_family(_read_family(config))
    return family.read(_unfold(config, family.nested))


def whole_of_transformers(settings: dict[str, Any]) -> Any:
    """Return transformers' config. Kimi K2's own code for it is DeepSeek V3's."""
    settings = copy.deepcopy(settings)
    kind = settings.pop("model_type")
    return AutoConfig.for_model({"kimi_k2": "deepseek_v3"}.get(kind, kind), **settings)


def of_transformers(settings: dict[str, Any]) -> Any:
    """Return transformers' config of the text model."""
    config = whole_of_transformers(settings).get_text_config(decoder=True)
    config.allow_global_per_layer_attribute_access = True
    return config


def first(config: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Return the window of each layer; () if there is none."""
    if config.model_type == "gpt_neo":
        return tuple(config.window_size if kind == "local" else None for kind in config.attention_layers)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:  # one kind of layers, with a window if the model has one
        has_window = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers
    sizes = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return tuple(map(sizes.get, kinds))


def key_heads_of(config: Any) -> int:
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return first(config, "num_key_value_heads") or config.num_attention_heads


@pytest.mark.parametrize("name", RELEASED)
def test_sizes_of_a_released_model_are_those_of_transformers(name: str) -> None:
    whole = whole_of_transformers(RELEASED[name])
    ours, theirs = read(RELEASED[name]), of_transformers(RELEASED[name])
    heads = theirs.num_attention_heads
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.heads.num_query) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size, heads,
    )  # fmt: skip
    if ours.latent is None:
        local = ours.local_heads or ours.heads
        dim = first(theirs, "head_dim") or theirs.hidden_size // heads
        assert (local.num_kv, local.dim) == (key_heads_of(theirs), dim)
    eps = first(theirs, "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    assert eps in (None, ours.norm_eps) or theirs.model_type == "olmo"  # OLMo's norms have one for all models
    # Mistral 3's files neither say that the head is tied nor share it: only transformers' default does.
    assert ours.tie_word_embeddings == (whole.tie_word_embeddings and name != "Mistral-Small-3.1-24B")
    assert (ours.windows or (None,) * ours.num_layers) == windows_of(theirs)


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of the most positions


@pytest.mark.parametrize("name", [*RELEASED, *ENCODERS])
def test_a_model_has_as_many_positions_as_its_file_says(name: str) -> None:
    settings = copy.deepcopy((RELEASED | ENCODERS)[name])
    inner = settings.get("text_config", settings)
    key = next((each for each in LENGTHS if each in inner), None)
    if key is None or "max_trained_positions" in inner:
        pytest.skip("its file does not say")
    inner[key] = 12_345
    ours = read(settings)
    assert ours.rope.max_position == 12_345 - (0 if ours.encoder is None else ours.encoder.position_offset)


def rotary_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters by type of layer; by None if all layers have the same."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = {kind: one for kind, one in given.items() if isinstance(one, dict)}
    return nested or ({None: given} if given else {})


@pytest.mark.parametrize("name", ENCODERS)
def test_windows_of_a_released_encoder_reach_as_far_as_in_transformers(name: str) -> None:
    ours, theirs = read(ENCODERS[name]), whole_of_transformers(ENCODERS[name])
    window, kinds = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None) or []
    reach = window - 1 if theirs.model_type == "gemma3_text" else window
    wanted = [reach if kind == "sliding_attention" else None for kind in kinds]
    found = [None if (seen := ours.window_of(layer)) is None else seen // 2 for layer in range(ours.num_layers)]
    assert found == (wanted or [None] * ours.num_layers)


@pytest.mark.parametrize("name", [*RELEASED, *ENCODERS])
def test_rotary_positions_of_a_released_model_are_those_of_transformers(name: str) -> None:
    settings = (RELEASED | ENCODERS)[name]
    ours, theirs = read(settings), of_transformers(settings)
    for kind, given in rotary_parameters(theirs).items():
        is_local = kind == "sliding_attention" and ours.local_rope is not None
        rope, heads = (ours.local_rope, ours.local_heads or ours.heads) if is_local else (ours.rope, ours.heads)
        assert rope is not None
        if "alpha" in given:  # Hunyuan's factor on theta
            assert (rope.kind, rope.theta) == (
                "default",
                given["rope_theta"] * given["alpha"] ** (heads.dim / (heads.dim - 2)),
            )
            continue
        dim = rope.dim or (ours.latent.rope_dim if ours.latent is not None else heads.dim)
        found, magnitude = frequencies(rope, dim)
        if given["rope_type"] == "default":
            expected, factor = given["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
        else:
            expected, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](theirs, device="cpu", layer_type=kind)
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=0)
        assert magnitude == pytest.approx(factor)


@pytest.mark.parametrize("name", ENCODERS)
def test_sizes_of_a_released_encoder_are_those_of_transformers(name: str) -> None:
    ours, theirs = read(ENCODERS[name]), whole_of_transformers(ENCODERS[name])
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.heads.num_query) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size, theirs.num_attention_heads,
    )  # fmt: skip
    assert ours.intermediate_size == first(theirs, "intermediate_size", "hidden_dim")
    assert ours.norm_eps == (first(theirs, "layer_norm_eps", "norm_eps", "rms_norm_eps") or 1e-12)
    assert ours.encoder is not None
    assert ours.encoder.num_types == getattr(theirs, "type_vocab_size", 0)
    skips = any(name in theirs.model_type for name in ("roberta", "camembert", "mpnet"))
    assert ours.encoder.position_offset == (theirs.pad_token_id + 1 if skips else 0)
    assert (ours.encoder.embedding_size or ours.hidden_size) == (first(theirs, "embedding_size") or theirs.hidden_size)
    has_head = "SequenceClassification" in ENCODERS[name]["architectures"][0]
    assert ours.encoder.num_labels == (theirs.num_labels if has_head else 0)
