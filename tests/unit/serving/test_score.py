"""LLM.score, classify and encode: cross-encoders and classifiers against transformers, and encoders by cosine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encoder_models import hf_classifier, hf_encoder
from quire import LLM, ClassificationOutput, InvalidRequest, ModelLoadError, PoolingParams, ScoreOutput
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer as OurTokenizer

pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "on"]


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def save(path: Path, model: Any, **changes: Any) -> LLM:
    model.save_pretrained(path)
    word_tokenizer().save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return LLM(path, device="cpu")


def logits(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types or [0] * len(ids)]))
    return found.logits[0]  # type: ignore[no-any-return]


def test_a_cross_encoder_reads_both_texts(tmp_path: Path) -> None:
    model = hf_classifier("bert", 1)
    with save(tmp_path, model) as llm:
        one, other = llm.score("the cat", ["sat on", "cats"])
        assert isinstance(one, ScoreOutput)
        assert one.prompt_token_ids == [2, 4, 5, 3, 6, 8, 3]
        wanted = torch.sigmoid(logits(model, one.prompt_token_ids, [0, 0, 0, 0, 1, 1, 1]))
        assert one.outputs.score == pytest.approx(wanted.item(), abs=1e-5)
        assert llm.score(["the", "the cat"], ["on", "cats"])[1].outputs.score == pytest.approx(
            other.outputs.score, abs=1e-6
        )
        (raw,) = llm.score("the cat", "sat on", pooling_params=PoolingParams(activate=False))
        assert raw.outputs.score == pytest.approx(
            logits(model, one.prompt_token_ids, [0] * 4 + [1] * 3).item(), abs=1e-4
        )
        with pytest.raises(InvalidRequest, match="is a classifier and makes no embeddings"):
            llm.embed("cat")
        with pytest.raises(InvalidRequest, match="data_1: has 2 texts, and the other side has 3"):
            llm.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(InvalidRequest, match="data_1: must be a text"):
            llm.score([], "cat")
        with pytest.raises(InvalidRequest, match="data_2: must be a text"):
            llm.score("cat", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}},
    ],
)
def test_a_cross_encoder_may_say_that_its_logits_are_scores(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = hf_classifier("bert", 1)
    with save(tmp_path, model, **changes) as llm:
        (found,) = llm.score("the", "cat")
        wanted = logits(model, [2, 4, 3, 5, 3], [0, 0, 0, 1, 1])
        assert found.outputs.score == pytest.approx(wanted.item(), abs=1e-4)


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the activation 'system' is not supported"):
        save(tmp_path, hf_classifier("bert", 1), sbert_ce_default_activation_function="os.system")


@pytest.mark.parametrize(("problem", "activate"), [(None, torch.softmax), ("multi_label_classification", None)])
def test_a_classifier_gives_the_probabilities_of_its_labels(tmp_path: Path, problem: Any, activate: Any) -> None:
    model = hf_classifier("bert", 3)
    labels = {"0": "bad", "1": "so so", "2": "good"}
    with save(tmp_path, model, id2label=labels, problem_type=problem) as llm:
        (found,) = llm.classify("the cats sat")
        assert isinstance(found, ClassificationOutput)
        raw = logits(model, found.prompt_token_ids)
        wanted = torch.sigmoid(raw) if activate is None else torch.softmax(raw, -1)
        torch.testing.assert_close(torch.tensor(found.outputs.probs), wanted, rtol=1e-4, atol=1e-5)
        assert found.outputs.labels == ("bad", "so so", "good")
        assert found.outputs.num_classes == 3
        (plain,) = llm.encode("the cats sat", pooling_task="classify")
        assert plain.outputs.data == found.outputs.probs
        with pytest.raises(InvalidRequest, match="pooling_task: 'embed' is not what this model does"):
            llm.encode("cat", pooling_task="embed")
        with pytest.raises(InvalidRequest, match="a classifier with 3 labels, and a score needs one label"):
            llm.score("a", "b")


def test_labels_that_have_gaps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="must name the labels 0, 1 and so on"):
        save(tmp_path, hf_classifier("bert", 3), id2label={"0": "a", "2": "b", "x": "c"})


def test_an_encoder_scores_by_the_cosine_of_embeddings(tmp_path: Path) -> None:
    with save(tmp_path, hf_encoder("bert")) as llm:
        same, other = llm.score("the cat", ["the cat", "sat on"])
        assert same.outputs.score == pytest.approx(1.0, abs=1e-5)
        first, second = (torch.tensor(output.outputs.embedding) for output in llm.embed(["the cat", "sat on"]))
        assert other.outputs.score == pytest.approx((first @ second).item(), abs=1e-5)
        with pytest.raises(InvalidRequest, match="makes embeddings and has no labels"):
            llm.classify("cat")


def test_embeddings_are_cut_only_where_the_model_says_so(tmp_path: Path) -> None:
    with save(tmp_path / "plain", hf_encoder("bert")) as llm:
        with pytest.raises(InvalidRequest, match="dimensions: cannot be chosen: the embeddings .* have 64 values"):
            llm.embed("cat", pooling_params=PoolingParams(dimensions=8))
        (whole,) = llm.embed("cat", pooling_params=PoolingParams(dimensions=64))
        (raw,) = llm.embed("cat", pooling_params=PoolingParams(normalize=False))
        assert torch.tensor(whole.embedding).norm().item() == pytest.approx(1.0, abs=1e-5)
        assert torch.tensor(raw.embedding).norm().item() != pytest.approx(1.0, abs=1e-2)
    with save(tmp_path / "nested", hf_encoder("bert"), matryoshka_dimensions=[8, 32]) as llm:
        (cut,) = llm.embed("cat", pooling_params=PoolingParams(dimensions=8))
        wanted = torch.nn.functional.normalize(torch.tensor(raw.embedding)[:8], dim=0)
        torch.testing.assert_close(torch.tensor(cut.embedding), wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(InvalidRequest, match="dimensions: must be one of 8, 32, got 9"):
            llm.embed("cat", pooling_params=PoolingParams(dimensions=9))


@pytest.mark.parametrize("most", range(3, 14))
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(most: int) -> None:
    backend = word_tokenizer()
    ours = OurTokenizer(word_tokenizer(), SpecialTokens(None, (), None))
    backend.enable_truncation(most)  # the longest first
    pairs = [("the cat", "sat on the cats on"), ("sat on the cat sat", "the"), ("the cat sat", "cat on the")]
    found = ours.encode_pairs([one for one, _ in pairs], [other for _, other in pairs], most)
    for (ids, first), pair in zip(found, pairs, strict=True):
        wanted = backend.encode(*pair)
        assert ids == wanted.ids
        assert [int(place >= first) for place in range(len(ids))] == wanted.type_ids


def test_a_text_of_many_pairs_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OurTokenizer(word_tokenizer(), SpecialTokens(None, (), None))
    encoded: list[str] = []
    encode = ours.encode_batch
    monkeypatch.setattr(ours, "encode_batch", lambda texts, *more: encoded.extend(texts) or encode(texts, *more))
    assert len(list(ours.encode_pairs(["the cat"] * 50, ["sat", "on"] * 25))) == 50
    assert sorted(encoded) == ["on", "sat", "the cat"]
