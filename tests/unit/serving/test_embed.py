"""LLM.embed, and what is refused of encoders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encoder_models import expected_states, hf_encoder
from quire import LLM, AsyncLLM, ConfigError, EmbeddingOutput, InvalidRequest, QuireError, SamplingParams
from quire.serving.cli import main
from tiny_served import write_tiny_model

pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    hf_encoder("bert").save_pretrained(path)
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    kinds = ("Transformer", "Pooling")
    modules = [{"path": "" if kind == "Transformer" else kind, "type": f"a.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "Pooling").mkdir()
    (path / "Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_num_seqs=2) as loaded:
        yield loaded


def test_texts_and_token_ids_are_embedded_as_the_files_say(llm: LLM) -> None:
    outputs = llm.embed(["The cats sat", [2, 5, 3], {"prompt": "on"}])
    assert [output.prompt_token_ids for output in outputs] == [[2, 4, 5, 7, 6, 3], [2, 5, 3], [2, 8, 3]]
    assert [output.prompt for output in outputs] == ["The cats sat", None, "on"]
    assert [output.num_prompt_tokens for output in outputs] == [6, 3, 3]
    model = hf_encoder("bert")
    for output in outputs:
        wanted = expected_states(model, output.prompt_token_ids)[0]
        torch.testing.assert_close(torch.tensor(output.embedding), wanted, rtol=1e-4, atol=1e-4)


def test_one_text_gives_one_output(llm: LLM) -> None:
    (output,) = llm.embed("cat")
    assert isinstance(output, EmbeddingOutput)
    assert llm.embed([]) == []
    assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == "[CLS] cat [SEP]"


def test_a_text_that_is_too_long_is_refused_unless_it_is_to_be_cut(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: has 9 tokens, the most are 8; .*truncate_prompt_tokens"):
        llm.embed(["cat", "cat " * 7])
    cut, kept, given = llm.embed(["cat " * 7, "cat", [4] * 9], truncate_prompt_tokens=5)
    assert cut.prompt_token_ids == [2, 5, 5, 5, 3]
    assert kept.prompt_token_ids == [2, 5, 3]
    assert given.prompt_token_ids == [4] * 5
    (most,) = llm.embed("cat " * 7, truncate_prompt_tokens=-1)
    assert most.num_prompt_tokens == 8


@pytest.mark.parametrize("given", [0, -2, 9, True, 1.5])
def test_a_truncation_that_means_nothing_is_refused(llm: LLM, given: int) -> None:
    with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens: must be in \[1, 8\]"):
        llm.embed("cat", truncate_prompt_tokens=given)


@pytest.mark.parametrize(("ids", "words"), [([], "has no tokens"), ([2, 97], "outside"), ([-1], "outside")])
def test_token_ids_that_are_none_are_refused(llm: LLM, ids: list[int], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.embed([ids])


def test_an_encoder_generates_nothing(llm: LLM) -> None:
    words = "is an encoder: it makes embeddings and generates no text; call embed"
    calls = [
        lambda: llm.generate("cat", SamplingParams(max_tokens=1)),
        lambda: llm.generate("cat"),
        lambda: llm.chat([{"role": "user", "content": "cat"}]),
        lambda: list(llm.stream("cat")),
        lambda: llm.start("cat"),
        llm.step,
        llm.stats,
        llm.get_default_sampling_params,
        lambda: llm.config,
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match=words):
            call()
    assert llm.embed("cat")


def test_other_ways_in_refuse_an_encoder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: is an encoder \(bert\)"):
        AsyncLLM(str(folder), device="cpu")


def test_the_doctor_says_what_an_encoder_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--device", "cpu", "--max-num-seqs", "7", "--max-num-batched-tokens", "90"]
    assert main(["doctor", "--model", str(folder), *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("model "))
    about, where, plan, *table = lines[start : start + 8]
    assert ": bert, " in about
    assert where == "makes embeddings on cpu in float32 (LLM.embed), generates no text"
    assert plan == "memory plan"
    assert [line.split()[0] for line in table[:4]] == ["weights", "activations", "process", "total"]
    assert table[4] == "  a batch has up to 7 texts and 90 tokens, a text up to 8"


def test_the_doctor_says_which_setting_an_encoder_cannot_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(folder), "--max-num-batched-tokens", "7"]) == 1
    assert "no memory plan: max_num_batched_tokens: is 7, and a text may have 8 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory: is for models that generate text"),
        ({"quantization": "fp8"}, "quantization: is for models that generate text"),
        ({"max_model_len": 65}, "the model knows 64 positions"),
        ({"max_num_batched_tokens": 7}, "a text may have 8 tokens"),
    ],
)
def test_settings_without_meaning_for_an_encoder_are_refused(
    folder: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(folder, device="cpu", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("task", "generate"),
        ("runner", "generate"),
        ("generation_config", "none"),
        ("override_generation_config", {"temperature": 0.5}),
    ],
)
def test_what_is_for_models_that_generate_text_is_refused_by_name(folder: Path, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: .*this one is an encoder"):
        LLM(folder, device="cpu", **{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"task": "embed"}, {"runner": "pooling"}, {"task": "auto", "convert": "embed"}])
def test_an_encoder_may_be_asked_for_embeddings_in_the_words_of_others(folder: Path, asked: dict[str, str]) -> None:
    with LLM(folder, device="cpu", **asked) as loaded:  # type: ignore[arg-type]
        assert len(loaded.embed("cat")) == 1


@pytest.mark.parametrize(("setting", "value"), [("task", "embed"), ("runner", "pooling"), ("convert", "embed")])
def test_a_model_that_generates_text_may_be_asked_for_embeddings_too(tmp_path: Path, setting: str, value: str) -> None:
    write_tiny_model(tmp_path)
    usual = {"device": "cpu", "load_format": "dummy", "num_kv_blocks": 200, "skip_tokenizer_init": True}
    with LLM(tmp_path, **usual, **{setting: value}) as loaded:  # type: ignore[arg-type]
        assert len(loaded.embed([[4, 5, 6]])[0].outputs.embedding) > 0
    with pytest.raises(ConfigError, match=f"^{setting}: "):
        AsyncLLM(str(tmp_path), **{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("task", "classify"), ("convert", "classify")])
def test_an_encoder_without_labels_refuses_to_classify(folder: Path, setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: '{value}' is not what this model does; .*use \"embed\""):
        LLM(folder, device="cpu", **{setting: value})  # type: ignore[arg-type]


def test_a_salt_means_nothing_where_nothing_is_cached(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequest, match=r"cache_salt: of prompts\[1\] has no effect: an encoder has no prefix cache"
    ):
        llm.embed(["cat", {"prompt": "sat", "cache_salt": "mine"}])


def test_the_user_may_allow_longer_texts_than_the_files(folder: Path) -> None:
    with LLM(folder, device="cpu", max_model_len=64, skip_tokenizer_init=True) as llm:
        (output,) = llm.embed([[4] * 60])
        assert output.num_prompt_tokens == 60
        with pytest.raises(InvalidRequest, match="there is no tokenizer"):
            llm.embed("cat")
    with pytest.raises(QuireError, match="was closed"):
        llm.embed([[4]])


def test_random_weights_embed_too(folder: Path) -> None:
    with LLM(folder, device="cpu", load_format="dummy") as llm:
        assert len(llm.embed("cat")[0].embedding) == 64


def test_the_padding_token_of_a_model_that_counts_positions_past_it_is_refused(tmp_path: Path) -> None:
    hf_encoder("roberta").save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", skip_tokenizer_init=True) as roberta:
        assert len(roberta.embed([[7, 9]])) == 1
        with pytest.raises(InvalidRequest, match="padding token 1"):
            roberta.embed([[7, 1, 9]])
