"""Offline: a prompt is registered, listed and removed by its name."""

from __future__ import annotations

import pytest

from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams
from tests.unit.serving.conftest import MakeLLM
from tests.unit.serving.scripted import ids

SYSTEM = "You answer in verse, always, whatever is asked."
ONE = SamplingParams(max_tokens=1)


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


def test_a_registered_prompt_is_found_to_its_last_token(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    prefix = llm.register_prefix("verse", SYSTEM)
    assert (prefix.name, prefix.num_tokens) == ("verse", len(ids(SYSTEM)))
    assert llm.prefixes() == (prefix,)
    (output,) = llm.generate(SYSTEM + " Hello?", ONE)
    assert output.num_cached_tokens == len(ids(SYSTEM))
    llm.remove_prefix("verse")
    assert llm.prefixes() == ()


def test_token_ids_and_the_beginning_of_a_conversation_can_be_registered(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    assert llm.register_prefix("ids", ids("abcdef")).num_tokens == 6
    messages = [{"role": "system", "content": SYSTEM}]
    chat = llm.register_prefix("chat", messages)
    (output,) = llm.chat([*messages, {"role": "user", "content": "Hello?"}], ONE)
    assert output.num_cached_tokens == chat.num_tokens == len(ids(f"system:{SYSTEM}\n"))


def test_a_list_of_one_prompt_is_that_prompt_and_no_conversation(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    assert llm.register_prefix("listed", [{"prompt": SYSTEM}]).num_tokens == len(ids(SYSTEM))


def test_what_cannot_be_registered_is_refused_by_name(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    with pytest.raises(InvalidRequest, match="name"):
        llm.register_prefix("", SYSTEM)
    with pytest.raises(InvalidRequest, match="one at a time"):
        llm.register_prefix("two", ["a", "b"])  # type: ignore[arg-type]
    for neither in (5, None):
        with pytest.raises(InvalidRequest, match="prompts: cannot be a "):
            llm.register_prefix("number", neither)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is empty"):
        llm.register_prefix("nothing", "")
    with pytest.raises(InvalidRequest, match=r"name: 'nobody' is not registered"):
        llm.remove_prefix("nobody")


def test_a_reset_forgets_registered_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    llm.register_prefix("verse", SYSTEM)
    assert llm.reset_prefix_cache() > 0
    assert llm.prefixes() == ()
