"""Decoders stored without an output head: they embed, as transformers' AutoModel does, and generate nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_server import save_pooling
from quire import LLM, ConfigError, InvalidRequest, ModelLoadError, PoolingParams, SamplingParams

transformers = pytest.importorskip("transformers")
TEXTS = [[5, 9, 2, 11, 7], [40, 4], [6], [5, 9, 2, 11, 7, 3, 8, 4, 30, 12] * 3]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": None,
}  # fmt: skip


def save(folder: Path, kind: str, **fields: Any) -> Any:
    """Save a tiny random model without a head, and return transformers' own model of the files."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **fields)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(model).__name__ == f"{kind}Model"
    return model


def states(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([text])).last_hidden_state[0]
    return found


def load(path: Path, **settings: Any) -> LLM:
    usual = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 64}
    return LLM(path, skip_tokenizer_init=True, **usual, **settings)


def close_to(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 16}),
    ],
)
def test_a_decoder_without_a_head_embeds_by_the_last_token(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, kind, **fields)
    with load(tmp_path) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            close_to(output.outputs.embedding, torch.nn.functional.normalize(states(model, text)[-1], dim=0))
        (raw,) = llm.embed([TEXTS[0]], pooling_params=PoolingParams(normalize=False))
        close_to(raw.embedding, states(model, TEXTS[0])[-1])


def test_a_decoder_without_a_head_pools_as_its_files_say(tmp_path: Path) -> None:
    model = save(tmp_path, "Mistral")
    save_pooling(tmp_path, "mean_tokens")
    with load(tmp_path) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            close_to(output.embedding, torch.nn.functional.normalize(states(model, text).mean(dim=0), dim=0))


def test_a_decoder_without_a_head_generates_nothing(tmp_path: Path) -> None:
    assert save(tmp_path, "Mistral") is not None
    with load(tmp_path) as llm:
        for call in (llm.generate, llm.start):
            with pytest.raises(InvalidRequest, match="is a decoder without output head: it makes embeddings and"):
                call([TEXTS[0]], SamplingParams(max_tokens=2))  # type: ignore[operator]
        with pytest.raises(InvalidRequest, match="has no labels"):
            llm.classify([TEXTS[0]])
    with pytest.raises(ConfigError, match="^task: 'generate' is for models that generate .* without output head"):
        load(tmp_path, task="generate")
    with pytest.raises(ConfigError, match="^task: 'classify' is not what this model does"):
        load(tmp_path, task="classify")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"is_causal": False}, "is_causal"),
        ({"classifier_from_token": ["no", "yes"]}, "classifier_from_token"),
        ({"architectures": ["Gemma3TextModel"]}, "use_bidirectional_attention: this class is only read as an encoder"),
    ],
)
def test_an_embedder_with_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    assert save(tmp_path, "Qwen3") is not None
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ModelLoadError, match=key):
        load(tmp_path)
