"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.runtime.loading.files import ModelFiles
from quire.serving.text.chat_template import ChatTemplates
from quire.serving.text.gguf_tokenizer import build_gguf_tokenizer
from quire.serving.text.tokenizer import Tokenizer, load_tokenizer
from quire.types.errors import InvalidRequest, ModelLoadError
from tests.unit.serving.text.vocabularies import byte_level, sentencepiece, spell


def write(directory: Path, metadata: dict[str, Any] | None = None, **files: Any) -> ModelFiles:
    """A directory with a tokenizer.json made from GGUF metadata, and the given JSON files beside it."""
    backend, _ = build_gguf_tokenizer(metadata or byte_level(), "model.gguf")
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelFiles("tiny", directory, "hf")


def load(directory: Path, metadata: dict[str, Any] | None = None, **files: Any) -> Tokenizer:
    return load_tokenizer(write(directory, metadata, **files))


def test_a_directory_without_tokenizer_json_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer.json: no such file.*save_pretrained"):
        load_tokenizer(ModelFiles("tiny", tmp_path, "hf"))


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    files = write(tmp_path)
    (tmp_path / f"{name}.json").write_text('{"a": ', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=f"{name}.json: is not "):
        load_tokenizer(files)


def test_a_pointer_of_git_lfs_is_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is a pointer of Git LFS.*git lfs pull"):
        load_tokenizer(ModelFiles("tiny", tmp_path, "hf"))


def test_a_configuration_that_was_saved_on_windows_is_read(tmp_path: Path) -> None:
    files = write(tmp_path)
    text = '{\n"eos_token": "<|end|>",\n"chat_template": "{{ 1 }}"\n}\n'.replace("\n", "\r\n")
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_tokenizer(files).chat_template == "{{ 1 }}"


def test_begin_and_end_come_from_the_small_files(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>", "chat_template": "{{ 1 }}"},
        generation_config={"eos_token_id": [5, 266]},
    )
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (267, (266, 5), "{{ 1 }}")


def test_the_tokenizers_own_end_is_the_one_that_templates_write(tmp_path: Path) -> None:
    """Phi-4-mini's generation_config.json names <|end|> before the tokenizer's <|endoftext|>."""
    tokenizer = load(tmp_path, tokenizer_config={"eos_token": "<|end|>"}, generation_config={"eos_token_id": [5, 266]})
    messages = [{"role": "user", "content": "a"}]
    found = ChatTemplates(tokenizer).render([messages], "{{ messages[0].content + eos_token }}")
    assert found == ["a<|end|>"]


def test_the_models_config_is_asked_when_no_one_else_names_an_end(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, config={"eos_token_id": 7, "bos_token_id": 3})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (3, (7,))


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    assert load(tmp_path, special_tokens_map={"eos_token": "<|end|>"}).eos_ids == (266,)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    files = write(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert load_tokenizer(files).chat_template == "new"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(tmp_path, tokenizer_config={"chat_template": named}).chat_template == "d"


@pytest.mark.parametrize("in_files", [False, True])
def test_requests_with_tools_get_the_template_for_them(tmp_path: Path, in_files: bool) -> None:
    """Named templates as in Command R's tokenizer_config.json, or as transformers saves them since."""
    plain, used = (
        "\n{{ messages[0].content }} \n",
        "\n  {% set all = tools %}\n{{ all[0].name ~ messages[0].content }}\n  \n",
    )
    if in_files:
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(used)
        tokenizer = load(tmp_path)
    else:
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": used}]
        tokenizer = load(tmp_path, tokenizer_config={"chat_template": named})
    whole = ChatTemplates(tokenizer)
    for source, tools in ((plain, None), (used, [{"name": "look"}])):
        messages = [[{"role": "user", "content": "a"}]]
        assert whole.render(messages, tools=tools) == ChatTemplates(tokenizer).render(messages, source, tools=tools)


def test_add_bos_token_in_the_configuration_decides(tmp_path: Path) -> None:
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert spell(load(tmp_path, tokenizer_config=names), "the", True) == ["the"]
    config = {**names, "add_bos_token": True, "add_eos_token": True}
    assert spell(load(tmp_path, tokenizer_config=config), "the", True) == ["<|start|>", "the", "<|end|>"]


def test_tokens_only_the_configuration_knows_are_added_at_their_ids(tmp_path: Path) -> None:
    entry = {"content": "<new>", "special": True}
    tokenizer = load(tmp_path, tokenizer_config={"added_tokens_decoder": {"270": entry}})
    assert tokenizer.encode("<new>") == [270]
    assert 270 in tokenizer.special_ids
    with pytest.raises(ModelLoadError, match="<new>.* at 900.* at 270"):
        load(tmp_path, tokenizer_config={"added_tokens_decoder": {"900": entry}})


def test_truncation_and_padding_of_the_training_setup_are_off(tmp_path: Path) -> None:
    backend, _ = build_gguf_tokenizer(byte_level(), "model.gguf")
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles("tiny", tmp_path, "hf"))
    assert tokenizer.decode(tokenizer.encode("a long enough text")) == "a long enough text"


def test_a_saved_sentencepiece_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from_directory = load(tmp_path, sentencepiece())
    assert spell(from_directory, "hello the 日") == spell(
        Tokenizer(*build_gguf_tokenizer(sentencepiece(), "x")), "hello the 日"
    )


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    stored["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="'BPEDecoder' is not supported"):
        load_tokenizer(files)


def test_batches_are_encoded_like_single_texts(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    texts = ["the", "", "hello 12"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_half_a_character_is_refused_before_it_reaches_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 2"):
        load(tmp_path).encode("ab\ud83d")


def test_bad_words_are_found_at_the_start_and_after_a_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    spelled = [tokenizer.decode(ids) for ids in tokenizer.bad_word_ids("hello")]
    assert spelled == ["hello", " hello"]
    assert [len(ids) for ids in tokenizer.bad_word_ids("x")] == [1]  # " x" is two tokens: the second is "x" itself


def test_a_chat_template_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: is not UTF-8 text"):
        load_tokenizer(files)

    def fail(path: Path, **options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: cannot be read: Permission denied"):
        load_tokenizer(files)
