from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from quire.serving.requests import Prompt, RequestMaker, pair_sampling, read_conversations, read_prompts
from quire.types.errors import InvalidRequest
from quire.types.request import pack_tokens
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, ids

GREEDY = SamplingParams(temperature=0)


def test_text_is_tokenized_and_ids_are_left_alone() -> None:
    maker = RequestMaker(TOKENIZER, ())
    first, second = maker.make([Prompt(text="ab"), Prompt(token_ids=(7,))], [GREEDY, GREEDY])
    assert first.prompt_token_ids == pack_tokens(ids("ab"))
    assert second.prompt_token_ids == pack_tokens([7])
    assert first.request_id != second.request_id


def test_a_sequence_ends_at_the_eos_of_tokenizer_and_model_and_at_stop_tokens() -> None:
    maker = RequestMaker(TOKENIZER, (3, EOS_ID))
    (request,) = maker.make([Prompt(text="a")], [SamplingParams(stop_token_ids=[9, 3])])
    assert request.rules.end_ids == (EOS_ID, 3, 9)
    assert request.rules.eos_ids == (EOS_ID, 3)


def test_ignoring_eos_leaves_only_the_stop_tokens() -> None:
    maker = RequestMaker(TOKENIZER, (3,))
    (request,) = maker.make([Prompt(text="a")], [SamplingParams(ignore_eos=True, stop_token_ids=[9])])
    assert (request.rules.end_ids, request.rules.eos_ids) == ((9,), ())


def test_bad_words_become_token_sequences() -> None:
    (request,) = RequestMaker(TOKENIZER, ()).make([Prompt(text="a")], [SamplingParams(bad_words=["no"])])
    assert tuple(ids("no")) in request.rules.bad_words


def test_without_a_tokenizer_only_ids_are_taken_and_nothing_may_need_text() -> None:
    maker = RequestMaker(None, (3,))
    (request,) = maker.make([Prompt(token_ids=(1, 2))], [GREEDY])
    assert request.rules.end_ids == (3,)
    with pytest.raises(InvalidRequest, match=r"^prompts.*token ids"):
        maker.make([Prompt(text="a")], [GREEDY])
    with pytest.raises(InvalidRequest, match=r"^stop.*tokenizer"):
        maker.make([Prompt(token_ids=(1,))], [SamplingParams(stop="x")])
    with pytest.raises(InvalidRequest, match=r"^bad_words.*tokenizer"):
        maker.make([Prompt(token_ids=(1,))], [SamplingParams(bad_words=["x"])])


def test_priorities_are_one_per_prompt() -> None:
    maker = RequestMaker(TOKENIZER, ())
    (request,) = maker.make([Prompt(text="a")], [GREEDY], priorities=[4])
    assert request.priority == 4
    with pytest.raises(InvalidRequest, match="^priority"):
        maker.make([Prompt(text="a")], [GREEDY], priorities=[1, 2])


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(token_ids=(1, 2))]),
        ([[1, 2], [3]], [Prompt(token_ids=(1, 2)), Prompt(token_ids=(3,))]),
        ({"prompt": "a"}, [Prompt(text="a")]),
        ([{"prompt": "a"}, {"prompt_token_ids": [5]}], [Prompt(text="a"), Prompt(token_ids=(5,))]),
        (["a", [1], {"prompt": "b"}], [Prompt(text="a"), Prompt(token_ids=(1,)), Prompt(text="b")]),
        ([], []),
    ],
)
def test_every_form_of_prompt_is_read(given: object, read: list[Prompt]) -> None:
    assert read_prompts(given) == read  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (5, "prompts"),
        (["a", 5], r"prompts\[1\]"),
        ([[1], [True]], r"prompts\[1\]"),
        ([[1.0]], r"prompts\[0\]"),
        ([1, "a"], "prompts"),
        ({"prompt": 5}, r"prompts\.prompt"),
        ({"promt": "a"}, r"prompts\.promt"),
        ({"prompt_token_ids": "12"}, r"prompts\.prompt_token_ids"),
        ({}, "prompts"),
    ],
)
def test_what_is_no_prompt_is_refused_by_place(given: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}"):
        read_prompts(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [True, 1.0, "7", None])
def test_the_item_that_is_no_token_id_is_named_wherever_it_stands_in_a_long_prompt(wrong: object) -> None:
    for place in (0, 500, 999):
        ids: list[object] = [7] * 1_000
        ids[place] = wrong
        with pytest.raises(InvalidRequest, match=rf"^prompts\[0\]: must hold token ids .* got {wrong!r}$"):
            read_prompts([ids])  # type: ignore[list-item]


def test_a_kind_of_whole_number_is_a_token_id() -> None:
    token = IntEnum("Token", {"END": 5}).END  # type: ignore[attr-defined]
    assert read_prompts([[1, token]]) == [Prompt(token_ids=(1, 5))]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (np.array([5, 6]), [(5, 6)]),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([np.array([5]), [np.int64(6), 7]], [(5,), (6, 7)]),
        ([np.int32(5), np.int32(6)], [(5, 6)]),
        ({"prompt_token_ids": np.array([5, 6])}, [(5, 6)]),
    ],
)
def test_arrays_of_token_ids_are_taken_for_the_lists_they_hold(given: Any, read: list[tuple[int, ...]]) -> None:
    prompts = read_prompts(given)
    assert [prompt.token_ids for prompt in prompts] == read
    assert {type(token) for prompt in prompts for token in prompt.token_ids or ()} == {int}


def test_an_array_that_holds_no_token_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        read_prompts([np.array([0.5])])


def test_one_sampling_serves_all_prompts_and_a_list_must_match() -> None:
    greedy, random = SamplingParams(temperature=0), SamplingParams()
    assert list(pair_sampling(greedy, 3)) == [greedy] * 3
    assert list(pair_sampling([greedy, random], 2)) == [greedy, random]
    assert list(pair_sampling(None, 1)) == [SamplingParams()]
    with pytest.raises(InvalidRequest, match=r"sampling_params.*2 entries for 3 prompts"):
        pair_sampling([greedy, random], 3)
    with pytest.raises(InvalidRequest, match=r"sampling_params\[0\]"):
        pair_sampling([{"temperature": 0}], 1)  # type: ignore[list-item]


def test_one_conversation_and_many_are_told_apart() -> None:
    assert read_conversations([HELLO]) == [[HELLO]]
    assert read_conversations([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]
    assert read_conversations([]) == []
    for wrong in ("hello", HELLO, [[HELLO], "hello"], [[HELLO], HELLO], [[HELLO], []]):
        with pytest.raises(InvalidRequest, match="^messages"):
            read_conversations(wrong)  # type: ignore[arg-type]
