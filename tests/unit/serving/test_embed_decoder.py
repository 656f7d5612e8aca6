"""LLM.embed of a model that generates text: the state of the last token, as transformers computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, ConfigError, InvalidRequest, PoolingParams, SamplingParams

transformers = pytest.importorskip("transformers")
TEXTS = [[5, 9, 2, 11, 7], [40, 4], [6], [5, 9, 2, 11, 7, 3, 8, 4, 30, 12] * 3]

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES)
    return transformers.Qwen3ForCausalLM(config).eval()


def expected(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        state = model.model(input_ids=torch.tensor([text])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0)


def load(path: Path, **settings: Any) -> LLM:
    usual = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 64}
    return LLM(path, skip_tokenizer_init=True, **usual, **settings)


def test_the_state_of_the_last_token_is_the_embedding(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with load(tmp_path) as llm:
        before = llm.generate([TEXTS[0]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.embed(TEXTS)
            for text, output in zip(TEXTS, outputs, strict=True):
                assert output.prompt_token_ids == text
                torch.testing.assert_close(
                    torch.tensor(output.outputs.embedding), expected(model, text), rtol=1e-4, atol=1e-4
                )
        assert llm.stats().prefix_hits > 0
        after = llm.generate([TEXTS[0]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids
        (raw,) = llm.embed([TEXTS[0]], pooling_params=PoolingParams(normalize=False))
        assert torch.tensor(raw.embedding).norm().item() != pytest.approx(1.0, abs=1e-2)
        with pytest.raises(InvalidRequest, match="has 64 tokens, the most are 63"):
            llm.embed([[5] * 64])
        with pytest.raises(InvalidRequest, match="has no labels"):
            llm.classify([TEXTS[0]])


def test_a_checkpoint_of_the_layers_alone_is_read(model: Any, tmp_path: Path) -> None:
    """As embedding models are published: without the head, and without what stands before names because of it."""
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with load(tmp_path) as llm:
        (output,) = llm.embed([TEXTS[0]])
        torch.testing.assert_close(torch.tensor(output.embedding), expected(model, TEXTS[0]), rtol=1e-4, atol=1e-4)
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with load(tmp_path) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            with torch.no_grad():
                mean = model.model(input_ids=torch.tensor([text])).last_hidden_state[0].mean(dim=0)
            wanted = torch.nn.functional.normalize(mean, dim=0)
            torch.testing.assert_close(torch.tensor(output.embedding), wanted, rtol=1e-4, atol=1e-4)


def test_a_decoder_with_one_label_scores_and_generates_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_labels=1)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    with load(tmp_path) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
            with torch.no_grad():
                wanted = torch.sigmoid(model(input_ids=torch.tensor([text])).logits[0])
            torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, rtol=1e-4, atol=1e-4)
        for call in (llm.generate, llm.start):
            with pytest.raises(InvalidRequest, match="is a classifier: it gives texts labels or scores"):
                call([TEXTS[0]])  # type: ignore[operator]
        with pytest.raises(InvalidRequest, match="makes no embeddings"):
            llm.embed([TEXTS[0]])
    with pytest.raises(ConfigError, match="^task: 'embed' is not what this model does"):
        load(tmp_path, task="embed")


def test_a_decoder_asked_to_score_compares_the_tokens_for_no_and_yes(model: Any, tmp_path: Path) -> None:
    """Prompts that callers wrote themselves are classified; without a tokenizer the answers must be token ids."""
    model.save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([
        {"path": "", "type": "sentence_transformers.base.modules.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]))  # fmt: skip
    (tmp_path / "1_LogitScore").mkdir()
    answers = {"false_token_id": 11, "true_token_id": 30}
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps(answers))
    with load(tmp_path) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text])).logits[0, -1]
            wanted = logits[[11, 30]].softmax(dim=0)[1:]
            torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, rtol=1e-4, atol=1e-4)
        assert llm.generate([TEXTS[0]], SamplingParams(max_tokens=2))[0].finished


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "classify"}, "^task: 'classify' needs labels"),
        ({"convert": "classify"}, "^convert: 'classify' needs labels"),
        ({"task": "dance"}, "^task: 'dance' is unknown"),
        ({"task": "embed", "runner": "generate"}, "^runner: is 'generate', but task is 'embed'"),
    ],
)
def test_a_task_that_a_decoder_does_not_do_is_refused(
    model: Any, tmp_path: Path, given: dict[str, str], words: str
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, **given)
