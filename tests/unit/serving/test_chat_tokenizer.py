"""`LLM.get_tokenizer()` answers to the calls people know from transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.serving.chat_tokenizer import ChatTokenizer
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams
from tests.unit.serving.conftest import MakeLLM
from tests.unit.serving.scripted import EOS, EOS_ID, TOKENIZER, VOCAB, ids

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(TOKENIZER)


def test_what_is_no_text_and_no_token_is_refused(tokenizer: ChatTokenizer) -> None:
    wrong: list[Any] = ["x", [-1], -1, [1.5], 1.5, ["a"], None]
    for ids_of in wrong:
        with pytest.raises(InvalidRequest, match="token_ids: must be token ids"):
            tokenizer.decode(ids_of)
    with pytest.raises(InvalidRequest, match="text: must be text, got int"):
        tokenizer.encode(wrong[2])
    assert tokenizer.decode(np.array(ids("hey"))) == tokenizer.decode(torch.tensor(ids("hey"))) == "hey"  # type: ignore[arg-type]
    assert tokenizer.decode([]) == ""


def test_conversations_become_text_or_token_ids(tokenizer: ChatTokenizer) -> None:
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert text == "user:hello\nbot:"
    assert tokenizer.apply_chat_template(HELLO, tokenize=False) == "user:hello\n"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=True) == ids(text)
    assert tokenizer.apply_chat_template([HELLO, HELLO], tokenize=False) == ["user:hello\n"] * 2
    assert tokenizer.apply_chat_template(HELLO, return_dict=True).input_ids == ids("user:hello\n")
    own = tokenizer.apply_chat_template(
        HELLO, tokenize=False, chat_template="{{ messages[0].content }}{{ mark }}", mark="!"
    )
    assert own == "hello!"


def test_the_rendered_prompt_is_what_chat_sends(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: prompt)
    sampling = SamplingParams(max_tokens=200)
    rendered = llm.get_tokenizer().apply_chat_template(HELLO, add_generation_prompt=True)
    (direct,) = llm.generate({"prompt_token_ids": rendered}, sampling)
    (chat,) = llm.chat(HELLO, sampling)
    assert direct.prompt_token_ids == chat.prompt_token_ids
    assert direct.outputs[0].text == chat.outputs[0].text


def test_text_is_encoded_and_decoded(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode("añb") == ids("añb")
    assert tokenizer.decode(ids("añb")) == "añb"
    assert tokenizer.decode(ids("a")[0]) == "a"
    assert tokenizer.decode([*ids("a"), EOS_ID]) == f"a{EOS}"
    assert tokenizer.decode([*ids("a"), EOS_ID], skip_special_tokens=True) == "a"
    assert tokenizer.batch_decode([ids("a"), ids("b")]) == ["a", "b"]
    encoded = tokenizer("ab")
    assert encoded.input_ids == encoded["input_ids"] == ids("ab")
    assert encoded.attention_mask == [1, 1]
    assert tokenizer(["ab", "c"]).input_ids == [ids("ab"), ids("c")]
    assert tokenizer(["ab", "c"]).attention_mask == [[1, 1], [1]]


def test_the_vocabulary_is_known_by_token_and_id(tokenizer: ChatTokenizer) -> None:
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (EOS_ID, EOS)
    assert (tokenizer.bos_token_id, tokenizer.bos_token) == (None, None)
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB == len(tokenizer.get_vocab())
    assert tokenizer.all_special_ids == [EOS_ID]
    assert tokenizer.all_special_tokens == [EOS]
    assert tokenizer.tokenize("a b") == ["a", "Ġ", "b"]
    assert tokenizer.convert_tokens_to_ids("Ġ") == ids(" ")[0]
    assert tokenizer.convert_tokens_to_ids(["Ġ", "no such"]) == [ids(" ")[0], None]
    assert tokenizer.convert_ids_to_tokens([EOS_ID, 2**40]) == [EOS, None]


def test_options_that_would_change_the_result_are_refused(tokenizer: ChatTokenizer) -> None:
    assert tokenizer("a", padding=False, return_tensors=None).input_ids == ids("a")
    with pytest.raises(InvalidRequest, match="^return_tensors"):
        tokenizer("a", return_tensors="pt")
    with pytest.raises(InvalidRequest, match="^conversation: is empty"):
        tokenizer.apply_chat_template([])
    with pytest.raises(InvalidRequest, match="^truncation"):
        tokenizer.apply_chat_template(HELLO, truncation=True)
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs\.enable_thinking: is not read"):
        tokenizer.apply_chat_template(HELLO, enable_thinking=True)
